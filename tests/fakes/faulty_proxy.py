"""A TCP proxy between an S3 client and a real store that breaks answers on demand: the faults of REMOTE, for real.

It reads request heads only to know what to break and where a body begins; what it does not break goes through byte
for byte, so signatures stay valid.
"""

from __future__ import annotations

import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b",
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
)


@dataclass
class Fault:
    """What to do to answers whose request has `target` in its first line or headers."""

    kind: str
    """reset, busy (503), drip (one byte a second, head included), drip_body, cut (connection), flip (one byte)."""
    target: str = ""
    at: int = 0
    """Byte of the body: where to cut, to flip, or to begin dripping."""
    times: int | None = None
    """How many answers; None for all."""


@dataclass
class FaultyProxy:
    """Listens on loopback. `faults` may be changed at any time."""

    upstream: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """First line and Range of what came through."""
    stopping: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    tls: ssl.SSLContext | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        """Endpoint for a client."""
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def pick(self, head: bytes) -> Fault | None:
        """Note a request, and the fault that falls on it."""
        text = head.decode("latin-1")
        lines = text.split("\r\n")
        ranges = [line for line in lines if line.lower().startswith("range:")]
        with self._lock:
            self.requests.append(" ".join([lines[0], *ranges]))
            for fault in self.faults:
                if fault.target in text and fault.times != 0:
                    fault.times = None if fault.times is None else fault.times - 1
                    return fault
        return None


@contextmanager
def between(host: str, port: int, tls: ssl.SSLContext | None = None, at: int = 0) -> Iterator[FaultyProxy]:
    """A proxy in front of host:port, for as long as the block runs, on port `at` if that is given.

    With `tls` clients speak HTTPS to it.
    """
    proxy = FaultyProxy((host, port), tls=tls)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # either side went away
                if tls is None:
                    _serve(self.request, proxy)
                    return
                with tls.wrap_socket(self.request, server_side=True) as encrypted:
                    _serve(encrypted, proxy)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = True
        request_queue_size = 64
        allow_reuse_address = True

    with Server(("127.0.0.1", at), Handler) as server:
        proxy.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.stopping.set()
            server.shutdown()
            thread.join()


def _serve(client: socket.socket, proxy: FaultyProxy) -> None:
    while (head := _head(client)) and not proxy.stopping.is_set():
        fault = proxy.pick(head)
        if fault and fault.kind == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if fault and fault.kind == "busy":
            client.sendall(SLOW_DOWN[0] % (len(SLOW_DOWN[1]), SLOW_DOWN[1]))
            continue
        with socket.create_connection(proxy.upstream, 10) as upstream:
            upstream.sendall(head)
            if not _relay(upstream, client, fault, proxy):
                return


def _relay(upstream: socket.socket, client: socket.socket, fault: Fault | None, proxy: FaultyProxy) -> bool:
    """Pass one answer on; False if the connection is over."""
    answer = _head(upstream)
    if not _send(client, answer, fault if fault and fault.kind == "drip" else None, proxy):
        return False
    left, place = _length(answer), 0
    while left and (data := upstream.recv(min(left, 65536))):
        block = bytearray(data)
        if fault and fault.kind == "flip" and place <= fault.at < place + len(block):
            block[fault.at - place] ^= 1
        if fault and fault.kind == "cut" and place + len(block) > fault.at:
            client.sendall(block[: max(0, fault.at - place)])
            return False
        dripping = fault if fault and fault.kind in ("drip", "drip_body") and place + len(block) > fault.at else None
        if not _send(client, bytes(block), dripping, proxy):
            return False
        place, left = place + len(block), left - len(block)
    return left == 0


def _send(client: socket.socket, data: bytes, dripping: Fault | None, proxy: FaultyProxy) -> bool:
    if dripping is None:
        client.sendall(data)
        return True
    for value in data:
        client.sendall(bytes([value]))
        if proxy.stopping.wait(1.0):
            return False
    return True


def _head(sock: socket.socket) -> bytes:
    """Everything up to the empty line; requests have no body here. Empty at the end of the connection."""
    head = bytearray()
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        if not byte:
            return b""
        head += byte
    return bytes(head)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0
