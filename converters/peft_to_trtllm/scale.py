"""Rank and scale of one module, as PEFT computes them when it loads the files.

    scale = alpha / r        or, with use_rslora,        alpha / sqrt(r)

`alpha` and `r` are looked up separately in alpha_pattern and rank_pattern: keys in file order, the first with
`re.match(rf"(.*\\.)?({key})$", path)` wins, no match means the default; path is the module's path without
`base_model.model.` (PEFT `utils/other.py` get_pattern_key). Saving sorts the keys, so the file's order can differ from
the order in training: what a loaded adapter does is what counts, and the rank is checked against the tensor.

Patterns are regular expressions of a stranger: those that could take exponential time are refused, and all matching
together has a time limit.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from peft_to_trtllm.fields import Settings
from peft_to_trtllm.report import Findings

sre: Any = import_module("re._constants")
sre_parser: Any = import_module("re._parser")
"""The pattern's own parse tree: nothing public tells what a pattern may cost."""
_LONGEST_KEY = 512
_MATCHING_SECONDS = 10.0
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)


class Scale(NamedTuple):
    """Rank and scale the config gives one module. `alpha / divisor` in float64."""

    rank: int
    alpha: float
    scale: float


class ScaleRules:
    """The lookup for one adapter. Keys that match nothing are remembered: PEFT passes over them silently."""

    def __init__(self, settings: Settings, problems: Findings) -> None:
        self._settings = settings
        self._problems = problems
        self._ranks = _compile("rank_pattern", settings.rank_pattern, problems)
        self._alphas = _compile("alpha_pattern", settings.alpha_pattern, problems)
        self._used: set[tuple[str, str]] = set()
        self._deadline = time.monotonic() + _MATCHING_SECONDS

    def of(self, path: str) -> Scale:
        """Rank and scale of the module at `path` (without `base_model.model.`)."""
        rank = int(self._first("rank_pattern", self._ranks, path, self._settings.r))
        alpha = float(self._first("alpha_pattern", self._alphas, path, self._settings.lora_alpha))
        divisor = math.sqrt(rank) if self._settings.use_rslora else float(rank)
        return Scale(rank, alpha, alpha / divisor)

    def unused(self) -> list[tuple[str, str]]:
        """(field, key) of every pattern that matched no module."""
        keys = [("rank_pattern", key) for key, _, _ in self._ranks]
        keys += [("alpha_pattern", key) for key, _, _ in self._alphas]
        return [pair for pair in keys if pair not in self._used]

    def _first(self, name: str, table: list[tuple[str, re.Pattern[str], float]], path: str, default: float) -> float:
        for key, pattern, value in table:
            if time.monotonic() > self._deadline:
                self._problems.add(
                    "pattern-cost",
                    f"adapter_config.json {name}",
                    f"matching the patterns took longer than {_MATCHING_SECONDS:.0f} s",
                    "fewer or simpler patterns",
                )
                self._deadline = math.inf
                table.clear()
                return default
            if pattern.match(path):
                self._used.add((name, key))
                return value
        return default


def _compile(name: str, patterns: Mapping[str, float], problems: Findings) -> list[tuple[str, re.Pattern[str], float]]:
    table = []
    for key, value in patterns.items():
        reason = cost_of(key)
        if reason:
            problems.add(
                "pattern-cost",
                f"adapter_config.json {name}",
                f"pattern {key[:80]!r} {reason}",
                "a plain name or a simpler pattern",
            )
        else:
            table.append((key, re.compile(rf"(.*\.)?({key})$"), value))
    return table


def cost_of(key: str) -> str | None:
    """Why this pattern of a stranger must not be looked for at the end of a path, or None."""
    cost = complexity(rf"(.*\.)?({key})$", key)
    if isinstance(cost, str):
        return cost
    open_repeats, choices = cost
    if open_repeats > 4 or choices > 7:
        return f"has {open_repeats - 1} open repetitions and {choices - 1} choices; at most 3 and 6 are matched"
    return None


def complexity(pattern: str, key: str) -> tuple[int, int] | str:
    """(open repetitions, other choices) of a pattern around a stranger's key, or why it must never be run.

    With k open repetitions a match takes up to n^k steps on a path of n characters.
    """
    if len(key) > _LONGEST_KEY:
        return f"has {len(key)} characters, at most {_LONGEST_KEY} are matched"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(key)  # the key alone must be whole: `a)(b` would only compile inside PEFT's brackets
            tree = sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        return f"is not a valid regular expression: {error}"
    try:
        return _choices(tree, repeated=False)
    except _Explosive:
        return "has a choice within a repetition, which can take exponential time"


class _Explosive(Exception):
    pass


def _choices(tree: Any, *, repeated: bool) -> tuple[int, int]:
    """(open repetitions, other choice points) of a parsed pattern; `_Explosive` if one stands within a repetition."""
    open_repeats = choices = 0
    for op, argument in tree:
        again = op in _REPEATS and argument[1] > 1
        is_choice = op in _REPEATS or op is sre.BRANCH
        if is_choice and repeated:
            raise _Explosive
        is_open = again and argument[1] > 8
        open_repeats += is_open
        choices += is_choice and not is_open
        below = [_choices(part, repeated=repeated or again) for part in _parts(argument)] or [(0, 0)]
        # of alternatives one is taken: the costliest counts
        join = max if op is sre.BRANCH else sum
        open_repeats, choices = open_repeats + join(b[0] for b in below), choices + join(b[1] for b in below)
    return open_repeats, choices


def _parts(argument: Any) -> list[Any]:
    if isinstance(argument, sre_parser.SubPattern):
        return [argument]
    if isinstance(argument, list | tuple):
        return [part for item in argument for part in _parts(item)]
    return []
