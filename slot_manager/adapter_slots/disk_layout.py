"""Names in the directory behind DISK, what is found there at the start, and who may use it.

    <root>/<digest>/             bundles; last use is the directory's mtime
    <root>/.fetching-<digest>/   a transfer; after an error kept for the next try, and the first to go
    <root>/.leaving-*            on its way out
    <root>/.sources/             source digest of a raw adapter -> digest of the bundle it became
    <root>/.quarantine/          what is not what its manifest says, with reason.txt; the newest few
    <root>/.lock                 held by the one process that uses the directory

Other files are none of our business: reported, not touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from adapter_slots.errors import DiskFailed
from adapter_slots.store import disk_error
from trtllm_lora import BundleError, open_bundle

FETCHING, LEAVING = ".fetching-", ".leaving-"
SOURCES, QUARANTINE, LOCK = ".sources", ".quarantine", ".lock"
REASON = "reason.txt"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class Found:
    """What was in the directory at the start."""

    bundles: list[Path] = field(default_factory=list)
    """Whole ones, least recently used first."""
    removed: list[str] = field(default_factory=list)
    """Left over from transfers that a crash cut short."""
    torn: dict[Path, str] = field(default_factory=dict)
    """What has a bundle's name and is none -> why."""
    quarantined: list[Path] = field(default_factory=list)
    """From earlier runs, oldest first."""
    foreign: list[str] = field(default_factory=list)
    """Not ours; left alone."""

    @property
    def as_expected(self) -> bool:
        """Nothing but bundles."""
        return not (self.removed or self.torn or self.foreign)


def scan(root: Path) -> Found:
    """Look at everything once; remove what transfers left. Raises TierError if the directory cannot be read."""
    found = Found()
    try:
        there = sorted(root.iterdir(), key=lambda path: path.lstat().st_mtime)
        for path in there:
            _sort_in(path, found)
    except OSError as error:
        raise disk_error(error, root) from None
    return found


def _sort_in(path: Path, found: Found) -> None:
    if path.name.startswith((FETCHING, LEAVING)):
        shutil.rmtree(path, ignore_errors=True)
        found.removed.append(path.name)
    elif path.name == QUARANTINE:
        found.quarantined = sorted(path.iterdir(), key=lambda kept: kept.lstat().st_mtime)
    elif _DIGEST.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
        why = _why_torn(path)
        if why is None:
            found.bundles.append(path)
        else:
            found.torn[path] = why
    elif path.name not in (LOCK, SOURCES):
        found.foreign.append(path.name)


def _why_torn(path: Path) -> str | None:
    try:
        bundle = open_bundle(path)
    except BundleError as error:
        return str(error)
    return None if bundle.digest == path.name else f"the directory of {path.name} holds {bundle.digest}"


def take_lock(owner: object, root: Path) -> Callable[[], object]:
    """Make the directory and keep other processes out, until the function returned is called or `owner` is gone.

    Raises:
        DiskFailed: another slot manager uses it. DiskReadOnly and others: it cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if root.is_dir():
            return lambda: None  # read-only: nothing to keep others from; adding will say why it fails
        raise disk_error(error, root) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise DiskFailed(f"{root}: another slot manager uses this directory") from None
    return weakref.finalize(owner, os.close, handle)


def bytes_below(path: Path) -> int:
    """Bytes of all files below a directory."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):
                total += (Path(folder) / file).stat().st_size
    return total
