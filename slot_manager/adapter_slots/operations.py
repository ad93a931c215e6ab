"""Operations of `lora_router`: an `op` and its JSON arguments, as operators and our own models give them.

Every wrong argument is a BadRequest that names the argument, what was found and what would be right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from adapter_slots.errors import BadRequest

OPERATIONS = ("status", "explain", "lease", "end", "missed", "verify", "warm", "pin", "unpin", "evict", "drain")


class Arguments:
    """`op_args`, with typed access. Raises BadRequest: not a JSON object, or a value of a wrong kind."""

    def __init__(self, text: str) -> None:
        try:
            values = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"op_args is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadRequest("op_args must be a JSON object")
        self._values: Mapping[str, Any] = values

    def text(self, key: str) -> str:
        """A text that must be there."""
        value = self._values.get(key)
        if not isinstance(value, str) or not value:
            raise BadRequest(f"op_args needs {key!r}, a text{_found(value)}")
        return value

    def optional(self, key: str) -> str | None:
        """A text that need not be there."""
        return self.text(key) if self._values.get(key) is not None else None

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of some words."""
        value = self._values.get(key, default)
        if value not in choices:
            raise BadRequest(f"op_args: {key!r} is one of {', '.join(choices)}{_found(value)}")
        return str(value)

    def number(self, key: str, default: float) -> float:
        """A finite number that is not negative."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_amount(value):
            raise BadRequest(f"op_args: {key!r} is a number, 0 or more{_found(value)}")
        return float(value)

    def count(self, key: str, default: int) -> int:
        """A whole number that is not negative."""
        value = self.number(key, default)
        if value != int(value):
            raise BadRequest(f"op_args: {key!r} is a whole number{_found(value)}")
        return int(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false, and no text that looks like them."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise BadRequest(f"op_args: {key!r} is true or false{_found(value)}")
        return value


def _is_amount(value: float) -> bool:
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:  # a whole number beyond any float
        return False


def _found(value: object) -> str:
    return "" if value is None else f", found {value!r:.40}"
