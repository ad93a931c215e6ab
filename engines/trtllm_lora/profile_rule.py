"""Rules that tie several values of an engine profile together: how one is written down, and how they are asked.

A rule has a name, which its complaint carries and under which docs/engines.md explains it; the document and the tests
are made from this table. A rule is held to whatever is right by itself, so that a profile with one misspelt field still
hears everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_lora.yaml_lines import Document, Problem

Values = Mapping[str, Any]
"""Dotted name -> value, of every field that is right by itself."""
Found = tuple[str, str, str]
"""(dotted place, what is wrong, what to write)."""
Check = Callable[[Values], Iterator[Found]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a profile."""

    name: str
    needs: tuple[str, ...]
    """Values without which it is passed over."""
    says: str
    """What a profile must or may not say, for the document."""
    why: str
    check: Check
    warning: bool
    """True: it is told, and the profile is good all the same."""


class RuleTable:
    """Rules about one subject, in the order in which they were written."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def rule(self, name: str, *needs: str, says: str, why: str, warning: bool = False) -> Callable[[Check], Check]:
        """Make a rule out of a function that yields what is wrong."""

        def register(check: Check) -> Check:
            self.rules.append(Rule(name, needs, says, why, check, warning))
            return check

        return register


def broken(rules: Iterable[Rule], document: Document, values: Values) -> Iterator[Problem]:
    """What rules say of a profile's values."""
    for rule in rules:
        if all(name in values for name in rule.needs):
            for place, what, write in rule.check(values):
                where = tuple(int(step) if step.isdigit() else step for step in place.split("."))
                yield document.problem(where, what, write, warning=rule.warning, rule=rule.name)


def on_gpu(values: Values) -> bool:
    """Whether the profile is of a compiled engine."""
    return bool(values["runtime"] == "tensorrt_llm")
