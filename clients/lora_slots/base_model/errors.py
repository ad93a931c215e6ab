"""What can go wrong between a package index and a base model on disk.

BaseModelError
├── CacheNotWritable    the cache folder cannot be made or written
├── NoDiskSpace         the disk is too full, found before the start or while writing
├── DownloadFailed      pip did not bring the wheel (no network, no such file, no pip)
│   └── HashMismatch    something came, but not the pinned bytes
└── GgufError           the file is not a GGUF file this reader understands

Every message stands alone: it names the path or the file and says what to do. No caller needs the cause behind it.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class BaseModelError(Exception):
    """Root of this package's errors."""


class CacheNotWritable(BaseModelError):
    """The cache folder cannot be made or written."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot write the cache {path}: {reason}. Set LORA_SLOTS_CACHE to a folder you may write to")
        self.path = path


class NoDiskSpace(BaseModelError):
    """The disk that holds `path` is too full. `needed_bytes` and `found_bytes` are None if it showed while writing."""

    def __init__(self, path: Path, needed_bytes: int | None = None, found_bytes: int | None = None) -> None:
        seen = (
            "it filled up while writing"
            if needed_bytes is None or found_bytes is None
            else f"needed {needed_bytes:,} bytes, found {found_bytes:,}"
        )
        super().__init__(
            f"no space on the disk of {path}: {seen}. Free some, or set LORA_SLOTS_CACHE to a folder on another disk"
        )
        self.path, self.needed_bytes, self.found_bytes = path, needed_bytes, found_bytes


class DownloadFailed(BaseModelError):
    """pip did not bring the wheel; `lines` are the last ones it wrote."""

    def __init__(self, what: str, lines: list[str], hint: str) -> None:
        said = "".join(f"\n  pip: {line}" for line in lines)
        super().__init__(f"{what}. {hint}{said}")
        self.lines = lines


class HashMismatch(DownloadFailed):
    """pip found a file of that name and version with other bytes than the pinned ones."""


class GgufError(BaseModelError):
    """The file is broken, or uses what this reader does not know; the message names it."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors on writing below `path` into NoDiskSpace or CacheNotWritable."""
    try:
        yield
    except ConnectionError:
        raise  # a progress bar whose terminal went away, not the disk
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise NoDiskSpace(path) from error
        raise CacheNotWritable(path, error.strerror or str(error)) from error
