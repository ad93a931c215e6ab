"""What surrounds every request of a port: its id, the headers of its answer, its line in the log. Plain ASGI."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from lora_slots.errors import UsageError
from lora_slots.gateway.answers import Message, Receive, Send, send_error
from lora_slots.gateway.errors import ApiError, invalid
from lora_slots.gateway.metrics import GatewayMetrics
from lora_slots.gateway.record import REQUEST_ID, Record, request_id_of

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")

log = structlog.get_logger("lora_slots.gateway")


class Edge:
    """Wraps an application: `scope["state"]["record"]` is the request's Record."""

    def __init__(
        self, app: Any, metrics: GatewayMetrics | None = None, around: Callable[[Any], Any] | None = None
    ) -> None:
        """
        Args:
            metrics: every request is counted in them.
            around: wraps the application and the errors that are made here, so that they too have its headers.
        """
        self._app, self._metrics = app, metrics
        self._inner = self._answer if around is None else around(self._answer)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, REQUEST_ID)
        record = Record(request_id_of(given) or request_id_of(None) or "", time.monotonic())
        scope.setdefault("state", {})["record"] = record

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *record.headers()]
            await send(message)

        try:
            await self._inner(scope, receive, with_headers)
        finally:
            route = f"{scope['method']} {getattr(scope.get('route'), 'path', '-')}"
            if self._metrics is not None:
                self._metrics.ended(route, record)
            _tell(route, record)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        record: Record = scope["state"]["record"]
        given = _header(scope, REQUEST_ID)
        try:
            if request_id_of(given) is None:
                text = f"{REQUEST_ID}: must be 1 to 128 visible ASCII characters"
                await send_error(invalid(text, REQUEST_ID), send)
                return
            await self._app(scope, receive, send)
        except Exception:  # the client gets a sentence, the log the rest
            log.exception("request failed", request_id=record.request_id)
            record.outcome = "internal_error"
            if not record.status:
                text = "Something went wrong here; the request's id leads to the log."
                await send_error(ApiError(500, text, kind="server_error", code="internal_error"), send)


class OwnHost:
    """Lets only requests through that name this machine, for a port without keys.

    A page in a browser can make its own name lead to 127.0.0.1, and would then be of the same origin as the gateway.
    """

    def __init__(self, app: Any, host: str) -> None:
        """`host` is the address that is listened on."""
        self._app, self._host = app, host

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "http":
            given = _header(scope, "host") or ""
            name = given.rpartition("]")[0].lstrip("[") if given.startswith("[") else given.partition(":")[0]
            if name != self._host and not is_loopback(name):
                text = f"This port answers to names of this machine only, not to {name[:80]!r}."
                await send_error(ApiError(403, text, code="unknown_host"), send)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine, whoever resolves it."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_origins(origins: Iterable[str]) -> None:
    """Raises UsageError: not as a browser sends it, so that no page would ever match."""
    for origin in origins:
        found = _ORIGIN.fullmatch(origin)
        if origin != "*" and (found is None or found.groups() in (("http", ":80"), ("https", ":443"))):
            raise UsageError(
                f"--cors-origin {origin!r}: must be scheme://host[:port] as browsers send it (small letters, no path, "
                "no slash at the end, no port that the scheme has anyway), such as https://page.example, or * for any"
            )


def _header(scope: Any, name: str) -> str | None:
    """The first header of that name."""
    wanted = name.encode()
    return next((value.decode("latin-1") for one, value in scope["headers"] if one == wanted), None)


def _tell(route: str, record: Record) -> None:
    seconds = time.monotonic() - record.began
    tenant = record.caller.tenant if record.caller else None
    fields = {
        "time": round(time.time() - seconds, 3),
        "request_id": record.request_id,
        "route": route,
        "status": record.status or 499,  # nobody was there to be told
        "outcome": record.outcome,
        "tenant": tenant.name if tenant else None,
        "model": record.model,
        "adapter": record.adapter,
        "digest": record.digest,
        "found_in": record.found_in,
        "wait_ms": None if record.waited_s is None else round(record.waited_s * 1e3, 1),
        "prompt_hash": record.prompt_hash,
        "prompt_tokens": record.prompt_tokens or None,
        "completion_tokens": record.completion_tokens or None,
        "ttft_ms": None if record.first_token_s is None else round(record.first_token_s * 1e3, 1),
        "seconds": round(seconds, 4),
    }
    log.info("request", **{name: value for name, value in fields.items() if value is not None})
