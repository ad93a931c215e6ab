"""A server's end of HTTP/2: by the library h2, which raises when its client breaks the protocol, and by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from hpack import Encoder

from lora_slots.gateway.http2 import Http2
from lora_slots.gateway.http2_events import Event
from lora_slots.gateway.http2_frames import END_HEADERS, HEADERS, SETTINGS, frame

ANSWER = [(b":status", b"200"), (b"content-type", b"application/grpc")]
GOOD_END = [(b"grpc-status", b"0")]
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/s/m"),
    (b":authority", b"x:1"),
    (b"te", b"trailers"),
]


class Peer:
    """The library, joined to a client by memory."""

    def __init__(self, client: Http2) -> None:
        self.client = client
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.initiate_connection()
        self.events: list[Event] = []
        """The client's."""
        self.requests: list[int] = []
        self.bodies: dict[int, bytearray] = defaultdict(bytearray)
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}

    def swap(self, sizes: Iterable[int] = ()) -> None:
        """Bring bytes both ways until nobody has any more; to the client in pieces of `sizes`, then whole."""
        pieces = iter(sizes)
        while True:
            up, down = self.client.take(), self.h2.data_to_send()
            if not (up or down):
                return
            self._hear(up)
            while down:
                size = next(pieces, len(down))
                self.events += self.client.receive(down[:size])
                down = down[size:]

    def _hear(self, data: bytes) -> None:
        for event in self.h2.receive_data(data) if data else ():
            if isinstance(event, RequestReceived):
                self.requests.append(event.stream_id)
            elif isinstance(event, DataReceived):
                self.bodies[event.stream_id] += event.data
            elif isinstance(event, StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset[event.stream_id] = int(event.error_code)


def greeted(streams: int = 0) -> Http2:
    """A client that has been greeted and has begun so many streams; it has nothing to send."""
    client = Http2()
    client.receive(frame(SETTINGS, 0, 0))
    for _ in range(streams):
        client.request(REQUEST, b"body")
    client.take()
    return client


def answer_begins(stream_id: int, encoder: Encoder) -> bytes:
    """The headers of an answer."""
    return frame(HEADERS, END_HEADERS, stream_id, encoder.encode(ANSWER))
