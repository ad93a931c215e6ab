"""Who goes first when room is needed. Pure; one small interface, so that a policy is a file's worth of choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may look at."""

    @property
    def last_used(self) -> float:
        """Time of the last lease granted or released, in seconds."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses victims. The machine passes only adapters that may be evicted."""

    def victim(self, candidates: Iterable[C]) -> C | None:
        """The one to evict next, None if there is no candidate."""
        ...


class LeastRecentlyUsed:
    """Evict what was used longest ago."""

    def victim(self, candidates: Iterable[C]) -> C | None:
        """The candidate with the oldest `last_used`."""
        return min(candidates, key=lambda candidate: candidate.last_used, default=None)
