"""A real `lora-slots gateway` in a process of its own."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOPPED = 128 + signal.SIGTERM
"""Exit code of a gateway that was told to stop, and did."""
_AT = re.compile(r"on (http://\S+)")


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """Where it is."""

    url: str
    """Without the /v1."""
    admin_url: str
    log: Path
    """What it wrote to stderr, a JSON object per line."""
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid


@contextmanager
def gateway(grpc_url: str, log: Path, *options: str) -> Iterator[RunningGateway]:
    """Serve inside the block, on ports of its own; stopped by SIGTERM after it, in order."""
    command = [sys.executable, "-c", "from lora_slots.cli import main; main()", "gateway", "--url", grpc_url]
    with (
        log.open("w") as err,
        subprocess.Popen(
            [*command, "--port", "0", "--admin-port", "0", *options], stdout=subprocess.PIPE, stderr=err, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            found = [match[1] for _ in range(2) if (match := _AT.search(process.stdout.readline()))]
            assert len(found) == 2, log.read_text()
            yield RunningGateway(found[0].removesuffix("/v1"), found[1], log, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == STOPPED
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as plain data."""
        return json.loads(self.body)


def ask(
    url: str, path: str, body: object = None, *, method: str | None = None, key: str | None = None, **headers: str
) -> Reply:
    """One request without any client library between; `body` is bytes, or becomes JSON."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        given["authorization"] = f"Bearer {key}"
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    if raw is not None:
        given.setdefault("content-type", "application/json")
    try:
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, given)
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def until(what: str, holds: Callable[[], bool]) -> None:
    """Look again until it holds, for a minute at most."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
