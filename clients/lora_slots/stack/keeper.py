"""The process between us and tritonserver: it starts the server, and sees that nothing of it is left behind.

It is run as a script with the standard library only, in a session of its own, so no terminal signal reaches it. Rules:

* It stops the server when its standard input says so or closes, when it gets SIGTERM, or when its parent is gone.
  So the server ends with us however we end, SIGKILL included.
* Stopping is SIGTERM, then SIGKILL to the whole process group once Triton had its exit timeout: Triton can hang
  past it for ever while a gRPC stream is open.
* If the keeper itself is killed, the kernel kills the server (PR_SET_PDEATHSIG); the stubs follow by themselves, or the
  parent kills those that hang (process.py).
* At the end the server's shared memory is removed, and its folder too, unless the server died by itself while
  the parent lives: then the parent wants to read the log first. Where the parent is gone, what it would have removed
  after us is removed as well.

Spoken on standard input: `s` stop, `k` kill now. On standard output, a JSON object a line: `{"pid": …}` once started,
`{"returncode": …}` when all is over, `{"error": …}` when the server could not be executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

POLL_S = 0.1
KILL_AFTER_S = 2.0  # beyond Triton's own exit timeout
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies, not a temporary file
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STDIN, _STDERR = 0, 2


@dataclass(frozen=True)
class Order:
    """What the keeper is to keep, in types that JSON has.

    `folder` is the server's own, `temporary` are folders of the parent, removed in its stead; `parent` is its process.
    """

    argv: list[str]
    log: str
    folder: str
    temporary: list[str]
    shm_prefix: str
    exit_timeout_s: float
    parent: int


class Keeper:
    """One server's life."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.told_to_stop = False
        self.told_to_kill = False

    def run(self) -> None:
        """Start the server, wait for its end or for the order to end it, clean up."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            with Path(self.order.log).open("wb") as log:
                os.dup2(log.fileno(), _STDERR)  # should the keeper fail, its last words stand there too
                server = subprocess.Popen(
                    self.order.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.order.folder,
                    start_new_session=True, preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509 - no threads here
                )  # fmt: skip
        except OSError as error:
            _say({"error": str(error)})
            return
        _say({"pid": server.pid})
        while server.poll() is None and not self._ordered_to_stop(POLL_S):
            pass
        died = server.poll() is not None
        if not died:
            self._stop(server)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # stubs that a dead server left
        _reap()
        remove_shared_memory(self.order.shm_prefix)
        orphaned = self._parent_is_gone()
        for folder in self.order.temporary if orphaned else []:
            shutil.rmtree(folder, ignore_errors=True)
        if orphaned or not died:
            shutil.rmtree(self.order.folder, ignore_errors=True)
        _say({"returncode": server.returncode})

    def _stop(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.order.exit_timeout_s + KILL_AFTER_S
        if not self.told_to_kill:
            server.send_signal(signal.SIGTERM)
        while server.poll() is None and time.monotonic() < deadline and not self.told_to_kill:
            self._ordered_to_stop(POLL_S)
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    def _ordered_to_stop(self, wait_s: float) -> bool:
        """Wait at most `wait_s` for an order; also look whether the parent still lives."""
        if self.told_to_stop:  # standard input may have closed: it would be readable for ever
            time.sleep(wait_s)
        readable, _, _ = select.select([_STDIN], [], [], 0 if self.told_to_stop else wait_s)
        if readable:
            order = os.read(_STDIN, 1)
            self.told_to_stop = True
            self.told_to_kill = self.told_to_kill or order == b"k"
        self.told_to_stop = self.told_to_stop or self._parent_is_gone()
        return self.told_to_stop

    def _parent_is_gone(self) -> bool:
        return os.getppid() != self.order.parent

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self.told_to_stop = True


def remove_shared_memory(prefix: str) -> None:
    """Remove the shared memory regions whose names start with the (never empty) prefix."""
    if prefix:
        for region in SHARED_MEMORY.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                region.unlink()


def _die_with(keeper: int) -> Callable[[], None]:
    def in_child() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it was killed before the line above took effect
            os._exit(1)

    return in_child


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _reap() -> None:
    """Collect the orphans that became ours, so that none stays as a zombie."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _say(message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # nobody may be listening any more
        os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    Keeper(Order(**json.loads(sys.argv[1]))).run()
