"""Our end of the keeper: starting it, hearing from it, telling it to stop. Nothing here knows Triton."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from lora_slots.stack import keeper
from lora_slots.stack.errors import SetupError

_KILL_WAIT_S = 5.0
_SPAWN_WAIT_S = 30.0


class KeptProcess:
    """A server process behind a keeper. When this object or this process is gone, so is the server.

    The object exists before the process does, and a thread does the starting, since an interrupt reaches the main
    thread only: whenever one comes, `stop` knows the keeper and can wait for it.
    """

    def __init__(self, order: keeper.Order, environment: Mapping[str, str]) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._order = order
        self._environment = environment
        self._keeper: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._failure = "its keeper died"
        self._spawned = threading.Event()

    def start(self) -> None:
        """Start keeper and server. Raises SetupError where the server cannot be executed."""
        self._starting = True
        threading.Thread(target=self._spawn, daemon=True).start()
        self._spawned.wait(_SPAWN_WAIT_S)
        said = self._hear()
        self.pid = int(str(said.get("pid", 0)))
        if not self.pid:
            raise SetupError(f"tritonserver could not be started: {said.get('error', self._failure)}")

    def ended(self) -> bool:
        """Whether the server has ended and everything of it is cleaned up; `returncode` then tells how."""
        if self._keeper is not None and self._keeper.poll() is None:
            return False
        self._read_last_words()
        return True

    def stop(self) -> None:
        """Stop the server in order, and wait until nothing of it is left."""
        if not self._starting:
            return
        self._spawned.wait(_SPAWN_WAIT_S)
        self._tell(b"s")
        if not self._wait(self._order.exit_timeout_s + keeper.KILL_AFTER_S + _KILL_WAIT_S):
            self.kill()
        self._read_last_words()

    def kill(self) -> None:
        """Have the server killed at once, and wait until nothing of it is left."""
        self._tell(b"k")
        if not self._wait(_KILL_WAIT_S) and self._keeper is not None:
            self._keeper.kill()  # the kernel then kills the server
            self._keeper.wait()
        self._read_last_words()

    def _spawn(self) -> None:
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, json.dumps(asdict(self._order))],
                env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._failure = str(error)
        finally:
            self._spawned.set()

    def _wait(self, timeout_s: float) -> bool:
        """Whether the keeper ended within the time."""
        if self._keeper is None:
            return True
        try:
            self._keeper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_last_words(self) -> None:
        if self._keeper is None or self._keeper.stdout is None or self._keeper.stdout.closed:
            return
        code: object = None
        while said := self._hear():
            code = said.get("returncode")
        self.returncode = int(str(code)) if code is not None else None
        if self.returncode is None and self.pid:
            self._kill_group()
        self._keeper.stdout.close()
        if self._keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()

    def _kill_group(self) -> None:
        """Do what a killed keeper cannot: a stub may hang for long without its server (a metric waits for its answer).

        The group's number may be somebody else's by now, so a process counts only if it names our server too.
        """
        name = self._order.shm_prefix.encode()
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):  # no process, or it has ended
                pid = int(process.name)
                if os.getpgid(pid) == self.pid and name in (process / "cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def _hear(self) -> dict[str, object]:
        if self._keeper is None or self._keeper.stdout is None:
            return {}
        line = self._keeper.stdout.readline()
        said: dict[str, object] = json.loads(line) if line else {}
        return said

    def _tell(self, order: bytes) -> None:
        if self._keeper is not None and self._keeper.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, the pipe is closed
                os.write(self._keeper.stdin.fileno(), order)
