"""Merge advice: which adapters should become a base model of their own.

An adapter costs a little on every token, and its slot. It is worth an engine of its own when it carries more than 80 %
of the traffic, did so the whole time, and its users wait for the first token. Only what the log shows is claimed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lora_slots.traffic import Request

SHARE = 0.8
WINDOWS = 10
STEADY = 0.9
"""Share of the windows in which the adapter must dominate to be called permanent."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What is said of one adapter, and the three reasons."""

    adapter: str
    share: float
    steady: float
    """Share of ten equal windows in which it had more than 80 % of the requests."""
    ttft_p95_ms: float | None
    merge: bool | None
    """None: merge it if its users are bound by latency, which the log does not say."""
    why: str

    def text(self) -> str:
        """One line."""
        verdict = {True: "merge", False: "leave", None: "merge if its users are bound by latency"}[self.merge]
        return f"{self.adapter}: {verdict}: {self.why}"


def advise(requests: Sequence[Request], latency_goal_ms: float | None = None) -> list[Advice]:
    """Advice on each adapter with more than 80 % of the requests (one at most), else on the most used one."""
    counts = Counter(request.adapter for request in requests)
    if not counts:
        return []
    adapter, count = counts.most_common(1)[0]
    share, steady = count / len(requests), _steady(requests, adapter)
    times = sorted(r.ttft_ms for r in requests if r.adapter == adapter and r.ttft_ms is not None)
    p95 = times[min(len(times) - 1, int(0.95 * len(times)))] if times else None
    return [_judge(adapter, share, steady, p95, latency_goal_ms)]


def _judge(adapter: str, share: float, steady: float, p95: float | None, goal: float | None) -> Advice:
    facts = f"{share:.0%} of the requests"
    if share <= SHARE:
        return Advice(adapter, share, steady, p95, False, f"{facts}, which is not more than {SHARE:.0%}")
    if steady < STEADY:
        why = f"{facts}, but above {SHARE:.0%} in only {steady:.0%} of the time: not permanent"
        return Advice(adapter, share, steady, p95, False, why)
    facts += f", above {SHARE:.0%} in {steady:.0%} of the time"
    if p95 is None or goal is None:
        missing = "the log has no ttft_ms" if p95 is None else "no --latency-goal-ms was given"
        return Advice(adapter, share, steady, p95, None, f"{facts}; {missing}")
    if p95 <= goal:
        why = f"{facts}, and its first token comes within the goal (p95 {p95:.0f} ms, goal {goal:.0f} ms)"
        return Advice(adapter, share, steady, p95, False, why)
    why = f"{facts}, and its first token misses the goal (p95 {p95:.0f} ms, goal {goal:.0f} ms)"
    return Advice(adapter, share, steady, p95, True, why)


def _steady(requests: Sequence[Request], adapter: str) -> float:
    span = requests[-1].at - requests[0].at
    windows: list[list[bool]] = [[] for _ in range(WINDOWS)]
    for request in requests:
        place = min(WINDOWS - 1, int((request.at - requests[0].at) / span * WINDOWS)) if span else 0
        windows[place].append(request.adapter == adapter)
    used = [window for window in windows if window]
    return sum(sum(window) / len(window) > SHARE for window in used) / len(used)
