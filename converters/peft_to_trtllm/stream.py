"""A bundle written row by row: a few rows in memory, hashed on the way by a second thread.

The result is byte for byte what `trtllm_lora.write_bundle` writes of the same arrays. Padding is left as a hole of the
file: it reads as zeros and costs no disk. The bundle appears under its digest only when it is whole and on disk; on any
exception, an interrupt included, nothing is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from io import BytesIO, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from peft_to_trtllm.rounding import Array
from trtllm_lora import Bundle, BundleError, BundleFacts
from trtllm_lora.bundle import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, canonical_json
from trtllm_lora.bundle_writing import (
    WritingFolder,
    manifest_of,
    publish_folder,
    write_array,
    write_bytes,
)
from trtllm_lora.files import fsync_path
from trtllm_lora.tensors import STORAGE, IntArray

_CHUNK = 1 << 18
_ZEROS = bytes(_CHUNK)
_WRITEBACK = 2 << 20


class BundleStream:
    """Writes one bundle; a context manager. `begin`, `put` every row in order, then `finish`."""

    def __init__(self, parent: Path, config: IntArray, width: int, dtype: str) -> None:
        self._parent = parent
        self._config = config
        self._shape = (1, config.shape[1], width)
        self._dtype = np.dtype("V2") if dtype == "bfloat16" else STORAGE[dtype]
        self._row_bytes = width * self._dtype.itemsize
        self._writing = WritingFolder(parent)
        self._made_parent = False
        self._file: FileIO | None = None
        self._hasher: _Hasher | None = None

    def __enter__(self) -> BundleStream:
        return self  # nothing is opened here: an interrupt between this and the block's first line would leave it

    def begin(self) -> None:
        """Make the temporary directory and the head of the weights' file.

        Raises:
            BundleError: the place cannot be written.
        """
        try:
            self._made_parent = not self._parent.is_dir()
            self._parent.mkdir(parents=True, exist_ok=True)
            self._writing.make()
            self._file = (self._writing.path / WEIGHTS_FILE).open("w+b", buffering=0)
            header = _npy_header(self._dtype, self._shape)
            self._file.write(header)
        except OSError as error:
            raise BundleError(f"{self._parent}: cannot be written: {error.strerror or error}") from None
        self._position = len(header)
        self._advised = 0
        self._hasher = _Hasher(header)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                self._clean_up(failed=kind is not None)
                break
            except (KeyboardInterrupt, SystemExit) as again:  # a second signal: first finish, then obey
                interrupt = again
        if interrupt is not None:
            raise interrupt
        if isinstance(error, OSError):
            raise BundleError(f"{self._parent}: writing the bundle failed: {error.strerror or error}") from None

    def _clean_up(self, *, failed: bool) -> None:
        """Leave nothing; may be called again after an interrupt in the middle of it."""
        if self._hasher:
            self._hasher.stop()
        if self._file:
            self._file.close()
        self._writing.remove()
        if failed and self._made_parent:
            with contextlib.suppress(OSError):  # somebody else put something there
                self._parent.rmdir()

    def put(self, values: Array) -> None:
        """Write the next row: `values` [≤ width] in the storage type; the rest of the row stays zero.

        The array may be changed once two more rows have been put.
        """
        file, hasher = self._opened()
        data, done = memoryview(values.data).cast("B"), 0
        while done < len(data):
            done += os.pwrite(file.fileno(), data[done:], self._position + done)
        hasher.put(data, self._row_bytes - len(data))
        self._position += self._row_bytes
        if self._position - self._advised >= _WRITEBACK:
            # DONTNEED of dirty pages only starts their way to the disk: the fsync at the end then finds little to do
            os.posix_fadvise(file.fileno(), self._advised, self._position - self._advised, os.POSIX_FADV_DONTNEED)
            self._advised = self._position

    def _opened(self) -> tuple[FileIO, _Hasher]:
        if self._file is None or self._hasher is None:
            raise BundleError("the stream was not begun")
        return self._file, self._hasher

    def finish(self, facts: BundleFacts) -> Bundle:
        """Complete the files, write the manifest, and give the bundle its name."""
        file, hasher = self._opened()
        os.ftruncate(file.fileno(), self._position)
        os.fsync(file.fileno())
        files = {
            WEIGHTS_FILE: {"bytes": self._position, "sha256": hasher.result()},
            CONFIG_FILE: write_array(self._writing.path / CONFIG_FILE, self._config),
        }
        shape_only = np.broadcast_to(np.zeros(1, STORAGE[facts.dtype]), self._shape)
        manifest: dict[str, Any] = manifest_of(facts, shape_only, self._config, files)
        write_bytes(self._writing.path / MANIFEST_FILE, canonical_json(manifest, indent=1))
        fsync_path(self._writing.path)
        return publish_folder(self._writing.path, self._parent / manifest["digest"], manifest)


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The head of an .npy file, as numpy.save writes it."""
    head = BytesIO()
    descr = dtype.str  # '<f4', '<f2' or '|V2'
    content = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, content)  # type: ignore[no-untyped-call]
    return head.getvalue()


class _Hasher:
    """sha256 of rows in order, on a thread of its own, while the next row is computed and written."""

    def __init__(self, header: bytes) -> None:
        self._digest = hashlib.sha256(header)
        self._rows: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ahead = 0
        self._ended = threading.Event()  # a join that a signal ends calls the thread dead, or fails (CPython 3.11)
        threading.Thread(target=self._run, name="bundle-hash", daemon=True).start()

    def put(self, data: memoryview, padding: int) -> None:
        """Hash `data` and `padding` zeros after it. Returns when the row before the last one is hashed."""
        self._rows.put((data, padding))
        self._ahead += 1
        if self._ahead > 2:
            self._done.get()
            self._ahead -= 1

    def stop(self) -> None:
        """Finish what was put and end the thread."""
        if not self._ended.is_set():
            self._rows.put(None)
            self._ended.wait()

    def result(self) -> str:
        """Hex digest of all that was put."""
        self.stop()
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (item := self._rows.get()) is not None:
            data, padding = item
            self._digest.update(data)
            for at in range(0, padding, _CHUNK):
                self._digest.update(_ZEROS[: min(_CHUNK, padding - at)])
            self._done.put(None)
        self._ended.set()
