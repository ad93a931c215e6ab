"""sha256 of a file on a thread of its own, beside the conversion that reads the same file.

Imports next to nothing, so that the command line can start it before numpy is there: a second thread hashes the adapter
in the time the first one imports.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from pathlib import Path

_CHUNK = 1 << 18


Stamp = tuple[int, int, int]
"""Inode, size and time of the last change: enough to see that a file is another than before."""


def stamp_of(status: os.stat_result) -> Stamp:
    """Stamp of a file's status."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_regular(path: Path) -> int:
    """Descriptor of a file opened for reading; never waits, as opening or reading a pipe would.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


class FileHash:
    """A hash under way. A file that cannot be read is told of at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp: Stamp | None = None
        """Of the file that is hashed, once `result` has returned."""
        self._result: str | OSError | None = None
        self._cancelled = False
        self._ended = threading.Event()  # a join that a signal ends calls the thread dead, or fails (CPython 3.11)
        threading.Thread(target=self._run, name="source-hash", daemon=True).start()

    def result(self) -> str:
        """Hex digest.

        Raises:
            OSError: the file could not be read.
        """
        self._ended.wait()
        if isinstance(self._result, str):
            return self._result
        raise self._result or OSError("hashing was given up")

    def cancel(self) -> None:
        """Stop early; a cancelled hash has no result."""
        self._cancelled = True
        self._ended.wait()

    def _run(self) -> None:
        try:
            self._hash()
        finally:
            self._ended.set()

    def _hash(self) -> None:
        digest, view = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        try:
            with open(open_regular(self.path), "rb", buffering=0) as source:
                self.stamp = stamp_of(os.fstat(source.fileno()))
                while (got := source.readinto(view)) and not self._cancelled:
                    digest.update(view[:got])
        except OSError as error:
            self._result = error
            return
        if not self._cancelled:
            self._result = digest.hexdigest()
