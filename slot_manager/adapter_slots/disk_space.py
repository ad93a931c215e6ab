"""Bounded bytes in the directory behind DISK: least recently used goes first, safe against a crash at any moment.

A bundle comes into being by fsync and one rename, and goes by one rename: under its name it is whole or not there.
What is in use is never evicted. The layout is in disk_layout.py.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import structlog

from adapter_slots.disk_layout import FETCHING, LEAVING, QUARANTINE, REASON, bytes_below, scan, take_lock
from adapter_slots.errors import DiskFull, TierError
from adapter_slots.store import disk_error
from trtllm_lora.files import fsync_path

log = structlog.get_logger("adapter_slots")

QUARANTINED_AT_MOST = 4
_TOUCH_S = 60.0
_SPARE_BLOCKS = 8  # the last block of each file, directories


class Worth(IntEnum):
    """What goes first when room is needed."""

    LEFTOVER = 0
    QUARANTINED = 1
    BUNDLE = 2


@dataclass(slots=True)
class Stored:
    """One directory of ours."""

    path: Path
    worth: Worth
    num_bytes: int
    last_used: int
    """Place in the order of uses."""
    uses: int = 0


class DiskSpace:
    """The bundles in one directory. Safe to use from many threads. Errors of the file system are TierErrors."""

    def __init__(self, root: Path, max_bytes: int, on_evict: Callable[[str], None]) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._on_evict = on_evict
        self._stored: dict[str, Stored] = {}
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._room = threading.Lock()  # one thread at a time makes room; the other lock is never held over a deletion
        self._let_go = take_lock(self, root)
        self.found = scan(root)
        self._settle_in()

    @property
    def used_bytes(self) -> int:
        """Bytes of everything of ours, what is being fetched included."""
        with self._lock:
            return sum(stored.num_bytes for stored in self._stored.values())

    def path(self, digest: str) -> Path | None:
        """Where a bundle is; None if it is not."""
        with self._lock:
            stored = self._stored.get(digest)
            return stored.path if stored else None

    @contextmanager
    def in_use(self, digest: str) -> Iterator[None]:
        """The bundle is not evicted within the block; that it is used now is remembered over a restart."""
        with self._lock:
            stored = self._stored.get(digest)
            if stored is not None:
                stored.uses += 1
                stored.last_used = next(self._order)
        try:
            if stored is not None:
                _remember_use(stored.path)
            yield
        finally:
            if stored is not None:
                with self._lock:
                    stored.uses -= 1

    @contextmanager
    def fetching(self, digest: str, num_bytes: int) -> Iterator[Path]:
        """Room for a transfer and a directory for it, with what an earlier try left there.

        After a transient error the directory stays, unless the disk is full; otherwise it goes.

        Raises:
            DiskFull: more than the bound, or everything else is in use, or the file system is full.
        """
        name = f"{FETCHING}{digest}"
        path = self.root / name
        with self._room:
            self._reserve(name, path, num_bytes)
        keep = False
        try:
            try:
                path.mkdir(exist_ok=True)
            except OSError as error:
                raise disk_error(error, path) from None
            yield path
        except TierError as error:
            keep = error.transient and not isinstance(error, DiskFull)
            raise
        finally:
            with self._lock:
                left = self._stored.pop(name)
                if keep:
                    left.uses, left.num_bytes = 0, bytes_below(path)
                    self._stored[name] = left
            if not keep:
                self._delete(path)

    def publish(self, digest: str, path: Path, work: Path) -> Path:
        """Give a whole bundle below `work` (of `fetching`) its name, durably. One that is there already is kept."""
        final = self.root / digest
        try:
            for file in path.iterdir():
                fsync_path(file)
            fsync_path(path)
            path.chmod(0o755)
            num_bytes = bytes_below(path)
            with self._lock:
                if digest not in self._stored:
                    path.rename(final)
                    reserved = self._stored[work.name]
                    reserved.num_bytes = max(0, reserved.num_bytes - num_bytes)
                    self._stored[digest] = Stored(final, Worth.BUNDLE, num_bytes, next(self._order))
            fsync_path(self.root)
        except OSError as error:
            raise disk_error(error, final) from None
        return final

    def quarantine(self, digest: str, why: str) -> None:
        """Take a bundle out of service, and keep it to be looked at."""
        with self._lock:
            stored = self._stored.pop(digest, None)
        if stored is not None:
            self._quarantine(stored.path, why)
            self._on_evict(digest)

    def remove(self, digest: str) -> bool:
        """Drop a bundle that is not in use; False if it is in use or not there."""
        with self._lock:
            stored = self._stored.get(digest)
            if stored is None or stored.uses:
                return False
            del self._stored[digest]
        self._delete(stored.path)
        return True

    def close(self) -> None:
        """Let another process use the directory."""
        self._let_go()

    # --- room

    def _reserve(self, name: str, path: Path, num_bytes: int) -> None:
        """Evict until there is room, and count it as used. Nothing is evicted in vain."""
        while True:
            with self._lock:
                before = self._stored.get(name)
                more = num_bytes - (before.num_bytes if before else 0)
                others = [stored for key, stored in self._stored.items() if key != name]
                short = sum(stored.num_bytes for stored in others) + num_bytes - self.max_bytes
                short = max(short, more - self._free_bytes())
                if short <= 0:
                    self._stored[name] = Stored(path, Worth.LEFTOVER, num_bytes, next(self._order), uses=1)
                    return
                idle = [stored for stored in others if not stored.uses]
                if sum(stored.num_bytes for stored in idle) < short:
                    raise DiskFull(self._why_full(num_bytes, others))
                victim = min(idle, key=lambda stored: (stored.worth, stored.last_used))
                key = next(key for key, stored in self._stored.items() if stored is victim)
                del self._stored[key]
            self._delete(victim.path)
            if victim.worth is Worth.BUNDLE:
                self._on_evict(key)

    def _free_bytes(self) -> int:
        try:
            stat = os.statvfs(self.root)
        except OSError as error:
            raise disk_error(error, self.root) from None
        return max(0, stat.f_bavail - _SPARE_BLOCKS) * stat.f_frsize

    def _why_full(self, num_bytes: int, others: list[Stored]) -> str:
        held = sum(stored.num_bytes for stored in others if stored.uses)
        return (
            f"{self.root}: no room for {num_bytes} bytes (bound {self.max_bytes}, in use {held}, "
            f"free on the file system {self._free_bytes()})"
        )

    # --- what changes names

    def _delete(self, path: Path) -> None:
        """Cannot fail: what is left is removed at the next start."""
        gone = self.root / f"{LEAVING}{path.name}"
        try:
            if path.exists():
                shutil.rmtree(gone, ignore_errors=True)
                path.rename(gone)
                shutil.rmtree(gone)
        except OSError as error:
            log.warning("a directory on DISK stays", path=str(path), why=error.strerror)

    def _quarantine(self, path: Path, why: str) -> None:
        """Cannot fail: what cannot be moved is not used all the same."""
        log.warning("bundle quarantined", path=str(path), why=why)
        shelf = self.root / QUARANTINE
        try:
            shelf.mkdir(exist_ok=True)
            number = next(n for n in itertools.count(1) if not (shelf / f"{path.name}-{n}").exists())
            kept = shelf / f"{path.name}-{number}"
            path.rename(kept)
            (kept / REASON).write_text(why + "\n", encoding="utf-8")
            self._shelve(kept)
        except OSError as error:
            log.warning("a bundle could not be quarantined", path=str(path), why=error.strerror)

    def _shelve(self, kept: Path) -> None:
        with self._lock:
            name = f"{QUARANTINE}/{kept.name}"
            self._stored[name] = Stored(kept, Worth.QUARANTINED, bytes_below(kept), next(self._order))
            shelved = [key for key, stored in self._stored.items() if stored.worth is Worth.QUARANTINED]
            surplus = [self._stored.pop(key) for key in shelved[:-QUARANTINED_AT_MOST]]
        for old in surplus:
            self._delete(old.path)

    def _settle_in(self) -> None:
        for path in self.found.bundles:
            self._stored[path.name] = Stored(path, Worth.BUNDLE, bytes_below(path), next(self._order))
        for kept in self.found.quarantined:
            self._shelve(kept)
        for path, why in self.found.torn.items():
            self._quarantine(path, why)
        for path in self.found.bundles:  # the bound may be smaller than last time
            if self.used_bytes > self.max_bytes:
                self._delete(self._stored.pop(path.name).path)
        if not self.found.as_expected:
            log.warning(
                "DISK was not as it was left",
                root=str(self.root),
                removed=len(self.found.removed),
                torn=[path.name for path in self.found.torn],
                foreign=self.found.foreign[:20],
            )


def _remember_use(path: Path) -> None:
    with suppress(OSError):  # a read-only directory serves on, in the order it had
        if abs(time.time() - path.stat().st_mtime) > _TOUCH_S:
            os.utime(path)
