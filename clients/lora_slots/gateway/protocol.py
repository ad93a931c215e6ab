"""uvicorn's HTTP protocol with bounds on what comes before anybody is asked who they are.

The parser keeps every header until the last one is there, and waits for it for ever. Here a request's headers have a
size and a time; the trailers of a chunked body have a size, and what is sent on after an answer has a time. A port has
a number of connections; who comes beyond it is told so if he asks at once.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lora_slots.gateway.answers import Receive, Send, send_error
from lora_slots.gateway.errors import ApiError, unavailable
from lora_slots.gateway.record import REQUEST_ID, request_id_of

log = structlog.get_logger("lora_slots.gateway")
MAX_HEADER_BYTES = 65_536
_PIECE = 4096
"""Bytes that are parsed before the size is looked at; headers larger by up to so many may pass."""
MOST_CONNECTIONS = 900
"""Of a port; with what else the process has open, within the 1,024 files that most systems allow one."""
_SURPLUS_S = 1.0
"""In which a connection beyond them must have asked, to be told."""
_CHUNK_COST = 8
"""Bytes that may frame one byte of a chunked body: a chunk of one has five."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    seconds = 60.0
    """In which headers must be complete."""
    most = MOST_CONNECTIONS

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._between = True
        """No request's body is being received: what comes are headers."""
        self._header_bytes = self._framed_bytes = self._body_bytes = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there, and has to say something."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self.seconds = min(self.seconds, _SURPLUS_S)
            self.app = self._refuse_surplus
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, as long as it is within bounds."""
        while data and not self.transport.is_closing():
            if not self._between:
                self._body_received(data)
                return
            self._expect()
            piece, data = data[:_PIECE], data[_PIECE:]
            self._header_bytes += len(piece)
            super().data_received(piece)
            if self._between and self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes", "request_too_large")

    def _body_received(self, data: bytes) -> None:
        if self.cycle.response_complete:
            self._expect()  # nobody reads it, so that nobody else would ever stop it
        self._framed_bytes += len(data)
        super().data_received(data)
        if not self._between and self._framed_bytes > MAX_HEADER_BYTES + (1 + _CHUNK_COST) * self._body_bytes:
            text = f"Chunk sizes and trailers of the body are larger than {MAX_HEADER_BYTES} bytes"
            self._refuse(431, text, "request_too_large")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._header_bytes = max(1, self._header_bytes)
        self._expect()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are of no use to anybody."""
        if self._between:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request can be answered."""
        self._between = False
        self._header_bytes = self._framed_bytes = self._body_bytes = 0
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request may follow."""
        self._between = True
        self._expect_nothing()
        super().on_message_complete()

    async def _refuse_surplus(self, scope: Any, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the form of ASGI
        """The application of a connection beyond the most there may be."""
        error = unavailable(f"More than {self.most} connections are open", "too_many_connections")
        request_id = request_id_of(None) or ""
        error.headers |= {"connection": "close", REQUEST_ID: request_id}
        log.info("refused", request_id=request_id, status=error.status, why=str(error))
        await send_error(error, send)

    def _expect(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.seconds, self._too_late)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self._is_answering():
            self._expect()  # the answer goes on; the next request is late after it
        elif self._between and self._header_bytes:
            text = f"The headers were not here within {self.seconds:g} s"
            self._refuse(408, text, "request_timeout")
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, text: str, code: str) -> None:
        """Tell what is wrong, unless another request's answer would be torn by it, and hang up."""
        if not self._is_answering():
            body = ApiError(status, text, code=code).body()
            request_id = request_id_of(None)
            log.info("refused", request_id=request_id, status=status, why=text)
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n{REQUEST_ID}: {request_id}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def protocol(seconds: float, most: int = MOST_CONNECTIONS) -> type[asyncio.Protocol]:
    """The protocol of at most so many connections, on which headers must be complete within `seconds`."""
    return type("Protocol", (BoundedProtocol,), {"seconds": seconds, "most": most})
