"""A bundle written row by row: no more than one row in memory, hashed on the way by a second thread.

The result is byte for byte what `trtllm_lora.write_bundle` writes of the same arrays. Padding is left as a hole of the
file: it reads as zeros and costs no disk. The bundle appears under its digest only when it is whole and on disk; on any
exception, an interrupt included, nothing is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import shutil
import threading
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from peft_to_trtllm.rounding import Array
from trtllm_lora import Bundle, BundleError, BundleFacts
from trtllm_lora import bundle as format_
from trtllm_lora.tensors import STORAGE, IntArray

_CHUNK = 1 << 18
_ZEROS = bytes(_CHUNK)


class BundleStream:
    """Writes one bundle; a context manager. `begin`, `put` every row in order, then `finish`."""

    def __init__(self, parent: Path, config: IntArray, width: int, dtype: str) -> None:
        self._parent = parent
        self._config = config
        self._shape = (1, config.shape[1], width)
        self._dtype = np.dtype("V2") if dtype == "bfloat16" else STORAGE[dtype]
        self._row_bytes = width * self._dtype.itemsize
        self._folder = parent / f".writing-{os.urandom(8).hex()}"
        self._made_parent = False
        self._file: FileIO | None = None
        self._hash: _FollowingHash | None = None

    def __enter__(self) -> BundleStream:
        return self  # nothing is opened here: an interrupt between this and the block's first line would leave it

    def begin(self) -> None:
        """Make the temporary directory and the head of the weights' file.

        Raises:
            BundleError: the place cannot be written.
        """
        try:
            self._made_parent = not self._parent.is_dir()
            self._folder.mkdir(parents=True)
            self._file = (self._folder / format_.WEIGHTS_FILE).open("w+b", buffering=0)
            descr = self._dtype.str  # '<f4', '<f2' or '|V2', as numpy.save spells them
            header = {"descr": descr, "fortran_order": False, "shape": self._shape}
            np.lib.format.write_array_header_1_0(self._file, header)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise BundleError(f"{self._parent}: cannot be written: {error.strerror or error}") from None
        self._start = self._file.tell()
        self._hash = _FollowingHash(self._file.fileno(), self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hash:
            self._hash.stop()
        if self._file:
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if kind is not None and self._made_parent:
            with contextlib.suppress(OSError):  # somebody else put something there
                self._parent.rmdir()
        if isinstance(error, OSError):
            raise BundleError(f"{self._parent}: writing the bundle failed: {error.strerror or error}") from None

    def put(self, number: int, values: Array) -> None:
        """Write one row: `values` [≤ width] in the storage type; the rest of the row stays zero."""
        file, following = self._opened()
        data = memoryview(values.data).cast("B")
        offset, done = self._start + number * self._row_bytes, 0
        while done < len(data):
            done += os.pwrite(file.fileno(), data[done:], offset + done)
        following.follow(len(data), self._row_bytes - len(data))

    def _opened(self) -> tuple[FileIO, _FollowingHash]:
        if self._file is None or self._hash is None:
            raise BundleError("the stream was not begun")
        return self._file, self._hash

    def finish(self, facts: BundleFacts) -> Bundle:
        """Complete the files, write the manifest, and give the bundle its name."""
        file, following = self._opened()
        size = self._start + self._shape[1] * self._row_bytes
        os.ftruncate(file.fileno(), size)
        os.fsync(file.fileno())
        files = {
            format_.WEIGHTS_FILE: {"bytes": size, "sha256": following.result()},
            format_.CONFIG_FILE: format_._write_array(self._folder / format_.CONFIG_FILE, self._config),
        }
        shape_only = np.broadcast_to(np.zeros(1, STORAGE[facts.dtype]), self._shape)
        manifest: dict[str, Any] = format_._manifest(facts, shape_only, self._config, files)
        format_._write_bytes(self._folder / format_.MANIFEST_FILE, format_._canonical(manifest, indent=1))
        format_._fsync_directory(self._folder)
        return format_._publish(self._folder, self._parent / manifest["digest"], manifest)


class _FollowingHash:
    """sha256 of a file while it grows: a thread reads what was written, and counts padding as the zeros it is."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._position = 0
        self._digest = hashlib.sha256()
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="bundle-hash", daemon=True)
        self._queue.put((start, 0))
        self._thread.start()

    def follow(self, written: int, padding: int) -> None:
        """The next `written` bytes are in the file, and `padding` zeros follow them."""
        self._queue.put((written, padding))

    def stop(self) -> None:
        """End the thread; what it did not hash is left."""
        self._queue.put(None)
        self._thread.join()

    def result(self) -> str:
        """Hex digest once everything that was announced is hashed."""
        self.stop()
        if self._failure:
            raise self._failure
        return self._digest.hexdigest()

    def _run(self) -> None:
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        while (item := self._queue.get()) is not None and self._failure is None:
            try:
                self._read(item[0], view)
            except OSError as error:
                self._failure = error
            for at in range(0, item[1], _CHUNK):
                self._digest.update(_ZEROS[: min(_CHUNK, item[1] - at)])
            self._position += sum(item)

    def _read(self, length: int, view: memoryview) -> None:
        done = 0
        while done < length:
            got = os.preadv(self._descriptor, [view[: min(_CHUNK, length - done)]], self._position + done)
            if got <= 0:
                raise OSError("the file became shorter while it was written")
            self._digest.update(view[:got])
            done += got


class FileHash:
    """sha256 of a file on a thread of its own, beside the conversion that reads the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._result: str | OSError | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="source-hash", daemon=True)
        self._thread.start()

    def result(self) -> str:
        """Hex digest.

        Raises:
            OSError: the file could not be read.
        """
        self._thread.join()
        if isinstance(self._result, str):
            return self._result
        raise self._result or OSError("hashing was given up")

    def cancel(self) -> None:
        """Stop early; a cancelled hash has no result."""
        self._cancelled = True
        self._thread.join()

    def _run(self) -> None:
        digest, view = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        try:
            with self._path.open("rb", buffering=0) as source:
                while (got := source.readinto(view)) and not self._cancelled:
                    digest.update(view[:got])
        except OSError as error:
            self._result = error
            return
        if not self._cancelled:
            self._result = digest.hexdigest()
