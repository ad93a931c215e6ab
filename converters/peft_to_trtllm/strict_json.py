"""JSON from strangers: one object, no duplicate keys, no NaN, bounded.

Python's parser keeps the last of two equal keys and reads `NaN` and `Infinity`; for a file that decides what is
multiplied into weights both are reasons to refuse.
"""

from __future__ import annotations

import json
from typing import Any


class JsonProblem(ValueError):
    """The text is not one strict JSON object; the message is one line."""


def parse_object(data: bytes, *, limit: int, most_values: int = 1 << 20) -> dict[str, Any]:
    """Parse one JSON object of at most `limit` bytes and about `most_values` values.

    An empty list takes two bytes here and sixty-four once it is parsed: the number of values bounds the memory.


    Raises:
        JsonProblem: too long, not UTF-8, not JSON, not an object, nested too deeply, a key twice, NaN or Infinity, half
            a surrogate pair.
    """
    if len(data) > limit:
        raise JsonProblem(f"{len(data)} bytes of JSON, at most {limit} are read")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > most_values:
        raise JsonProblem(f"about {values} values in JSON, at most {most_values} are read")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except JsonProblem:
        raise
    except RecursionError:
        raise JsonProblem("JSON nested too deeply") from None
    except ValueError as error:
        raise JsonProblem(f"invalid JSON: {error}") from None
    if b"\\ud" in data.lower() and not _is_unicode(value):
        raise JsonProblem("a text in it is no Unicode (half of a surrogate pair)")
    if not isinstance(value, dict):
        raise JsonProblem(f"a JSON object is wanted, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonProblem(f"key {twice[:120]!r} stands there twice")
    return result


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(text: str) -> Any:
    raise JsonProblem(f"{text} is not JSON")
