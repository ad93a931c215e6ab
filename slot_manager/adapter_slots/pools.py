"""Slot pools: slots reserved for groups of adapters, and how many a group may have at most. Pure.

A pool's adapters may always have its `reserved` slots; beyond them they take shared slots like anybody, up to `cap`.
Nobody else may take a reserved slot, used or not (rule 8 of the slot machine).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Pool:
    """One group's rights."""

    reserved: int = 0
    cap: int | None = None
    """Slots its adapters may have in all; None: as many as there are."""


@dataclass(frozen=True, slots=True)
class Pools:
    """All pools, by name. An adapter belongs to one pool or to none; an unknown name has no rights and no cap."""

    by_name: Mapping[str, Pool] = field(default_factory=dict)

    def problems(self, num_slots: int) -> list[str]:
        """Why these pools cannot be had with so many slots."""
        reserved = sum(pool.reserved for pool in self.by_name.values())
        wrong = [f"pools reserve {reserved} slots, there are {num_slots}"] if reserved > num_slots else []
        for name, pool in self.by_name.items():
            if pool.reserved < 0 or (pool.cap is not None and pool.cap < max(1, pool.reserved)):
                wrong.append(f"pool {name}: reserved {pool.reserved}, cap {pool.cap}")
        return wrong

    def admits(self, pool: str | None, used: Iterable[str | None], num_slots: int) -> bool:
        """Whether one more adapter of `pool` may have a slot, given the pools of the adapters that have one."""
        if not self.by_name:  # usual, and asked at every turn
            return sum(1 for _ in used) < num_slots
        counts = Counter(used)
        own = self._of(pool)
        if own.cap is not None and counts[pool] >= own.cap:
            return False
        if counts[pool] < own.reserved:
            return True
        reserved = sum(p.reserved for p in self.by_name.values())
        beyond = sum(max(0, count - self._of(name).reserved) for name, count in counts.items())
        return beyond < num_slots - reserved

    def has_reserved(self, pool: str | None, used: Iterable[str | None]) -> bool:
        """Whether a slot reserved for `pool` is unused."""
        reserved = self._of(pool).reserved
        return reserved > 0 and sum(name == pool for name in used) < reserved

    def yields(self, victim: str | None, pool: str | None, used: Iterable[str | None]) -> bool:
        """Whether the slot of an adapter of `victim` may go to one of `pool`."""
        if victim == pool:
            return True
        counts = Counter(used)
        own = self._of(pool)
        if own.cap is not None and counts[pool] >= own.cap:
            return False
        return counts[victim] > self._of(victim).reserved

    def _of(self, name: str | None) -> Pool:
        return self.by_name.get(name, NO_RIGHTS) if name is not None else NO_RIGHTS


NO_RIGHTS = Pool()
NO_POOLS = Pools()
