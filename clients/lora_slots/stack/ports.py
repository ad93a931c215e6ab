"""Choosing and checking ports before Triton starts, and seeing afterwards who listens on them.

Triton itself ends with code 1 when its HTTP or gRPC port is taken, but only logs a line when it is the metrics
port, and any other server on the port would answer a readiness probe. So: look before, and verify after.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from pathlib import Path

from lora_slots.stack.config import ANY, LOOPBACK, Ports
from lora_slots.stack.errors import PortTaken

MAX_PORT = 65_535
_LISTEN = "0A"  # the state column of /proc/net/tcp


def choose_ports(http: int, grpc: int, metrics: int, usual: Ports = ANY) -> Ports:
    """Three different ports that could be bound just now: those asked for; for each 0 the usual one of that door, or
    any free one where that is taken.

    Raises PortTaken for a number that was asked for and is in use, out of range, given twice, or needs more rights.
    """
    chosen: dict[str, int] = {}
    with ExitStack() as held:  # all three are held until the last is known, or two doors would get one port
        wanted = {"http": http, "grpc": grpc, "metrics": metrics}
        for door, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            other = next((name for name, number in chosen.items() if number == port), None)
            if other is not None:
                raise PortTaken(door, port, f"the {other} door of the same server has it already")
            chosen[door] = _bind(held, door, port) if port else _bind_any(held, door, getattr(usual, door))
    return Ports(**chosen)


def _bind_any(held: ExitStack, door: str, usual: int) -> int:
    try:
        return _bind(held, door, usual)
    except PortTaken:
        return _bind(held, door, 0)


def _bind(held: ExitStack, door: str, port: int) -> int:
    if not 0 <= port <= MAX_PORT:
        raise PortTaken(door, port, f"ports are numbers from 1 to {MAX_PORT}")
    listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Triton: TIME_WAIT is no obstacle
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()  # without it a second bind would succeed
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(door, port, f"{_holder(port)} is using it") from error
        raise PortTaken(door, port, error.strerror or str(error)) from error
    return int(listener.getsockname()[1])


def listening_inodes(port: int) -> set[str]:
    """The socket inodes that listen on the port, IPv4 and IPv6, as /proc/net shows them."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # no IPv6 on this machine
        for row in rows:
            columns = row.split()
            if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(columns[9])
    return inodes


def sockets_of(pid: int) -> set[str] | None:
    """The inodes of a process's open sockets; None where it is gone or may not be looked into."""
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue  # closed since the folder was read
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    except OSError:
        return None
    return inodes


def _holder(port: int) -> str:
    inodes = listening_inodes(port)
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and inodes & (sockets_of(int(process.name)) or set()):
            try:
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
            except OSError:
                break
    return "another process"
