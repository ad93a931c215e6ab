"""How much text one token can stand for, so that a text beyond an engine's context is refused before it is tokenised.

Known only where no text vanishes on its way: every character must end in a token. What is not listed here is taken to
swallow text, and there is no bound then.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

_NFC = 4
"""Characters that canonical composition can make one of (no character decomposes into more)."""


def longest_token(definition: Mapping[str, Any], alphabet: Set[str]) -> int | None:
    """The most characters that one token stands for, by a tokenizer.json; None: there is no bound that is known.

    `alphabet` are the characters that stand for the 256 bytes in a byte-level vocabulary.
    """
    added = definition.get("added_tokens") or []
    vocabulary = definition["model"].get("vocab")
    if definition.get("truncation") or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if not isinstance(vocabulary, dict) or not _takes_every_character(definition, alphabet):
        return None
    factor = 1
    for step in _steps(definition.get("normalizer"), "normalizers"):
        if step["type"] == "NFC":
            factor = _NFC
        elif step["type"] != "Prepend" and not _is_no_shorter(step):
            return None
    return factor * max(len(token) for token in (*vocabulary, *(token["content"] for token in added)))


def _takes_every_character(definition: Mapping[str, Any], alphabet: Set[str]) -> bool:
    model = definition["model"]
    if model.get("type") != "BPE":
        return False
    splits = _steps(definition.get("pre_tokenizer"), "pretokenizers")
    for step in splits:
        if step["type"] not in ("ByteLevel", "Digits", "Metaspace", "Split") or step.get("behavior") == "Removed":
            return False
    if any(step["type"] == "ByteLevel" for step in splits):
        return bool(model["vocab"].keys() >= alphabet)
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))


def _is_no_shorter(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern") or {}
    return step["type"] == "Replace" and len(pattern.get("String", "")) in range(1, len(step["content"]) + 1)


def _steps(step: Mapping[str, Any] | None, many: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [inner for one in step[many] for inner in _steps(one, many)] if step["type"] == "Sequence" else [step]
