"""gRPC calls to one server, any number of them on one connection, which is made again when it is lost."""

from __future__ import annotations

import asyncio
from weakref import WeakSet

from lora_slots.gateway.connection import Call, Connection
from lora_slots.gateway.grpc_wire import CallError, message, request_fields

CONNECT_S = 20.0
"""In which a server must have said that it speaks HTTP/2."""


class Channel:
    """Calls to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._connection: Connection | None = None
        """For new calls."""
        self._all: WeakSet[Connection] = WeakSet()
        """With those that go away, and end when their last call has."""
        self._connecting: asyncio.Task[Connection] | None = None

    async def call(self, method: str, request: bytes) -> Call:
        """Begin a call of `method` (/service/name) with one message.

        Raises:
            Lost: the connection was lost while this waited.
            OSError: nobody answers there (TimeoutError: not in time).
        """
        while True:
            connection = self._connection
            if connection is None or not connection.is_open:
                connection = await self._connected()
            if connection.has_room or not connection.is_open:
                break
            await connection.change()
        return connection.call(request_fields(self._authority, method), message(request))

    async def ask(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """The one message that answers one.

        Raises:
            CallError: another status than OK.
            Lost, OSError: as `call`, or the answer broke off; TimeoutError: not in time.
        """
        async with asyncio.timeout(timeout_s):
            call = await self.call(method, request)
            try:
                found = await call.received()
                while more := await call.received():
                    found += more
            finally:
                call.cancel()
        if len(found) != 1:
            raise CallError("INTERNAL", f"{len(found)} messages came where one was expected")
        return found[0]

    def close(self) -> None:
        """End every call."""
        if self._connecting is not None:
            self._connecting.cancel()
        for connection in list(self._all):
            connection.close("the connection was closed")

    async def _connected(self) -> Connection:
        """A new connection, one for all who wait for it."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._connect_ended)
        return await asyncio.shield(self._connecting)  # who goes while it is made takes it from nobody else

    def _connect_ended(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # everybody who waited has it

    async def _connect(self) -> Connection:
        async with asyncio.timeout(CONNECT_S):
            _, made = await asyncio.get_running_loop().create_connection(Connection, self._host, self._port)
            try:
                await made.greeted()
            except BaseException:
                made.close("the connection was given up")
                raise
        self._connection = made
        self._all.add(made)
        return made
