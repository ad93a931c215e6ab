"""The code of a document: what is run, and what is not with the reason.

A block is run unless `<!-- not run: reason -->` stands on the line before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One piece of code."""

    language: str
    code: str
    reason: str | None
    """Why it is not run."""


def blocks(page: str) -> list[Block]:
    """The code of docs/`page`, or of README.md."""
    text = (ROOT / ("" if page == "README.md" else "docs") / page).read_text(encoding="utf-8")
    return [Block(found["language"], found["code"], found["reason"]) for found in _BLOCK.finditer(text)]


def run(page: str, language: str) -> list[str]:
    """The code of a language that is run."""
    return [block.code for block in blocks(page) if block.language == language and block.reason is None]
