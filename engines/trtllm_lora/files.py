"""What is done with files in several places: hashed, written in one step, waited for."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256_of(file: Path) -> str:
    """Hex sha256 of a file's content. Raises OSError."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def replace_text(file: Path, text: str) -> None:
    """Write a file that its owner alone may read, in one step: others see the old text or the new. Raises OSError.

    It is not waited for: after a power cut the old text may be there.
    """
    import tempfile  # here: a conversion hashes and waits, and its start does not pay for this

    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as draft:
        draft.write(text)
    Path(draft.name).replace(file)


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
