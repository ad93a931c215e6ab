"""Typed access to single fields of adapter_config.json: a wrong type is a problem, never a guess."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from peft_to_trtllm.report import Findings


class FieldReader:
    """Reads the fields of one config; what cannot be read becomes a problem and the default."""

    def __init__(self, config: Mapping[str, Any], problems: Findings) -> None:
        self._config = config
        self._problems = problems

    def flag(self, name: str) -> bool:
        """True or false; null and an absent field are false."""
        value = self._config.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._wrong(name, value, "true or false")
        return False

    def number(self, name: str, default: float) -> float:
        """A finite number below 2^64."""
        value = self._config.get(name, default)
        if _is_number(value):
            return float(value)
        self._wrong(name, value, "a finite number")
        return default

    def whole(self, name: str, default: int) -> int:
        """A whole number, 1 or more and below 2^31."""
        value = self._config.get(name, default)
        if type(value) is int and 0 < value < 1 << 31:
            return value
        self._wrong(name, value, "a whole number, 1 or more")
        return default

    def pattern(self, name: str, *, whole: bool) -> dict[str, float]:
        """Pattern -> number, in the order of the file; null is empty."""
        value = self._config.get(name)
        if value is None:
            return {}
        kind = "whole numbers, 1 or more" if whole else "finite numbers"
        if not isinstance(value, dict):
            self._wrong(name, value, f"an object of {kind}")
            return {}
        good = {}
        for key, item in value.items():
            if _is_number(item) and (not whole or (type(item) is int and item > 0)):
                good[key] = item
            else:
                self._wrong(f"{name} {key!r}", item, kind)
        return good

    def _wrong(self, name: str, value: Any, wanted: str) -> None:
        self._problems.add("field-type", f"adapter_config.json {name}", f"{name} is {short(value)}", wanted)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1 << 64 and math.isfinite(value)


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
