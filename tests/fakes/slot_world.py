"""A world for the slot machine: an engine with the real cache's rules, requests that take time, reports that are late.

The engine's cache is `EngineCache`, which is itself held to the recorded traces of the real one. Every action is a
choice among what could happen next, so a test can drive the world from hypothesis or from a seeded generator.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from adapter_slots.errors import EventRefused
from adapter_slots.events import (
    Acquired,
    Added,
    Drained,
    Effect,
    Event,
    Evict,
    EvictAsked,
    Facts,
    Grant,
    Pinned,
    Promote,
    Promoted,
    PromoteFailed,
    Reap,
    Reason,
    Refuse,
    Released,
    Removed,
    Ticked,
    Tier,
    Touch,
    Touched,
    Unpinned,
    Warmed,
)
from adapter_slots.invariants import broken_rules
from adapter_slots.machine import SlotMachine
from adapter_slots.records import MachineConfig
from adapter_slots.transitions import TRANSITIONS, Transition, state_of
from trtllm_lora import CacheError, EngineCache


@dataclass
class World:
    """One machine, one engine. `choose(n)` picks 0..n-1 and is the only source of chance."""

    config: MachineConfig
    pages: list[int]
    """Pages of adapter 1, 2, …"""
    choose: Callable[[int], int]
    lose_reports: bool = False
    pools: tuple[str | None, ...] = (None,)
    """Pools of the adapters, in turn."""
    now: float = 100.0
    """Time as it is; `clock` is what the machine is told."""
    wrong_by: float = 0.0
    """What the clock shows too little."""
    unseen: float = 0.0
    """Seconds of `wrong_by` that nobody could notice: they passed before the next event came."""
    misses: int = 0
    events: list[Event] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    granted: int = 0
    evictions: list[Evict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = SlotMachine(self.config)
        self.truth = EngineCache(self.config.cache_pages)
        self.active: Counter[int] = Counter()
        self.leases: set[str] = set()
        self.waiting: set[str] = set()
        self.wait_until: dict[str, float] = {}
        self.restarts = 0
        self._timer: float | None = None
        """When the machine's timer rings, in true time: it was set by the clock as it was then."""
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self.facts = {f"digest-{i}": Facts(i, pages, 10 * pages) for i, pages in enumerate(self.pages, 1)}
        self.steps: Counter[Transition] = Counter()
        """Rows of the transition table that were taken."""
        self._states: dict[str, str] = {}
        self.faults = True
        for i, digest in enumerate(self.facts, 1):
            facts = self.facts[digest] if i % 2 else None
            self.post(Added(digest, f"adapter-{i}", facts, self.pools[(i - 1) % len(self.pools)]))

    def delay(self) -> float:
        """Up to a fifth of the report margin, so that two legs of a report stay within it."""
        return self.config.report_margin_s * self.choose(100) / 500

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Let something happen after a while."""
        heapq.heappush(self._later, (self.now + seconds, next(self._order), action))

    def clock(self) -> float:
        """What a clock shows that may have been set back."""
        return self.now - self.wrong_by

    def set_clock_back(self, seconds: float) -> None:
        """Nobody is told; what is due by the old clock still comes."""
        self.wrong_by += seconds
        self.unseen += min(seconds, self.config.tick_s)

    def post(self, event: Event) -> bool:
        """Give the machine an event and carry its effects out; False if it was refused."""
        held = {d for d, a in self.machine.adapters.items() if a.held}
        try:
            effects = self.machine.handle(event, self.clock())
        except EventRefused:
            return False
        finally:
            deadline = self.machine.next_deadline()
            self._timer = None if deadline is None else deadline + self.wrong_by
        self.events.append(event)
        broken = broken_rules(self.machine)
        assert not broken, (broken, self.events[-20:])
        self._follow(event, effects)
        for effect in effects:
            if isinstance(effect, Evict) and effect.adapter in held:
                self._assert_was_let_go(effect, event)
            self._carry_out(effect)
        return True

    def _follow(self, event: Event, effects: list[Effect]) -> None:
        """Walk every adapter through the transition table, step by step, and arrive where the machine says it is."""
        if isinstance(event, Added):
            self._states.setdefault(event.adapter, state_of(self.machine.adapters[event.adapter]))
        for step in (event, *effects):
            if isinstance(step, Promote | Promoted | PromoteFailed | Evict):
                gone = isinstance(step, PromoteFailed) and step.gone
                self._take(step.adapter, "Gone" if gone else type(step).__name__)
        for digest, state in list(self._states.items()):
            adapter = self.machine.adapters.get(digest)
            if adapter is None:
                del self._states[digest]
            elif state != state_of(adapter):
                self._take(digest, "Drain" if adapter.draining else "Resume")
                assert self._states[digest] == state_of(adapter), (event, effects)

    def _take(self, digest: str, step: str) -> None:
        state = self._states[digest]
        row = next((row for row in TRANSITIONS if (row.state, row.step) == (state, step)), None)
        assert row is not None, f"no {step} in {state}"
        self.steps[row] += 1
        self._states[digest] = row.to

    def _assert_was_let_go(self, effect: Evict, event: Event) -> None:
        """Rule 1: a held adapter leaves only because this very event ended the hold, or the engine had lost it."""
        ends_hold = isinstance(
            event,
            Released | Touched | Promoted | PromoteFailed | Ticked | Pinned | Unpinned | Added | Removed | Drained,
        )
        still = self.machine.adapters.get(effect.adapter)
        if still is None:
            return
        lost = effect.reason is Reason.MISS
        assert ends_hold and (lost or not (still.leases or still.pinned)), (effect, event)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Promote(adapter, Tier.DISK):
                self.later(self.delay(), lambda: self._promoted_to_disk(adapter))
            case Promote(adapter, Tier.HOST):
                self.later(self.delay(), lambda: self._promoted_to_host(adapter))
            case Promote(adapter, Tier.SLOT):
                self.later(self.delay(), lambda: self._bind(adapter))
            case Touch(adapter):
                self.later(self.delay(), lambda: self._touch(adapter))
            case Grant(lease, _, task_id):
                self.waiting.discard(lease)
                self.leases.add(lease)
                self.granted += 1
                self.later(self.delay(), lambda: self._arrive(lease, task_id))
            case Refuse(lease, adapter, reason):
                self.waiting.discard(lease)
                assert reason is not Reason.NO_SLOT or not self.could_have_a_slot(adapter), (effect, self.events[-20:])
                self.refused[reason.value] += 1
            case Reap(lease):
                self.leases.discard(lease)
            case Evict():
                self.evictions.append(effect)

    def could_have_a_slot(self, digest: str) -> bool:
        """Whether an adapter would get a slot if every lease ended and nothing moved, while the pins in place stay.

        Asked of another machine with nothing but these pins in it.
        """
        pins = [a for a in self.machine.adapters.values() if a.pinned and a.digest != digest]
        kept = sum(a.num_bytes for a in pins if a.tier is Tier.HOST)
        config = dataclasses.replace(
            self.config, host_bytes=max(1, self.config.host_bytes - kept), max_wait_s=0.0, min_residency_s=0.0
        )
        other, in_slot = SlotMachine(config), [a for a in pins if a.tier is Tier.SLOT]
        for adapter in [*in_slot, self.machine.adapters[digest]]:
            facts = Facts(adapter.task_id, adapter.pages, adapter.num_bytes) if adapter.task_id else None
            other.handle(Added(adapter.digest, adapter.name, facts, adapter.pool), 0.0)
        for adapter in in_slot:
            other.handle(Pinned(adapter.digest), 0.0)
            assert _climbs(other, adapter.digest), "the pins have their slots"
        try:
            other.handle(Warmed(digest), 1.0)
        except EventRefused:  # too large for what is left
            return False
        return _climbs(other, digest)

    def _promoted_to_disk(self, adapter: str) -> None:
        if self.faults and self.choose(4) == 0:
            self.post(PromoteFailed(adapter, Tier.DISK, "no room or no store", transient=self.choose(2) == 0))
        else:
            self.post(Promoted(adapter, Tier.DISK, self.facts[adapter]))

    def _promoted_to_host(self, adapter: str) -> None:
        if self.faults and self.choose(20) == 0:
            kind = self.choose(3)
            short_bytes = 1 + self.choose(60) if kind == 1 else 0
            self.post(PromoteFailed(adapter, Tier.HOST, "it said no", kind == 1, kind == 0, short_bytes))
        else:
            self.post(Promoted(adapter, Tier.HOST))

    def _bind(self, adapter: str) -> None:
        known = self.facts[adapter]
        if self.faults and self.choose(30) == 0:
            self.post(PromoteFailed(adapter, Tier.SLOT, "the engine is not there", transient=self.choose(2) == 0))
            return
        try:
            self.truth.put(known.task_id, known.pages)
        except CacheError as error:
            self.misses += not self.lose_reports
            lost = bool(error.evicted)
            self.post(PromoteFailed(adapter, Tier.SLOT, str(error), transient=True, engine_lost_idle=lost))
            return
        self._engine_done(known.task_id)
        self.later(self.delay(), lambda: self.post(Promoted(adapter, Tier.SLOT)))

    def _touch(self, adapter: str) -> None:
        task = self.facts[adapter].task_id
        missed = task not in self.truth
        self.misses += missed
        if not missed:
            self.truth.bump(task)
            self._engine_done(task)
        self.later(self.delay(), lambda: self.post(Touched(adapter, missed=missed)))

    def _arrive(self, lease: str, task: int) -> None:
        if task not in self.truth:
            self.misses += 1
            self._end(lease)
            return
        self.truth.bump(task)
        self.active[task] += 1
        epoch = self.restarts
        self.later(self.config.report_margin_s * self.choose(40), lambda: self._leave(lease, task, epoch))

    def _leave(self, lease: str, task: int, epoch: int) -> None:
        if epoch != self.restarts:
            return  # it died with the engine
        self.active[task] -= 1
        self._engine_done(task)
        if not (self.lose_reports and self.choose(10) == 0):
            self.later(self.delay(), lambda: self._end(lease))

    def _engine_done(self, task: int) -> None:
        if not self.active[task]:
            self.truth.mark_done(task)

    def _end(self, lease: str) -> None:
        self.leases.discard(lease)
        self.post(Released(lease))

    def restart_engine(self) -> None:
        """The engine forgets everything; what ran in it is gone, and nobody reports its end."""
        self.truth = EngineCache(self.config.cache_pages)
        self.active.clear()
        self.restarts += 1

    def strangers(self) -> list[str]:
        """Adapters in a slot, neither moving nor being looked at, that the engine does not hold."""
        return [
            a.name
            for a in self.machine.adapters.values()
            if a.tier is Tier.SLOT and not a.touching and a.task_id not in self.truth
        ]

    # --- what a test may do

    def acquire(self, i: int, *, wait_s: float = 60.0, hold_s: float = 60.0) -> None:
        """A request for adapter i."""
        lease = f"lease-{next(self._numbers)}"
        self.waiting.add(lease)
        self.wait_until[lease] = self.now + wait_s - self.unseen
        if not self.post(Acquired(f"digest-{i}", lease, self.clock() + wait_s, hold_s)):
            self.waiting.discard(lease)

    def step(self) -> None:
        """One random thing: a request, a give-up, a pin, or time passing."""
        match self.choose(12):
            case 0 | 1 | 2 | 3:
                self.acquire(1 + self.choose(len(self.pages)), wait_s=0.2 + self.choose(100) / 10)
            case 4:
                if self.waiting:
                    self.post(Released(sorted(self.waiting)[self.choose(len(self.waiting))]))
                    self.waiting &= set(self.machine.leases)
            case 5:
                self.post(Pinned(f"digest-{1 + self.choose(len(self.pages))}"))
            case 6:
                self.post(Unpinned(f"digest-{1 + self.choose(len(self.pages))}"))
            case 7 if self.choose(6) == 0:
                self.post(Warmed(f"digest-{1 + self.choose(len(self.pages))}"))
            case 7 if self.choose(30) == 0:
                self.post(Drained())
                self.pass_time(1.0)
                self.post(Drained(on=False))
            case 7 if self.choose(10) == 0:
                self._remove_and_add(1 + self.choose(len(self.pages)))
            case 7 if self.choose(10) == 0:
                self.post(EvictAsked(f"digest-{1 + self.choose(len(self.pages))}"))
            case _:
                self.pass_time(self.config.report_margin_s * self.choose(8) / 2)

    def _remove_and_add(self, i: int) -> None:
        digest = f"digest-{i}"
        self.post(Removed(digest))
        self.pass_time(self.delay())
        self.post(Added(digest, f"adapter-{i}", self.facts[digest], self.pools[(i - 1) % len(self.pools)]))

    def pass_time(self, seconds: float) -> None:
        """Let time pass; whatever is due happens in order."""
        until = self.now + seconds
        while True:
            deadline = self._timer
            due = self._later[0][0] if self._later else None
            upcoming = min((at for at in (deadline, due) if at is not None), default=None)
            if upcoming is None or upcoming > until:
                break
            self.now = max(self.now, upcoming)
            if due is not None and due <= upcoming:
                heapq.heappop(self._later)[2]()
            else:
                self.post(Ticked())
        self.now = until
        until -= self.unseen
        late = [x.id for x in self.machine.leases.values() if not x.granted and self.wait_until[x.id] + 1 < until]
        assert not late, f"rule 5: {late} wait past their deadline"

    def settle(self) -> None:
        """Let everything end: unpin, and wait until nothing runs."""
        for i in range(1, len(self.pages) + 1):
            self.post(Unpinned(f"digest-{i}"))
        self.pass_time(600)


def _climbs(machine: SlotMachine, digest: str) -> bool:
    """Let all moves of an adapter end well; whether it gets into a slot."""
    adapter = machine.adapters[digest]
    for now in range(2, 12):
        if adapter.moving is not None:
            machine.handle(Promoted(digest, adapter.moving), float(now))
        else:
            machine.handle(Ticked(), float(now))
    return adapter.tier is Tier.SLOT
