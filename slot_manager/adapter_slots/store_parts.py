"""A file that arrives in parts, from several threads, and may be continued after an error.

Which parts are whole is written beside the file, only when the transfer did not end well. A note that is wrong (power
lost before the data was on disk) costs a second transfer: the sha256 over everything decides.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from adapter_slots.errors import DiskFailed
from adapter_slots.store import StoredFile, disk_error

_HASH_STEP = 8 * 2**20
_libc = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `end` of a file, `end` not included."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.end - self.start


class PartFile:
    """`into/<name>`, open for writing at any place. Errors of the file system are DiskErrors."""

    def __init__(self, into: Path, file: StoredFile, part_bytes: int) -> None:
        self.name, self.num_bytes, self.sha256 = file.name, file.num_bytes, file.sha256
        self._path = into / file.name
        self._notes = into / f"{file.name}.parts"
        self._part_bytes = part_bytes
        self._whole: set[int] = set()
        self._lock = threading.Lock()
        self._handle = -1
        self._buffer = bytearray(min(part_bytes, file.num_bytes, _HASH_STEP))

    def __enter__(self) -> PartFile:
        try:
            self._whole = self._read_notes()
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._handle, self.num_bytes)
            if self.num_bytes:
                os.posix_fallocate(self._handle, 0, self.num_bytes)  # a full disk shows before a byte is asked for
            self._notes.unlink(missing_ok=True)
        except OSError as error:
            self._close()
            raise disk_error(error, self._path) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
        if kind is not None and self._whole:
            try:
                note = {"bytes": self.num_bytes, "part_bytes": self._part_bytes, "whole": sorted(self._whole)}
                self._notes.write_text(json.dumps(note), encoding="utf-8")
            except OSError:
                self._notes.unlink(missing_ok=True)  # then everything is fetched again

    def parts(self) -> Iterator[Part]:
        """All parts, in order."""
        for start in range(0, self.num_bytes, self._part_bytes):
            yield Part(start, min(start + self._part_bytes, self.num_bytes))

    def missing(self) -> list[Part]:
        """Parts that are not whole yet, in order."""
        return [part for part in self.parts() if part.start not in self._whole]

    def write(self, data: bytes, at: int) -> None:
        """Put bytes in their place; any thread."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._handle, view, at)
                view, at = view[written:], at + written
        except OSError as error:
            raise disk_error(error, self._path) from None

    def done(self, part: Part) -> None:
        """All bytes of the part are written; they begin their way to the disk, so that an fsync later is short."""
        begin, length = ctypes.c_int64(part.start), ctypes.c_int64(part.num_bytes)
        _libc.sync_file_range(
            self._handle, begin, length, _SYNC_FILE_RANGE_WRITE
        )  # only a hint: fsync has the last word
        with self._lock:
            self._whole.add(part.start)

    def forget(self) -> None:
        """No part counts as whole any more."""
        with self._lock:
            self._whole.clear()

    def hash_part(self, part: Part, sha: Any) -> None:
        """Feed a whole part to a hash. One thread; in few large steps, since each may have to wait for the others."""
        at = part.start
        while at < part.end:
            view = memoryview(self._buffer)[: part.end - at]
            try:
                got = os.preadv(self._handle, [view], at)
            except OSError as error:
                raise disk_error(error, self._path) from None
            if not got:
                raise DiskFailed(f"{self._path}: shorter than what was written to it")
            sha.update(view[:got])
            at += got

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _read_notes(self) -> set[int]:
        try:
            note = json.loads(self._notes.read_text(encoding="utf-8"))
            same = note["bytes"] == self.num_bytes and note["part_bytes"] == self._part_bytes
            there = same and self._path.stat().st_size == self.num_bytes
            return {int(start) for start in note["whole"]} if there else set()
        except (OSError, ValueError, KeyError, TypeError):
            return set()
