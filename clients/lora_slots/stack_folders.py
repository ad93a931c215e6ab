"""A folder in the cache for each embedded stack that runs: what it serves, what it held warm, where it listens.

    <cache>/stacks/1/warm.json        the warm set, found again by the next stack of this number
                     disk/            remote adapters it brought here, kept likewise
                     adapters.yaml    its registry; it and all else is removed when the folder is taken
                     stack.json       its address, while it serves
                     .lock            flock, held as long as the stack runs and freed however it ends
    <cache>/stacks/.lock              held for moments: a number is taken, or the folders are looked through
    <cache>/stacks/.starting          held while a Triton starts, until its ports are its own

Rules: a stack takes the lowest number that nobody holds, so that one stack at a time always finds its own warm set; a
folder whose lock is free belongs to nobody, whatever is in it.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_slots.base_model.errors import CacheNotWritable, disk_errors
from lora_slots.base_model.store import cache_folder, locked

ADDRESS = "stack.json"
WARM_SET, DISK, LOCK = "warm.json", "disk", ".lock"
_KEPT = {WARM_SET, DISK, LOCK}


@dataclass(frozen=True, slots=True)
class StackFolder:
    """The folder of one stack, this process's as long as it is claimed."""

    path: Path

    @property
    def registry(self) -> Path:
        """Its `adapters.yaml`."""
        return self.path / "adapters.yaml"

    @property
    def warm_set(self) -> Path:
        """Where its slot manager keeps the warm set."""
        return self.path / WARM_SET

    @property
    def disk(self) -> Path:
        """Where its slot manager keeps remote adapters."""
        return self.path / DISK

    @contextmanager
    def announced(self, grpc_url: str) -> Iterator[None]:
        """Tell other commands of this user where the stack listens, while the block runs. Raises BaseModelError."""
        file = self.path / ADDRESS
        try:
            with disk_errors(self.path):
                file.write_text(json.dumps({"grpc": grpc_url}), encoding="utf-8")
            yield
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def claim(cache: Path | None = None) -> Iterator[StackFolder]:
    """A folder that no other running stack has, as long as the block runs; only what is kept over restarts is in it.

    Raises CacheNotWritable, NoDiskSpace: the cache, with the variable that sets it.
    """
    stacks = _folder(cache)
    with disk_errors(stacks):
        stacks.mkdir(parents=True, exist_ok=True)
    with _looking_through(stacks), disk_errors(stacks):
        folder, lock = next(filter(None, (_take(stacks / str(number)) for number in itertools.count(1))))
        for path in folder.path.iterdir():
            if path.is_dir() and path.name not in _KEPT:
                shutil.rmtree(path)
            elif path.name not in _KEPT:
                path.unlink()
    try:
        yield folder
    finally:
        os.close(lock)


def starting(waiting: Callable[[], object], cache: Path | None = None) -> AbstractContextManager[None]:
    """Held while a Triton starts: two that choose ports at the same moment would choose the same."""
    return locked(_folder(cache), waiting, name=".starting")


def running(cache: Path | None = None) -> list[str]:
    """host:port of gRPC of this user's stacks that serve now, the newest first; forgets those of dead processes."""
    stacks = _folder(cache)
    if not stacks.is_dir():
        return []
    found = []
    try:
        with _looking_through(stacks):
            for file in stacks.glob(f"*/{ADDRESS}"):
                if (dead := _take(file.parent)) is not None:
                    file.unlink()
                    os.close(dead[1])
                elif url := _address(file):
                    found.append((file.stat().st_mtime_ns, url))
    except (CacheNotWritable, OSError):
        return []  # a cache that cannot be written has no running stack
    return [url for _, url in sorted(found, reverse=True)]


def _folder(cache: Path | None) -> Path:
    return cache_folder(cache) / "stacks"


def _looking_through(stacks: Path) -> AbstractContextManager[None]:
    return locked(stacks, waiting=lambda: None)


def _take(path: Path) -> tuple[StackFolder, int] | None:
    """The folder, and the descriptor that holds its lock; None if it is held."""
    path.mkdir(exist_ok=True)
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return StackFolder(path), descriptor


def _address(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["grpc"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # being written, or just removed
