"""A TCP line to a server that can be cut and joined again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Line:
    """Listens on loopback and passes bytes on, both ways."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection, and every new one at once."""
        self._is_cut = True
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def join(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def close(self) -> None:
        """End it."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                if self._is_cut:
                    client.close()
                    continue
                server = socket.create_connection(self._upstream)
                self._open += [client, server]
                for a, b in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(a, b), daemon=True).start()

    @staticmethod
    def _pass_on(a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while data := a.recv(65536):
                b.sendall(data)
        for end in (a, b):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def line_to(url: str) -> Iterator[Line]:
    """A line to host:port, for as long as the block runs."""
    host, _, port = url.rpartition(":")
    line = Line(host, int(port))
    try:
        yield line
    finally:
        line.close()
