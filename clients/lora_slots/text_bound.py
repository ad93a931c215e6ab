"""How much text one token can stand for, so that a text beyond an engine's context is refused before it is tokenised.

Known only where every character ends in a token, but for control characters that the vocabulary lacks, which are
counted. What is not listed here is taken to swallow text, and there is no bound then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NFC = 4
"""Characters that canonical composition can make one of (no character decomposes into more)."""
_CONTROL = {*range(0x20), 0x7F}
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that are in no UTF-8."""
_PLANES = set(range(0xF0, 0xF5))
"""Bytes that begin a character of four: without one the other three are left of it."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The most that a token stands for."""

    characters: int
    lost: str = ""
    """Characters that become no token at all."""

    def least_tokens(self, text: str) -> int:
        """So many tokens `text` has at least."""
        return -(-(len(text) - sum(map(text.count, self.lost))) // self.characters)


def token_bound(definition: Mapping[str, Any], alphabet: Sequence[str]) -> TokenBound | None:
    """The bound of a tokenizer.json; None: there is none that is known.

    `alphabet` has the characters that stand for the bytes 0 to 255 in a byte-level vocabulary.
    """
    added = definition.get("added_tokens") or []
    if definition.get("truncation") or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    lost = _lost(definition, alphabet)
    if lost is None:
        return None
    factor = 1
    for step in _steps(definition.get("normalizer"), "normalizers"):
        if step["type"] == "NFC":
            factor = _NFC
        elif lost or (step["type"] != "Prepend" and not _is_no_shorter(step)):
            return None
    vocabulary = definition["model"]["vocab"]
    return TokenBound(factor * max(len(token) for token in (*vocabulary, *(token["content"] for token in added))), lost)


def _lost(definition: Mapping[str, Any], alphabet: Sequence[str]) -> str | None:
    """The characters without a token; None: more than a text can be asked for."""
    model = definition["model"]
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return None
    splits = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    for step in splits:
        if step["type"] not in ("ByteLevel", "Digits", "Metaspace", "Split") or step.get("behavior") == "Removed":
            return None
    if any(step["type"] == "ByteLevel" for step in splits):
        lacking = {byte for byte, spelled in enumerate(alphabet) if spelled not in vocabulary} - _NEVER - _PLANES
        return "".join(map(chr, sorted(lacking))) if lacking <= _CONTROL else None
    has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return "" if has_bytes else None


def _is_no_shorter(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern") or {}
    return step["type"] == "Replace" and len(pattern.get("String", "")) in range(1, len(step["content"]) + 1)


def _steps(step: Mapping[str, Any] | None, many: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [inner for one in step[many] for inner in _steps(one, many)] if step["type"] == "Sequence" else [step]
