"""Bytes -> plain data, unless looking at them would hold up every stream. Pure.

4 MB of `{},{},…` take longer to read than a token takes to come, and longer still to be told what is wrong with each.
So what a large body consists of is counted first, by whole-buffer operations that cost a few ms; a body beyond these
counts is refused with the field where they are exceeded, and everything after it has a bounded cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from pydantic_core import from_json

from lora_slots.gateway.errors import ApiError, invalid

MAX_KEYS: Final = 1024
"""Fields of one object."""
MAX_CONTAINERS: Final = 16_384
"""Objects and lists of a body."""
MAX_TEXTS: Final = 65_536
"""Texts of a body, names of fields included."""
MAX_VALUES: Final = 262_144
"""Values of a body: room for 128 prompts of 2,048 token ids."""
_SMALL: Final = 16_384
"""Bytes up to which no body can cost much."""
_RULES: Final = (
    (MAX_CONTAINERS, "objects and lists", bytes.maketrans(b"{", b"[")),
    (MAX_VALUES, "values", bytes.maketrans(b"{,", b"[[")),
)


def read_document(raw: bytes) -> dict[str, Any]:
    """A body as plain data. Raises ApiError 400: not JSON, not an object, too much in it."""
    large = len(raw) > _SMALL
    if large:
        _check_counts(raw)
    try:
        document = from_json(raw)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise _no_object()
    if large:
        _check_keys(document)
    return document


def path_of(loc: Sequence[int | str]) -> str:
    """`messages[0].content`."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:60]}" if path else step[:60]
    return path


def _check_counts(raw: bytes) -> None:
    # without escapes every quote begins or ends a text; an escape outside of texts is no JSON, and ends the reading
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = bare.split(b'"', 2 * MAX_TEXTS + 1)
    if len(parts) == 2 * MAX_TEXTS + 2:
        _refuse(b'"'.join(parts[:-1]) + b'"', MAX_TEXTS, "texts and names of fields")
    outside = parts[::2]
    joined = b"".join(outside)
    for most, what, table in _RULES:
        marks = joined.translate(table)
        if marks.count(b"[") > most:
            end = len(marks) - len(marks.split(b"[", most + 1)[-1])
            ends = list(accumulate(map(len, outside)))
            part = bisect_left(ends, end)
            rest = outside[part][: end - ends[part] + len(outside[part])]
            _refuse(b'"'.join([*parts[: 2 * part], rest]), most, what)


def _refuse(begin: bytes, most: int, what: str) -> None:
    """Refuse a body of which `begin` is one thing more than it may have, unless it is no JSON, which is told then."""
    try:
        document = from_json(begin, allow_partial=True)
    except ValueError:
        return
    if not isinstance(document, dict):
        raise _no_object()
    _check_keys(document)
    field = path_of([next(reversed(document))]) if document else None
    text = f"up to here the body has more than {most:,} {what}, and no more are taken"
    raise invalid(f"{field or 'the body'}: {text}", field)


def _check_keys(document: dict[str, Any]) -> None:
    left: list[tuple[tuple[int | str, ...], Any]] = [((), document)]
    while left:
        loc, value = left.pop()
        if isinstance(value, dict) and len(value) > MAX_KEYS:
            text = f"{path_of(loc) or 'the body'}: has {len(value):,} fields, and at most {MAX_KEYS:,} are taken"
            raise invalid(text, path_of(loc) or None)
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        left += [((*loc, key), one) for key, one in inner if isinstance(one, dict | list)]


def _no_object() -> ApiError:
    return ApiError(400, "The body must be a JSON object", code="invalid_type")
