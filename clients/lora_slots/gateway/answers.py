"""One generating request on the wire: whole or streamed, cancelled when its client has gone."""

from __future__ import annotations

import asyncio
import secrets
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

import structlog
from starlette.responses import Response

from lora_slots.gateway.choice import TokenLogProb
from lora_slots.gateway.core import Gateway
from lora_slots.gateway.errors import ApiError
from lora_slots.gateway.generation import Generation
from lora_slots.gateway.wire import DONE, Answered, ChatWire, CompletionWire, Usage, Wire, error_event

log = structlog.get_logger("lora_slots.gateway")
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
STALL_S = 60.0
"""A client that takes nothing for so long while there is something to send has gone."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx holds back what it proxies otherwise
]


class GenerationResponse(Response):
    """Answers a request from its generation. Errors before the first byte have a status, later ones an event."""

    def __init__(self, gateway: Gateway, generation: Generation, wire: type[ChatWire | CompletionWire]) -> None:
        super().__init__()
        self._gateway, self._generation = gateway, generation
        self._job, self._record = generation.job, generation.record
        self._kind = wire
        self._begun = False
        self._sends = self._sent = 0
        """Sends begun, and ended."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the form of ASGI
        """The response as an ASGI application."""
        answering = asyncio.ensure_future(self._answer(self._counting(send)))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            while not answering.done():
                before = self._sends
                done, _ = await asyncio.wait((answering, leaving), timeout=STALL_S, return_when=FIRST_COMPLETED)
                if leaving in done and not answering.done():
                    self._record.outcome = "client_gone"
                    break
                if not done and self._sends == before and self._sends > self._sent:
                    self._record.outcome = "client_stalled"
                    break
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    def _counting(self, send: Send) -> Send:
        async def counted(message: Message) -> None:
            self._sends += 1
            await send(message)
            self._sent += 1

        return counted

    async def _answer(self, send: Send) -> None:
        try:
            tenant = self._record.caller.tenant if self._record.caller else None
            if tenant is None:
                await self._generate(send)
            else:
                with self._gateway.limits.running(tenant):
                    self._gateway.limits.prompt(tenant, self._job.prompt_tokens)
                    try:
                        await self._generate(send)
                    finally:
                        self._gateway.limits.answer(tenant, self._record.completion_tokens)
        except ApiError as error:
            self._record.outcome = error.code or error.kind
            if self._begun:
                await send({"type": "http.response.body", "body": error_event(error), "more_body": False})
            else:
                await send_error(error, send)

    async def _generate(self, send: Send) -> None:
        with self._gateway.metrics.running.track_inprogress():
            async with self._generation as generation:
                wire = self._wire()
                if self._job.stream:
                    self._record.first_token_s = time.monotonic() - self._record.began
                    await self._stream(generation, wire, send)
                else:
                    await self._whole(generation, wire, send)

    def _wire(self) -> Wire:
        prefix = "chatcmpl" if self._kind is ChatWire else "cmpl"
        return self._kind(
            f"{prefix}-{secrets.token_hex(12)}",
            int(time.time()),
            self._generation.served_model,
            log_probs=self._job.log_probs,
            with_usage=self._job.include_usage,
        )

    async def _stream(self, generation: Generation, wire: Wire, send: Send) -> None:
        log_probs = self._job.log_probs
        before = {choice.index: wire.first(choice.index) for choice in generation.choices}
        left = len(generation.choices)
        body = b""
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        self._begun = True
        async with aclosing(generation.texts()) as texts:
            async for choice, text in texts:
                body = before.pop(choice.index, b"") if before else b""
                if text or (log_probs and choice.finish_reason is not None):
                    body += wire.text(choice.index, text, choice.take_log_probs() if log_probs else ())
                if choice.finish_reason is not None:
                    body += wire.finish(choice.index, choice.finish_reason)
                    left -= 1
                if left and body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        if self._job.include_usage:
            body += wire.usage(self._usage(generation))
        await send({"type": "http.response.body", "body": body + DONE, "more_body": False})

    async def _whole(self, generation: Generation, wire: Wire, send: Send) -> None:
        texts: list[list[str]] = [[] for _ in generation.choices]
        log_probs: list[list[TokenLogProb]] = [[] for _ in generation.choices]
        async with aclosing(generation.texts()) as pieces:
            async for choice, text in pieces:
                texts[choice.index].append(text)
                if self._job.log_probs:
                    log_probs[choice.index] += choice.take_log_probs()
        answers = [
            Answered(choice, "".join(texts[choice.index]), log_probs[choice.index]) for choice in generation.choices
        ]
        await send_json(200, wire.whole(answers, self._usage(generation)), send)

    def _usage(self, generation: Generation) -> Usage:
        return Usage(self._job.prompt_tokens, sum(choice.num_tokens for choice in generation.choices))


async def gone(receive: Receive) -> None:
    """Returns when the client has gone (the body of its request was read before)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_error(error: ApiError, send: Send) -> None:
    """An error as a whole answer."""
    await send_json(error.status, error.body(), send, error.headers)


async def send_json(status: int, body: bytes, send: Send, headers: Any = None) -> None:
    """A whole answer of JSON."""
    pairs = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    pairs += [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})
