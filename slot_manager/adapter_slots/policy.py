"""Who goes first when room is needed. Pure; one small interface, so that a policy is a class's worth of choice."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may look at."""

    @property
    def last_used(self) -> float:
        """Time of the last lease granted or released, in seconds."""
        ...

    @property
    def uses(self) -> int:
        """Leases granted so far."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that would have to be moved again."""
        ...

    @property
    def rebind_s(self) -> float:
        """Seconds it took to bring it here."""
        ...

    priority: float
    """The policy's own note."""


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses victims. The machine passes only adapters that may be evicted."""

    def used(self, candidate: Candidate) -> None:
        """A lease was granted on it."""
        ...

    def victim(self, candidates: Iterable[C]) -> C | None:
        """The one to evict next, None if there is no candidate."""
        ...


_LAST_USED = attrgetter("last_used")


class LeastRecentlyUsed:
    """Evict what was used longest ago."""

    def used(self, candidate: Candidate) -> None:
        """Nothing to note: `last_used` says it all."""

    def victim(self, candidates: Iterable[C]) -> C | None:
        """The candidate with the oldest `last_used`."""
        return min(candidates, key=_LAST_USED, default=None)


class GreedyDualSizeFrequency:
    """GDSF: keep what is used often and is dear to bring back for its size; age by a clock that evictions advance.

    Priority is clock + uses x cost / size at the last use, with the seconds of its promotions as cost; the clock is
    the priority of the last victim (Cherkasova, 1998).
    """

    def __init__(self) -> None:
        self._clock = 0.0

    def used(self, candidate: Candidate) -> None:
        """Note the priority it has from now on."""
        megabytes = max(candidate.num_bytes, 1) / 1e6
        candidate.priority = self._clock + candidate.uses * max(candidate.rebind_s, 1e-3) / megabytes

    def victim(self, candidates: Iterable[C]) -> C | None:
        """The candidate of least priority; ties go to the least recently used."""
        chosen = min(candidates, key=lambda candidate: (candidate.priority, candidate.last_used), default=None)
        if chosen is not None:
            self._clock = max(self._clock, chosen.priority)
        return chosen


POLICIES: dict[str, type[Policy]] = {"lru": LeastRecentlyUsed, "gdsf": GreedyDualSizeFrequency}
