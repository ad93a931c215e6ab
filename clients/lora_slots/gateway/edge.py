"""What surrounds every request of a port: its id, the headers of its answer, its line in the log. Plain ASGI."""

from __future__ import annotations

import ipaddress
import time
from typing import Any

import structlog

from lora_slots.gateway.answers import Message, Receive, Send, send_error
from lora_slots.gateway.errors import ApiError, invalid
from lora_slots.gateway.metrics import GatewayMetrics
from lora_slots.gateway.record import REQUEST_ID, Record, request_id_of

log = structlog.get_logger("lora_slots.gateway")


class Edge:
    """Wraps an application: `scope["state"]["record"]` is the request's Record."""

    def __init__(self, app: Any, metrics: GatewayMetrics | None = None) -> None:
        """With `metrics` every request is counted in them."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == REQUEST_ID.encode()), None)
        request_id = request_id_of(given)
        record = Record(request_id or request_id_of(None) or "", time.monotonic())
        scope.setdefault("state", {})["record"] = record
        status = 0

        async def with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *record.headers()]
            await send(message)

        try:
            if request_id is None:
                text = f"{REQUEST_ID}: must be 1 to 128 visible ASCII characters"
                await send_error(invalid(text, REQUEST_ID), with_headers)
                return
            await self._app(scope, receive, with_headers)
        except Exception:  # the client gets a sentence, the log the rest
            log.exception("request failed", request_id=record.request_id)
            record.outcome = "internal_error"
            if not status:
                text = "Something went wrong here; the request's id leads to the log."
                await send_error(ApiError(500, text, kind="server_error", code="internal_error"), with_headers)
        finally:
            route = f"{scope['method']} {getattr(scope.get('route'), 'path', '-')}"
            if self._metrics is not None:
                self._metrics.ended(route, record)
            _tell(route, record, status)


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
            given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
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


def _tell(route: str, record: Record, status: int) -> None:
    seconds = time.monotonic() - record.began
    tenant = record.caller.tenant if record.caller else None
    fields = {
        "time": round(time.time() - seconds, 3),
        "request_id": record.request_id,
        "route": route,
        "status": status or 499,  # nobody was there to be told
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
