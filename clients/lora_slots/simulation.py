"""What traffic will meet: hit rate and cold loads, by running the slot machine itself against a clock made of numbers.

The machine and its policy are the ones that serve (`adapter_slots.machine`); only the world around them is arithmetic:
promotions take the times of `Speeds`, requests run for as long as the traffic says. Nothing here reads a clock.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from adapter_slots.events import (
    Acquired,
    Added,
    Effect,
    Event,
    Evict,
    Facts,
    Grant,
    Pinned,
    Promote,
    Promoted,
    Refuse,
    Released,
    Ticked,
    Tier,
    Touch,
    Touched,
)
from adapter_slots.machine import SlotMachine
from adapter_slots.records import MachineConfig
from lora_slots.traffic import Request

WARM_UP = 0.2
"""Share of the requests that only fill the slots and are not counted."""
WARM_UP_PER_SLOT = 8
"""Requests a slot that fill the slots, where a guess gives as many as are needed."""
BATCH, MIN_BATCHES = 100, 8
STUDENT = 2.365
"""Student's t for 95 %, with MIN_BATCHES batches; fewer are needed with more."""
HOLD_S = 1e15
_QUIET = (Ticked, Touched)
QUIET_S = 60.0
"""When nothing but touches went on for this long after the last idle adapter left, time jumps to what comes next."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """How long moves take: bytes per second, and seconds beside them."""

    store: float = 500e6
    disk: float = 1.5e9
    bind: float = 6e9
    bind_s: float = 0.02
    """One token of the engine, which every bind and touch costs."""
    wait_s: float = 30.0
    """A request gives up after this long without a slot."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the machine must know of one adapter."""

    pages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is to be expected, the warm-up left out."""

    requests: int
    seconds: float
    hit_rate: float
    """Share of the requests whose adapter was in a slot when they came."""
    cold_loads_per_min: float
    wait_p50_s: float
    wait_p99_s: float
    """Over the requests that waited."""
    refused: int
    source: str
    """The traffic, in words."""
    margin: float | None = None
    """Of a guess: how far the hit rate of endless traffic may be from this one, at 95 %."""

    def text(self) -> str:
        """Two lines for a person."""
        waits = f"those that wait: p50 {self.wait_p50_s:.2f} s, p99 {self.wait_p99_s:.2f} s"
        refused = f"; {self.refused} refused" if self.refused else ""
        margin = f" ± {100 * self.margin:.1f}" if self.margin is not None else ""
        return (
            f"traffic: {self.source} ({self.requests} requests in {self.seconds:.0f} s, by the slot machine itself)\n"
            f"hit rate {self.hit_rate:.1%}{margin}, {self.cold_loads_per_min:.1f} cold loads a minute; {waits}{refused}"
        )

    def as_json(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "source": self.source,
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "hit_rate": round(self.hit_rate, 6),
            "hit_rate_margin": None if self.margin is None else round(self.margin, 4),
            "cold_loads_per_min": round(self.cold_loads_per_min, 3),
            "wait_p50_s": round(self.wait_p50_s, 4),
            "wait_p99_s": round(self.wait_p99_s, 4),
            "refused": self.refused,
        }


@dataclass(slots=True)
class _Seen:
    hits: int = 0
    granted: int = 0
    cold: int = 0
    refused: int = 0
    waits: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)
    """Hit rate of each BATCH requests."""

    @property
    def margin(self) -> float:
        """By the spread of the batches: what one request finds depends on those before it, less so for batches."""
        if len(self.batches) < MIN_BATCHES:
            return 1.0
        return float(STUDENT * statistics.stdev(self.batches) / len(self.batches) ** 0.5)


def forecast(
    config: MachineConfig,
    adapters: Mapping[str, Kind],
    requests: Sequence[Request],
    *,
    pins: Sequence[str] = (),
    speeds: Speeds | None = None,
    source: str = "",
    precision: float | None = None,
) -> Forecast:
    """Run requests (in order of time) over adapters that begin on DISK; `pins` are in slots from the start.

    With a precision no more of them are run than the hit rate needs to be known so well.

    Raises:
        EventRefused: the machine does not take these pins.
    """
    world = _World(config, adapters, requests, speeds or Speeds(), precision)
    world.run(pins)
    seen, counted = world.seen, requests[world.first : world.asked]
    seconds = max(counted[-1].at - counted[0].at, 1e-9) if counted else 1e-9
    waits = sorted(seen.waits) or [0.0]
    return Forecast(
        requests=len(counted),
        seconds=seconds,
        hit_rate=seen.hits / max(1, seen.granted + seen.refused),
        cold_loads_per_min=seen.cold / seconds * 60,
        wait_p50_s=waits[len(waits) // 2],
        wait_p99_s=waits[min(len(waits) - 1, int(len(waits) * 0.99))],
        refused=seen.refused,
        source=source,
        margin=None if precision is None else seen.margin,
    )


class _World:
    """The slot machine's shell and surroundings, as a queue of events to come."""

    def __init__(
        self,
        config: MachineConfig,
        adapters: Mapping[str, Kind],
        requests: Sequence[Request],
        speeds: Speeds,
        precision: float | None,
    ) -> None:
        self.machine = SlotMachine(config)
        self.adapters, self.requests, self.speeds = adapters, requests, speeds
        self.first = int(len(requests) * WARM_UP)
        if precision is not None:
            self.first = min(self.first, WARM_UP_PER_SLOT * config.num_slots)
        self.asked = 0
        """How many of the requests have come."""
        self.precision = precision
        self._hits_before = 0
        self.counted_from = requests[self.first].at if requests else 0.0
        self.seen = _Seen()
        self._quiet_s = config.idle_s + QUIET_S
        self._stirred = 0.0
        """When something other than a touch or a tick last happened."""
        self._queue: list[tuple[float, int, Event]] = []
        self._order = count()

    def run(self, pins: Sequence[str]) -> None:
        for task_id, (name, kind) in enumerate(self.adapters.items(), 1):
            self._handle(Added(name, name, Facts(task_id, kind.pages, kind.num_bytes)), 0.0)
        for name in pins:
            self._handle(Pinned(name), 0.0)
        coming = self._next()
        while coming is not None or self._queue:
            at = coming[1].at if coming is not None else float("inf")
            tick = self.machine.next_deadline()
            soonest = self._queue[0][0] if self._queue else float("inf")
            if tick is not None and tick < (next_at := min(at, soonest)):
                # a late tick catches up once: so a night without requests is one tick, not tens of thousands
                self._handle(Ticked(), next_at if tick - self._stirred > self._quiet_s else tick)
            elif coming is not None and at <= soonest:
                number, request = coming
                lease = str(number)
                self._handle(Acquired(request.adapter, lease, at + self.speeds.wait_s, HOLD_S), at)
                coming = self._next()
            else:
                now, _, event = heapq.heappop(self._queue)
                self._handle(event, now)

    def _next(self) -> tuple[int, Request] | None:
        """The request that comes next, with its number; None after the last one that is needed."""
        counted, seen = self.asked - self.first, self.seen
        if self.precision is not None and counted > 0 and counted % BATCH == 0:
            seen.batches.append((seen.hits - self._hits_before) / BATCH)
            self._hits_before = seen.hits
            if seen.margin <= self.precision:
                return None
        if self.asked == len(self.requests):
            return None
        self.asked += 1
        return self.asked - 1, self.requests[self.asked - 1]

    def _handle(self, event: Event, now: float) -> None:
        if not isinstance(event, _QUIET):
            self._stirred = now
        for effect in self.machine.handle(event, now):
            if isinstance(effect, Touch):  # most effects, when traffic is heavy
                self._later(now + self.speeds.bind_s, Touched(effect.adapter))
            else:
                self._stirred = now
                self._carry_out(effect, now)

    def _carry_out(self, effect: Effect, now: float) -> None:
        counted = now >= self.counted_from
        match effect:
            case Promote(adapter, tier):
                self.seen.cold += counted and tier is Tier.SLOT
                self._later(now + self._move_s(adapter, tier), Promoted(adapter, tier))
            case Grant(lease=lease, found_in=found_in, waited_s=waited_s):
                number = int(lease)
                self._later(now + self.requests[number].seconds, Released(lease))
                if number >= self.first:
                    self.seen.granted += 1
                    self.seen.hits += found_in is Tier.SLOT and waited_s == 0
                    if waited_s > 0:
                        self.seen.waits.append(waited_s)
            case Refuse(lease=lease):
                self.seen.refused += int(lease) >= self.first
            case Evict():
                pass  # nothing takes time: the copy is given up at once

    def _move_s(self, adapter: str, tier: Tier) -> float:
        size = self.adapters[adapter].num_bytes
        if tier is Tier.SLOT:
            return self.speeds.bind_s + size / self.speeds.bind
        return size / (self.speeds.disk if tier is Tier.HOST else self.speeds.store)

    def _later(self, at: float, event: Event) -> None:
        heapq.heappush(self._queue, (at, next(self._order), event))
