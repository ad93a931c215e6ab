"""What a conversion found: every problem at once, and the table of what goes where.

A problem names the place (tensor, field or file), what was found there, what would be right, and the rule: an
anchor in docs/conversion-rules.md. Problems of one rule are counted, and only the first few are kept, so that a
file with a million bad keys still gives a readable report in bounded memory.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

RULES_PAGE = "docs/conversion-rules.md"
_KEPT_PER_RULE = 8
_LONGEST_TEXT = 300


class Problem(NamedTuple):
    """One reason against a conversion, or one thing to know about it."""

    rule: str
    """Anchor in docs/conversion-rules.md."""
    where: str
    """Tensor name, `field` of adapter_config.json, or file."""
    found: str
    wanted: str
    """What would be right, or what the user can do."""


@dataclass(slots=True)
class Findings:
    """Problems in the order they were found, with a bound on how many of one rule are kept."""

    kept: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, rule: str, where: str, found: str, wanted: str) -> None:
        """Note one problem. Control characters and overlong names of hostile files are made harmless."""
        self.counts[rule] += 1
        if self.counts[rule] <= _KEPT_PER_RULE:
            self.kept.append(Problem(rule, _plain(where), _plain(found), _plain(wanted)))

    def __bool__(self) -> bool:
        return bool(self.counts)

    def lines(self) -> list[str]:
        """One paragraph per finding, with the first place it was found at; then what was counted but not kept."""
        places: dict[tuple[str, str, str], list[str]] = {}
        for problem in self.kept:
            places.setdefault((problem.rule, problem.found, problem.wanted), []).append(problem.where)
        kinds = Counter(rule for rule, _, _ in places)
        lines = []
        for (rule, found, wanted), where in places.items():
            count = len(where) if kinds[rule] > 1 else self.counts[rule]
            more = f" and {count - 1} more" if count > 1 else ""
            lines += [f"  {where[0]}{more}: {found}", f"      {wanted} [{RULES_PAGE}#{rule}]"]
        for rule, count in self.counts.items():
            if count > _KEPT_PER_RULE and kinds[rule] > 1:
                lines.append(f"  … and {count - _KEPT_PER_RULE} more of [{RULES_PAGE}#{rule}]")
        return lines

    def to_json(self) -> dict[str, Any]:
        """`problems` and the full `counts` per rule."""
        return {"problems": [problem._asdict() for problem in self.kept], "counts": dict(self.counts)}


class Match(NamedTuple):
    """One line of the match table: an adapted module of the file and the rows it becomes."""

    module: str
    """Path below the layer, as the file spells it."""
    layer: int
    rank: int
    scale: float
    """Multiplied into B."""
    rows: tuple[str, ...]
    """Target modules, TensorRT-LLM names."""
    remark: str = ""


@dataclass(slots=True)
class Report:
    """The judgement on one adapter."""

    adapter: str
    dtype: str = ""
    problems: Findings = field(default_factory=Findings)
    warnings: Findings = field(default_factory=Findings)
    matches: list[Match] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    """Tensors that are known to have no effect on the result, and why."""

    @property
    def ok(self) -> bool:
        """True if nothing stands against the conversion."""
        return not self.problems

    def text(self) -> str:
        """For a person: verdict, every reason, every warning."""
        total = sum(self.problems.counts.values())
        head = f"{printable(self.adapter)}: can be converted"
        if total:
            head = f"{printable(self.adapter)}: refused, {total} problem{'s' if total > 1 else ''}"
        lines = [head, *self.problems.lines()]
        if self.warnings:
            lines += ["  to know:", *self.warnings.lines()]
        return "\n".join(lines)

    def table(self) -> str:
        """The match table: module, layers, rank, scale, target row; equal lines of several layers are joined."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for match in self.matches:
            key = (printable(match.module), match.rank, match.scale, match.rows, match.remark)
            groups.setdefault(key, []).append(match.layer)
        rows = [("module", "layers", "rank", "scale", "row")]
        for (module, rank, scale, targets, remark), layers in groups.items():
            target = " + ".join(targets) + (f"  ({remark})" if remark else "")
            rows.append((module, ranges(layers), str(rank), f"{scale:.6g}", target))
        rows += [(printable(name), "", "", "", f"none: {why}") for name, why in self.ignored.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def to_json(self) -> str:
        """For a machine."""
        content = {
            "adapter": self.adapter,
            "dtype": self.dtype,
            "ok": self.ok,
            "refusals": self.problems.to_json(),
            "warnings": self.warnings.to_json(),
            "matches": [match._asdict() for match in self.matches],
            "ignored": self.ignored,
        }
        return json.dumps(content, indent=1)


def printable(text: str) -> str:
    """A name of a stranger with its control characters escaped, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _plain(text: str) -> str:
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: _LONGEST_TEXT + 1])
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def ranges(layers: list[int]) -> str:
    """Numbers as spans: `0-3,7`."""
    spans: list[list[int]] = []
    for layer in sorted(set(layers)):
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
