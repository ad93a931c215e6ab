"""One HTTP/2 connection in the event loop, and the gRPC calls on it.

Rules:
1. A call ends by itself or by `cancel`, and the server hears of the latter at once.
2. What a connection loses, its calls hear as Lost.
3. Per message of an answer there is no task, no lock and no copy but of its bytes; a waiting reader is woken once for
   all that came.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import cast

from lora_slots.gateway.grpc_wire import CallError, Messages, check_answer, check_end
from lora_slots.gateway.http2 import Http2
from lora_slots.gateway.http2_events import Data, Event, Failed, GoingAway, Headers, Reset, Settings
from lora_slots.gateway.http2_frames import REFUSED_STREAM

_MOST_UNSENT = 2**26
"""Bytes that wait for a peer who takes nothing, before it is given up."""
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds, and tries: a machine that vanished is noticed within a minute."""


class Lost(ConnectionError):
    """The connection, or the stream on it, ended before the answer."""


class Refused(Lost):
    """The server has not begun it, and says so: it may be asked again (RFC 9113, 8.7)."""


class Call:
    """One call whose request is on its way. For one reader."""

    __slots__ = ("_connection", "_cut", "_end", "_is_over", "_messages", "_stream_id", "_waiting")

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self._connection, self._stream_id = connection, stream_id
        self._cut = Messages()
        self._messages: list[bytes] = []
        self._waiting: asyncio.Future[None] | None = None
        self._is_over = False
        self._end: CallError | Lost | None = None
        """Why it ended; None: it runs, or ended well."""

    async def received(self) -> list[bytes]:
        """The messages that came since the last call, at least one; none: the answer has ended.

        Raises:
            CallError: it ended with another status than OK.
            Lost: it broke off.
        """
        while not self._messages:
            if self._is_over:
                if self._end is not None:
                    raise self._end
                return []
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        messages, self._messages = self._messages, []
        if not self._is_over:
            self._connection.read(self._stream_id)
        return messages

    def cancel(self) -> None:
        """End it, if it has not ended."""
        if not self._is_over:
            self.over(None)
            self._connection.cancel(self._stream_id)

    def data(self, content: bytes, *, ended: bool) -> None:
        """A part of the answer has come."""
        try:
            found = self._cut.push(content)
            if ended:
                check_end({})
        except CallError as error:
            self._connection.cancel(self._stream_id)
            self.over(error)
            return
        if found:
            self._messages += found
            self._wake()
        elif not self._messages:  # else a message beyond the window would wait for ever for its end
            self._connection.read(self._stream_id)

    def fields(self, fields: Headers) -> None:
        """Headers or trailers have come."""
        try:
            if b":status" in fields.fields:
                check_answer(fields.fields)
            if fields.ended:
                check_end(fields.fields)
                if self._cut.is_amid:
                    raise CallError("INTERNAL", "the answer ended amid a message")
        except CallError as error:
            self._connection.cancel(self._stream_id)
            self.over(error)
            return
        if fields.ended:
            self.over(None)

    def over(self, why: CallError | Lost | None) -> None:
        """Nothing more comes."""
        if not self._is_over:
            self._is_over, self._end = True, why
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, from its making to its loss."""

    def __init__(self) -> None:
        self._machine = Http2()
        self._calls: dict[int, Call] = {}
        self._transport: asyncio.Transport | None = None
        self._why = "Connection lost"
        self._changed = asyncio.Event()
        """Something happened that calls may wait for; replaced each time."""
        self._greeted = False

    @property
    def is_open(self) -> bool:
        """Whether calls may begin here, now or when others have ended."""
        return self._transport is not None and not self._transport.is_closing() and self._machine.is_open

    @property
    def has_room(self) -> bool:
        """Whether one more call may run beside the others."""
        return self._machine.has_room

    async def greeted(self) -> None:
        """Wait until the server has spoken. Raises Lost."""
        while not self._greeted:
            if not self.is_open:
                raise Lost(self._why)
            await self._changed.wait()

    async def change(self) -> None:
        """Wait until there may be room that there was not."""
        await self._changed.wait()

    def call(self, fields: list[tuple[bytes, bytes]], body: bytes) -> Call:
        """Begin a call. Raises Lost."""
        if not self.is_open:
            raise Lost(self._why)
        stream_id = self._machine.request(fields, body)
        call = self._calls[stream_id] = Call(self, stream_id)
        self._flush()
        return call

    def read(self, stream_id: int) -> None:
        """All that came of a call was read."""
        self._machine.read(stream_id)
        self._flush()

    def cancel(self, stream_id: int) -> None:
        """End a call; what still comes of it is dropped."""
        self._machine.cancel(stream_id)
        self._forget(stream_id)
        self._flush()

    def close(self, why: str) -> None:
        """End it, and every call on it."""
        self._lose(why)
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what a client says first."""
        self._transport = cast(asyncio.Transport, transport)
        opened: socket.socket = transport.get_extra_info("socket")
        with suppress(OSError):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE.items():
                opened.setsockopt(socket.IPPROTO_TCP, option, value)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Pass on what the server says."""
        calls = self._calls
        for event in self._machine.receive(data):
            if type(event) is Data:
                call = calls.get(event.stream_id)
                if call is not None:
                    call.data(event.content, ended=event.ended)
                    if event.ended:
                        self._forget(event.stream_id)
            else:
                self._rare(event)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has gone, or we have."""
        self._lose(str(exc) if exc else "Connection lost")

    def _rare(self, event: Event) -> None:
        match event:
            case Headers(stream_id, _, ended):
                if (call := self._calls.get(stream_id)) is not None:
                    call.fields(event)
                if ended:
                    self._forget(stream_id)
            case Reset(stream_id, reason):
                if (call := self._calls.get(stream_id)) is not None:
                    lost = Refused if reason == REFUSED_STREAM else Lost
                    call.over(lost(f"the server reset the stream, HTTP/2 error {reason}"))
                self._forget(stream_id)
            case Settings():
                self._greeted = True
                self._tell()
            case GoingAway():
                self._forget(0)
            case Failed(why):
                self.close(f"it speaks no HTTP/2 that we know, {why}")

    def _forget(self, stream_id: int) -> None:
        """A stream has ended."""
        self._calls.pop(stream_id, None)
        self._tell()
        if not self._calls and not self._machine.is_open and self._transport is not None:
            self._flush()
            self._transport.close()

    def _lose(self, why: str) -> None:
        self._why = why
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.over(Lost(why))
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _flush(self) -> None:
        out = self._machine.take()
        if out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(out)
            if self._transport.get_write_buffer_size() > _MOST_UNSENT:
                self._transport.abort()
