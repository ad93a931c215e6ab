"""Arrays in files that anybody may have written: read, or told why not."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path
from typing import Any

import numpy as np

_BROKEN = (OSError, ValueError, EOFError, MemoryError, SyntaxError, tokenize.TokenError)
"""What numpy raises at files that are no array, or whose header is none."""


def load_array(source: Path | bytes) -> tuple[Any, str]:
    """(the array, "") of a `.npy` file, mapped, or of its bytes; (None, why) if it is none."""
    try:
        if isinstance(source, Path):
            return np.load(source, mmap_mode="r", allow_pickle=False), ""
        return np.load(io.BytesIO(source), allow_pickle=False), ""
    except _BROKEN as error:
        return None, " ".join(str(error).split())[:200] or type(error).__name__
