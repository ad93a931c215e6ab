"""Looking at a running server from outside: does it answer, under which name, who listens, which stubs live."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lora_slots.stack.config import LOOPBACK, Ports
from lora_slots.stack.ports import listening_inodes, sockets_of

_TIMEOUT_S = 2.0
_LOAD_S = 120.0


def is_ready(port: int) -> bool:
    """Whether the Triton on this HTTP port says that all its models are ready."""
    return _get(port, "/v2/health/ready")[0] == http.client.OK


def server_name(port: int) -> str | None:
    """The name (`--id`) under which the Triton on this HTTP port goes; None where it is no Triton."""
    status, body = _get(port, "/v2")
    if status != http.client.OK:
        return None
    try:
        return str(json.loads(body)["name"])
    except (ValueError, KeyError, TypeError):
        return None


def doors_not_open(pid: int, ports: Ports) -> list[str] | None:
    """The doors on which this process does not listen (yet). None where it is gone or may not be looked into."""
    sockets = sockets_of(pid)
    if sockets is None:
        return None
    return [door for door, port in ports.doors() if not sockets & listening_inodes(port)]


@dataclass
class StubWatch:
    """Finds Python stubs of one server that have died: Triton neither restarts them nor buries them.

    One that could not even be executed is found too: Triton would wait for it for ever while loading. A stub that ends
    in an orderly unload is a zombie for moments only, so one must stay dead for `grace_s`.
    """

    server: int
    grace_s: float = 1.0
    _instances: dict[int, str] = field(default_factory=dict)
    _dead_since: dict[int, float] = field(default_factory=dict)
    _buried: set[int] = field(default_factory=set)

    def dead(self, now: float) -> list[str]:
        """The model instances whose stub is dead, as Triton calls them (`model_0_0`); `now` in seconds."""
        zombies = set()
        for pid, state in _children(self.server):
            if state == "Z":
                zombies.add(pid)
            elif pid not in self._instances and (instance := _instance(pid)):
                self._instances[pid] = instance
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in zombies}
        late = [pid for pid, since in self._dead_since.items() if now - since >= self.grace_s]
        return [self._instances.get(pid, f"process {pid}") for pid in late if pid not in self._buried]

    def bury(self) -> None:
        """Forget those that are dead now: their models were loaded anew (Triton keeps the zombies)."""
        self._buried |= self._dead_since.keys()


def load_model(port: int, model: str) -> str:
    """Ask the Triton on this HTTP port to load a model (again); why it did not, or ""."""
    status, body = _ask("POST", port, f"/v2/repository/models/{model}/load", timeout_s=_LOAD_S)
    return "" if status == http.client.OK else body.decode("utf-8", "replace") or "it does not answer"


def _children(server: int) -> Iterable[tuple[int, str]]:
    """(process id, state letter) of each child of the server: its stubs, or the shells that become stubs."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            stat = (process / "stat").read_text()
        except OSError:
            continue  # ended since the folder was read
        state, parent, _ = stat.rpartition(") ")[2].split(" ", 2)
        if int(parent) == server:
            yield int(process.name), state


def _instance(pid: int) -> str:
    """The model instance of a stub, its last argument but one; "" while the process is still the shell it starts as."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return ""
    return words[-2] if len(words) > 2 and words[0].endswith("triton_python_backend_stub") else ""


def _get(port: int, path: str) -> tuple[int, bytes]:
    return _ask("GET", port, path, timeout_s=_TIMEOUT_S)


def _ask(method: str, port: int, path: str, *, timeout_s: float) -> tuple[int, bytes]:
    """(status, body), status 0 where nothing sensible answers. Never kept alive: Triton's exit would wait for it."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)
    try:
        connection.request(method, path, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
