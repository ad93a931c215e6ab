"""Our end of the keeper: starting it, hearing from it, telling it to stop. Nothing here knows Triton."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from lora_slots.stack import keeper
from lora_slots.stack.errors import SetupError

_KILL_WAIT_S = 5.0


class KeptProcess:
    """A server process behind a keeper. When this object or this process is gone, so is the server."""

    def __init__(self, order: keeper.Order, environment: Mapping[str, str]) -> None:
        """Start keeper and server. Raises SetupError where the server cannot be executed."""
        self.returncode: int | None = None
        self._patience_s = order.exit_timeout_s + keeper.KILL_AFTER_S + _KILL_WAIT_S
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, json.dumps(asdict(order))],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        said = self._hear()
        self.pid = int(str(said.get("pid", 0)))
        if not self.pid:
            self.stop()
            raise SetupError(f"tritonserver could not be started: {said.get('error', 'its keeper died')}")

    def ended(self) -> bool:
        """Whether the server has ended and everything of it is cleaned up; `returncode` then tells how."""
        if self._keeper.poll() is None:
            return False
        self._read_last_words()
        return True

    def stop(self) -> None:
        """Stop the server in order, and wait until nothing of it is left."""
        self._tell(b"s")
        try:
            self._keeper.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._read_last_words()

    def kill(self) -> None:
        """Have the server killed at once, and wait until nothing of it is left."""
        self._tell(b"k")
        try:
            self._keeper.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the kernel then kills the server
            self._keeper.wait()
        self._read_last_words()

    def _read_last_words(self) -> None:
        assert self._keeper.stdout is not None and self._keeper.stdin is not None  # noqa: S101 - both are pipes
        if not self._keeper.stdout.closed:
            code = self._hear().get("returncode")
            self.returncode = int(str(code)) if code is not None else None
            self._keeper.stdout.close()
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()

    def _hear(self) -> dict[str, object]:
        assert self._keeper.stdout is not None  # noqa: S101 - it is a pipe
        line = self._keeper.stdout.readline()
        said: dict[str, object] = json.loads(line) if line else {}
        return said

    def _tell(self, order: bytes) -> None:
        assert self._keeper.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(OSError, ValueError):  # it has ended, the pipe is closed
            os.write(self._keeper.stdin.fileno(), order)
