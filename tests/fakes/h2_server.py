"""A gRPC server by the library h2, in the test's own event loop, that answers as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, StreamEnded, StreamReset, WindowUpdated

from fakes.h2_peer import ANSWER, GOOD_END
from lora_slots.gateway.channel import Channel
from lora_slots.gateway.grpc_wire import message


class Server(asyncio.Protocol):
    """A server by h2: `answers` is called with each whole request."""

    def __init__(self, answers: Callable[[Server, int, bytes], object], settings: dict[int, int]) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.answers, self.settings = answers, settings
        self.bodies: dict[int, bytes] = {}
        self.resets: list[int] = []
        self.left: dict[int, bytes] = {}
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2.initiate_connection()
        self.h2.update_settings(self.settings)
        self.flush()

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self.heard(event)
        for stream_id in list(self.left):
            self.pump(stream_id)
        self.flush()

    def heard(self, event: Event) -> None:
        """One event."""
        match event:
            case DataReceived():
                assert event.stream_id is not None
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            case StreamEnded():
                self.answers(self, event.stream_id, self.bodies[event.stream_id][5:])
            case StreamReset():
                self.resets.append(event.stream_id)
                self.left.pop(event.stream_id, None)
            case WindowUpdated():
                pass

    def begin(self, stream_id: int) -> None:
        """Headers."""
        self.h2.send_headers(stream_id, ANSWER)

    def send(self, stream_id: int, data: bytes) -> None:
        """Bytes of an answer, as windows allow."""
        self.left[stream_id] = self.left.get(stream_id, b"") + data
        self.pump(stream_id)

    def pump(self, stream_id: int) -> None:
        """What windows allow now."""
        left = self.left[stream_id]
        while left and (size := min(len(left), self.h2.local_flow_control_window(stream_id), 2**14)):
            self.h2.send_data(stream_id, left[:size])
            left = self.left[stream_id] = left[size:]

    def end(self, stream_id: int, trailers: list[tuple[bytes, bytes]] = GOOD_END) -> None:
        """Trailers."""
        self.h2.send_headers(stream_id, trailers, end_stream=True)

    def flush(self) -> None:
        """Send what there is."""
        self.transport.write(self.h2.data_to_send())


@asynccontextmanager
async def serving(
    answers: Callable[[Server, int, bytes], object], settings: dict[int, int] | None = None
) -> AsyncIterator[tuple[Channel, list[Server]]]:
    """A channel to a server, and the server's connections."""
    made: list[Server] = []

    def one() -> Server:
        made.append(Server(answers, settings or {}))
        return made[-1]

    server = await asyncio.get_running_loop().create_server(one, "127.0.0.1", 0)
    channel = Channel(*server.sockets[0].getsockname())
    try:
        async with asyncio.timeout(30):
            yield channel, made
    finally:
        channel.close()
        server.close()
        for connection in made:
            connection.transport.abort()


def echo(server: Server, stream_id: int, body: bytes) -> None:
    """The request's bytes, as the one message."""
    server.begin(stream_id)
    server.send(stream_id, message(body))
    server.end(stream_id)


def silent(server: Server, stream_id: int, body: bytes) -> None:
    """Nothing."""


async def until(holds: Callable[[], bool]) -> None:
    """Look again until it holds."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


def run(test: Awaitable[None]) -> None:
    """One test in an event loop."""

    async def it() -> None:
        await test
        await asyncio.sleep(0.01)  # what was closed is closed in the loop's next rounds

    asyncio.run(it())
