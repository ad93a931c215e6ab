"""Traffic for a forecast: a request log, or a guess by Zipf's law.

A log is JSON lines, or CSV with a header: `time` (seconds, or ISO 8601), `adapter`, and optional `seconds` (how long
the request ran) and `ttft_ms` (time to its first token). Other columns are passed over.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lora_slots.refusals import Refused

MAX_PROBLEMS = 20
LATEST_S = 1e13
"""Larger numbers of seconds are no time: so many milliseconds since 1970 are well below."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request for an adapter."""

    at: float
    """Seconds from the first request."""
    adapter: str
    seconds: float
    """How long it holds its adapter once it runs."""
    ttft_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ZipfGuess:
    """Requests per second over adapters whose popularity falls as 1 / place ** alpha; arrivals at random times."""

    alpha: float = 1.0
    per_second: float = 20.0
    seconds: float = 1.5
    count: int = 3000
    seed: int = 1

    def requests(self, adapters: Sequence[str]) -> list[Request]:
        """The same requests for the same guess."""
        chance = np.random.default_rng(self.seed)
        weights = np.arange(1, len(adapters) + 1, dtype=float) ** -self.alpha
        chosen = chance.choice(len(adapters), self.count, p=weights / weights.sum())
        times = np.cumsum(chance.exponential(1 / self.per_second, self.count))
        spans = chance.exponential(self.seconds, self.count)
        return [
            Request(at, adapters[which], span)
            for at, which, span in zip(times.tolist(), chosen.tolist(), spans.tolist(), strict=True)
        ]


def with_new_tenants(requests: Sequence[Request], names: Sequence[str], others: Sequence[str]) -> Sequence[Request]:
    """The requests, and those of new adapters: each is asked for as one of the others is, drawn by lot.

    The other's requests are moved by a span of its own, those past the end to the beginning: as many, as clumped.
    """
    if not names or not requests:
        return requests
    own: defaultdict[str, list[Request]] = defaultdict(list)
    for request in requests:
        own[request.adapter].append(request)
    chance, end = random.Random(2), requests[-1].at  # noqa: S311 - the same for the same requests
    like: list[str] = []
    while len(like) < len(names):
        like += chance.sample(others, min(len(others), len(names) - len(like)))
    found = list(requests)
    for name, other in zip(names, like, strict=True):
        by = chance.uniform(0.0, end)
        found += (
            replace(r, adapter=name, at=r.at + by - (end if r.at + by > end else 0.0)) for r in own.get(other, ())
        )
    return sorted(found, key=lambda request: request.at)


def read_log(file: Path, usual_seconds: float) -> list[Request]:
    """Requests of a log in order of time; `usual_seconds` where a line does not say how long it ran.

    Raises:
        Refused: lines that cannot be read, with their numbers.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    requests: list[tuple[float, str, float, float | None]] = []
    problems: list[str] = []
    clock: tuple[bool, int] | None = None
    for line, fields in _lines(text, file, problems):
        try:
            requests.append(_request(fields, usual_seconds))
            dated = _is_dated(fields["time"])
            clock = clock or (dated, line)
            if dated != clock[0]:
                here, there = ("ISO 8601", "seconds") if dated else ("seconds", "ISO 8601")
                problems.append(
                    f"{file}:{line}: 'time' is {here} here and {there} in line {clock[1]}: write one of them"
                )
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            problems.append(f"{file}:{line}: {reason}")
    if problems:
        more = [f"… and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise Refused("\n".join(problems[:MAX_PROBLEMS] + more))
    if not requests:
        raise Refused(f'{file}: no request in it; a line is {{"time": 0.0, "adapter": "name"}}')
    requests.sort(key=lambda request: request[0])
    start = requests[0][0]
    return [Request(at - start, adapter, seconds, ttft) for at, adapter, seconds, ttft in requests]


def _lines(text: str, file: Path, problems: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = text.splitlines()
    if lines and not lines[0].lstrip().startswith("{"):
        for row in (reader := csv.DictReader(lines)):
            yield reader.line_num, row
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            problems.append(f"{file}:{number}: not JSON")
            continue
        if isinstance(fields, dict):
            yield number, fields
        else:
            problems.append(f"{file}:{number}: an object is expected")


def _request(fields: Mapping[str, Any], usual_seconds: float) -> tuple[float, str, float, float | None]:
    adapter = fields["adapter"]
    if not isinstance(adapter, str) or not adapter:
        raise ValueError("'adapter' must be a name")
    seconds = _number(fields.get("seconds"), "seconds")
    if seconds is not None and seconds < 0:
        raise ValueError(f"'seconds' is {seconds}")
    return (
        _time(fields["time"]),
        adapter,
        usual_seconds if seconds is None else seconds,
        _number(fields.get("ttft_ms"), "ttft_ms"),
    )


def _time(value: object) -> float:
    found = math.nan
    if isinstance(value, str):
        try:
            found = float(value)
        except ValueError:
            try:
                found = datetime.fromisoformat(value).timestamp()
            except (ValueError, OverflowError):
                found = math.nan
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = _finite(value)
    if not abs(found) < LATEST_S:
        raise ValueError(f"'time' {str(value)[:40]!r} is neither seconds nor ISO 8601")
    return found


def _is_dated(time: object) -> bool:
    """Whether a time that could be read is one of the calendar."""
    try:
        float(time)  # type: ignore[arg-type]
    except ValueError:
        return True
    return False


def _number(value: object, name: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        found = _finite(value)
    except (TypeError, ValueError):
        found = math.nan
    if not abs(found) < LATEST_S:
        raise ValueError(f"{name!r} {str(value)[:40]!r} is not a number")
    return found


def _finite(value: Any) -> float:
    """A float; nan for whole numbers beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.nan
