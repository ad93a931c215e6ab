"""How often each adapter was asked for, by what servers write down. Three forms are read, line by line or whole:

gateway   the JSON lines of `lora-slots gateway`; its other lines are passed over, requests of the base are not counted
proxy     a JSON object per line with `adapter` (or one of KEYS), or a text line with `adapter=NAME` somewhere; "-" and
          nothing mean the base: what nginx, Envoy and HAProxy can write of a header
triton    a trace file of Triton with tensors (`--trace-config level=TENSORS`), a JSON array; it has prompts in it

A file whose name ends in .gz is unpacked; "-" is standard input. What is in none of these forms is refused by its line.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_slots.errors import UsageError

KEYS = ("adapter", "x_gateway_model_name", "http_x_gateway_model_name", "x-gateway-model-name")
_PROBLEMS = 20
"""Told at once; the rest is counted."""
_IN_TEXT = re.compile(r'(?:^|[\s"\[(,;])adapter=("[^"]*"|[\w.:@/-]*)')
_VERSION = re.compile(r"@\d+$")


def count_adapters(files: Sequence[Path]) -> Counter[str]:
    """Adapter -> requests that named it, over all files.

    Raises:
        UsageError: a file that cannot be read, or lines in no form that is known: each by its number.
    """
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for file in files:
        text = _read(file)
        if text.lstrip()[:1] == "[":
            counts.update(_of_trace(text, file))
            continue
        for number, line in enumerate(text.splitlines(), 1):
            try:
                name = adapter_in(line) if line.strip() else None
            except ValueError as error:
                problems.append(f"{file}:{number}: {error}")
                continue
            counts.update([name] if name else [])
    if problems:
        more = [f"… and {len(problems) - _PROBLEMS} more"] if len(problems) > _PROBLEMS else []
        raise UsageError("\n".join([*problems[:_PROBLEMS], *more]))
    return counts


def adapter_in(line: str) -> str | None:
    """The adapter that a line's request was for; None: the base, or no request. Raises ValueError: no known form."""
    if not line.lstrip().startswith("{"):
        found = _IN_TEXT.search(line)
        if found is None:
            raise ValueError("neither a JSON object nor a line with adapter=NAME")
        return _name(found.group(1).strip('"'))
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("a JSON object was begun that is none") from None
    if "event" in fields:
        if fields["event"] != "request" or "digest" not in fields:
            return None
        return _VERSION.sub("", _text("adapter", fields.get("adapter"))) or None
    key = next((key for key in KEYS if key in fields), None)
    if key is None:
        raise ValueError(f"no {' or '.join(map(repr, KEYS[:2]))} in the JSON object")
    return _name("" if fields[key] is None else _text(key, fields[key]))


def _of_trace(text: str, file: Path) -> Iterator[str]:
    try:
        events = json.loads(text)
        models = {event["id"]: event["model_name"] for event in events if "model_name" in event}
        for event in events:
            tensor = event.get("tensor", {})
            asked = event.get("activity") == "TENSOR_QUEUE_INPUT" and tensor.get("name") == "adapter"
            if asked and models.get(event["id"]) == "lora_router":  # the ensemble has the same tensor once more
                yield _text("adapter", tensor["data"]).strip('"')
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{file}:1: begins like a trace file of Triton, and is none") from None


def _name(text: str) -> str | None:
    return None if text in ("", "-") else text


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is no text")
    return value


def _read(file: Path) -> str:
    try:
        if str(file) == "-":
            return sys.stdin.read()
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{file}: {getattr(error, 'strerror', None) or 'not what gzip writes'}") from None
