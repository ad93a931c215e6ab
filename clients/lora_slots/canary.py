"""Is a canary as good as what it would replace? Judged from requests to both, sent in turn. Pure.

A canary is good when its share of errors is no higher than allowed, its answers are what is expected, and its first
token does not come much later. Times are compared with the stable version's in the same run, never with a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that was answered or failed."""

    text: str = ""
    first_s: float | None = None
    """Seconds to the first piece of text; None: there was none."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed. Shares are of 0 to 1."""

    max_errors: float = 0.0
    max_slowdown: float = 3.0
    """The canary's first token (median), at most so many times the stable version's."""
    min_match: float = 1.0
    """Share of the canary's answers that must match `expect`."""
    expect: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """What was seen of one version."""

    requests: int
    errors: int
    first_p50_s: float | None
    match: float | None
    """Share of its answers that match; None: nothing was expected."""
    first_error: str | None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {name: getattr(self, name) for name in ("requests", "errors", "first_p50_s", "match", "first_error")}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Both sides, and every reason against the canary; none: it is good."""

    stable: Side
    canary: Side
    reasons: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether it may be promoted."""
        return not self.reasons


def judge(stable: Sequence[Sample], canary: Sequence[Sample], limits: Limits) -> Verdict:
    """Compare what two versions answered."""
    old, new = _side(stable, limits.expect), _side(canary, limits.expect)
    reasons = []
    if not new.requests:
        reasons.append("no request was sent to it")
    elif new.errors / new.requests > limits.max_errors:
        share = f"{new.errors} of {new.requests} requests failed, {limits.max_errors:.0%} may"
        reasons.append(f"{share}; the first one: {new.first_error}")
    if new.match is not None and new.match < limits.min_match:
        assert limits.expect is not None  # noqa: S101 - else there is no share of matches
        wanted = f"{limits.min_match:.0%} must match {limits.expect.pattern!r}"
        reasons.append(f"{new.match:.0%} of its answers match, {wanted}")
    if new.first_p50_s is not None and old.first_p50_s and new.first_p50_s > limits.max_slowdown * old.first_p50_s:
        times = f"{new.first_p50_s * 1000:.0f} ms, {old.first_p50_s * 1000:.0f} ms of the stable one"
        reasons.append(f"its first token takes {times} (median), at most {limits.max_slowdown:g} times is allowed")
    return Verdict(old, new, tuple(reasons))


def _side(samples: Sequence[Sample], expect: re.Pattern[str] | None) -> Side:
    errors = [sample.error for sample in samples if sample.error is not None]
    answered = [sample for sample in samples if sample.error is None]
    times = sorted(sample.first_s for sample in answered if sample.first_s is not None)
    match = None
    if expect is not None and answered:
        match = sum(bool(expect.search(sample.text)) for sample in answered) / len(answered)
    return Side(
        len(samples), len(errors), times[len(times) // 2] if times else None, match, errors[0] if errors else None
    )
