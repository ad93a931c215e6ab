"""A /dev/shm of a few megabytes for one thread and the processes it starts: a tmpfs in a mount namespace of its own."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def in_small_shm(num_bytes: int, body: Callable[[Path], T]) -> T:
    """Call `body` in a thread whose /dev/shm has room for so many bytes; what it raises or returns comes back.

    Its argument is that directory as every thread of this process can reach it. Skips where mounting is not permitted.
    """
    outcome: list[Callable[[], T]] = []

    def run() -> None:
        try:
            _mount(num_bytes)
            here = os.open("/dev/shm", os.O_RDONLY)  # noqa: S108
            try:
                result = body(Path(f"/proc/self/fd/{here}"))
            finally:
                os.close(here)
        except BaseException as error:  # noqa: BLE001 - handed over to the caller's thread
            outcome.append(lambda error=error: _raise(error))  # type: ignore[misc]
        else:
            outcome.append(lambda: result)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]()


def _mount(num_bytes: int) -> None:
    for call, *arguments in (
        (_libc.unshare, _CLONE_NEWNS),
        (_libc.mount, b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        (_libc.mount, b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={num_bytes}".encode()),
    ):
        if call(*arguments):
            pytest.skip(f"mounting a small /dev/shm is not permitted here: {os.strerror(ctypes.get_errno())}")


def _raise(error: BaseException) -> Any:
    raise error


def fill(folder: Path, leave: int) -> Path:
    """A file that takes all room in a directory's file system but so many bytes."""
    stat, file = os.statvfs(folder), folder / "other-program"
    with file.open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, stat.f_bavail * stat.f_frsize - leave)
    return file
