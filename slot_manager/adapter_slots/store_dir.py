"""REMOTE in a directory: a network file system, a mounted volume, or a raw adapter beside the registry.

Copies block by block and hashes what it copies. A link that leads out of the directory is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from adapter_slots.errors import StoreCorrupt, StoreDenied, StoreMissing, StoreUnavailable, TierError
from adapter_slots.store import StoredFile, Transfer, check_key, disk_error

_BLOCK = 2**20


class DirStore:
    """Files below one directory."""

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root

    def read(self, key: str, limit: int, transfer: Transfer) -> bytes | None:
        """As `Store.read`."""
        transfer.check()
        path = self._path(key)
        try:
            with path.open("rb") as file:
                data = file.read(limit + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _store_error(error, path) from None
        if len(data) > limit:
            raise StoreCorrupt(f"{path}: more than the {limit} bytes that are read")
        return data

    def sizes(self, prefix: str, transfer: Transfer) -> Mapping[str, int]:
        """As `Store.sizes`."""
        transfer.check()
        folder = self._path(prefix)
        try:
            return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
        except OSError as error:
            raise _store_error(error, folder) from None

    def download(self, prefix: str, files: Sequence[StoredFile], into: Path, transfer: Transfer) -> Mapping[str, str]:
        """As `Store.download`."""
        total = sum(file.num_bytes for file in files)
        done, hashes = 0, {}
        for file in files:
            source = self._path(f"{prefix}/{file.name}".lstrip("/"))
            hashes[file.name] = _copy(source, into / file.name, transfer, done, total)
            done += file.num_bytes
            if file.sha256 not in (None, hashes[file.name]):
                raise StoreCorrupt(f"{source}: its bytes differ from the manifest's sha256")
        return hashes

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, key: str) -> Path:
        path = self._root / check_key(key)
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise StoreDenied(f"{path}: leads out of {self._root}")
        return path


def _copy(source: Path, target: Path, transfer: Transfer, before: int, total: int) -> str:
    sha, done = hashlib.sha256(), before
    try:
        reading = source.open("rb", buffering=0)
    except OSError as error:
        raise _store_error(error, source) from None
    with reading:
        try:
            writing = target.open("wb", buffering=0)
        except OSError as error:
            raise disk_error(error, target) from None
        with writing:
            while block := _read(reading.fileno(), source):
                transfer.check()
                _write(writing.fileno(), block, target)
                sha.update(block)
                done += len(block)
                transfer.report(done, total)
    return sha.hexdigest()


def _read(handle: int, source: Path) -> bytes:
    try:
        return os.read(handle, _BLOCK)
    except OSError as error:
        raise _store_error(error, source) from None


def _write(handle: int, block: bytes, target: Path) -> None:
    view = memoryview(block)
    try:
        while view:
            view = view[os.write(handle, view) :]
    except OSError as error:
        raise disk_error(error, target) from None


def _store_error(error: OSError, path: Path) -> TierError:
    why = f"{path}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return StoreMissing(why)
    if isinstance(error, PermissionError):
        return StoreDenied(why)
    return StoreUnavailable(why)
