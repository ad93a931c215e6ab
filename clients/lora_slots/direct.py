"""The direct door: tokenise here, lease the adapter from `lora_router`, stream from `tensorrt_llm` itself.

Against the ensemble it gives two things: a cancel reaches the engine within milliseconds, and a token costs half. The
lease is given back whatever happens.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

import structlog

from lora_slots.client import Client, until_after
from lora_slots.client_wire import SAMPLING, Message, Options, checked_sampling, tokens_of
from lora_slots.errors import ServerError, Unreachable
from lora_slots.text import Tokenizer

log = structlog.get_logger("lora_slots.client")

ENGINE = "tensorrt_llm"
_UNSURE = ("DEADLINE_EXCEEDED", "CANCELLED")
"""After these the lease may have been granted, and the answer lost."""
_NAMES = {"top_k": "runtime_top_k", "top_p": "runtime_top_p"}


@dataclass(frozen=True, slots=True)
class Lease:
    """What the slot manager granted. `task_id` None: the base model answers, by the cold policy that was asked for."""

    request_id: str
    adapter: str | None
    task_id: int | None
    digest: str | None
    found_in: str | None
    waited_s: float
    ref: str | None = None
    """`adapter@version`: what was granted where `adapter` is an alias."""

    @classmethod
    def of(cls, request_id: str, adapter: str, answer: Mapping[str, Any]) -> Self:
        """The lease that `lora_router` answered to the operation `lease`."""
        found, waited_s = answer.get("found_in"), float(answer.get("waited_s", 0.0))
        ref = f"{answer['adapter']}@{answer['version']}" if "version" in answer else None
        return cls(request_id, adapter, answer["task_id"], answer["digest"], found, waited_s, ref)


class DirectClient(Client):
    """A Client that goes to the engine itself. For any number of threads; `url` is host:port of Triton's gRPC door.

    `cold` may be "base" too: the base model answers while the adapter is warmed, and `lease.task_id` is None.
    """

    def __init__(self, url: str, tokenizer: Tokenizer, **connection: Any) -> None:
        """`connection`: the further arguments of Client."""
        super().__init__(url, **connection)
        self._tokenizer = tokenizer
        self._mine = threading.local()

    @property
    def lease(self) -> Lease | None:
        """The lease of this thread's running or last request: what answered it."""
        return getattr(self._mine, "lease", None)

    def _pieces(self, text: str, adapter: str | None, options: Options, *, stream: bool) -> Generator[str, None, None]:
        timeout_s = options.get("timeout_s", self._timeout_s)
        until = until_after(timeout_s)
        ids, decoder = self._tokenizer.encode(text), self._tokenizer.incremental_decoder()

        def tokens() -> Generator[list[int], None, None]:
            lease = self._mine.lease = self._acquire(adapter, options, until, timeout_s)
            try:
                request = self._engine_request(ids, lease, options, stream=stream)
                for response in self._responses(request, adapter, until, timeout_s):
                    yield tokens_of(response)
            finally:
                if lease.task_id is not None:
                    self._give_back(lease.request_id)

        with closing(self._tried(tokens, adapter, options, timeout_s)) as tried:
            for new in tried:
                if piece := decoder.push(new):
                    yield piece
        if rest := decoder.flush():
            yield rest

    def _acquire(self, adapter: str | None, options: Options, until: float | None, timeout_s: float | None) -> Lease:
        request_id = options.get("request_id") or uuid.uuid4().hex
        if adapter is None:
            return Lease(request_id, None, None, None, None, 0.0)
        asked = {
            "adapter": adapter,
            "request_id": request_id,
            "max_tokens": options.get("max_tokens", 64),
            "cold": options.get("cold") or "wait",
        }
        if session := options.get("session"):
            asked["session"] = session
        try:
            answer = self._operation("lease", asked, until, timeout_s)
        except BaseException as error:
            if not isinstance(error, ServerError) or isinstance(error, Unreachable) or error.code in _UNSURE:
                self._give_back(request_id)
            raise
        return Lease.of(request_id, adapter, answer)

    def _give_back(self, request_id: str) -> None:
        try:
            self.operate("end", request_id=request_id)
        except ServerError as error:
            log.warning("lease not given back, its deadline ends it", lease=request_id, why=str(error))

    def _missed(self, adapter: str) -> None:
        """It is known which version of an alias it was."""
        super()._missed((self.lease.ref if self.lease else None) or adapter)

    def _engine_request(self, ids: Sequence[int], lease: Lease, options: Options, *, stream: bool) -> Any:
        message = Message(ENGINE, lease.request_id, ["output_ids", "sequence_length"])
        message.ids("input_ids", ids)
        message.value("input_lengths", len(ids), "INT32")
        message.value("request_output_len", options.get("max_tokens", 64), "INT32")
        end_id = options.get("end_id")
        message.value("end_id", self._tokenizer.eos_ids[0] if end_id is None else end_id, "INT32")
        message.value("streaming", stream, "BOOL")
        message.value("exclude_input_in_output", True, "BOOL")
        if lease.task_id is not None:
            message.value("lora_task_id", lease.task_id, "UINT64")
        for name, value in checked_sampling(options.get("sampling")).items():
            message.value(_NAMES.get(name, name), value, SAMPLING[name])
        if stop := options.get("stop"):
            words = self._tokenizer.word_list(stop)
            message.ids("stop_words_list", words.reshape(-1).tolist(), (1, *words.shape[-2:]))
        return message.made
