"""A world for the slot machine: an engine with the real cache's rules, requests that take time, reports that are late.

The engine's cache is `EngineCache`, which is itself held to the recorded traces of the real one. Every action is a
choice among what could happen next, so a test can drive the world from hypothesis or from a seeded generator.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from adapter_slots.errors import EventRefused
from adapter_slots.events import (
    Acquired,
    Added,
    Effect,
    Event,
    Evict,
    Grant,
    Pinned,
    Promote,
    Promoted,
    PromoteFailed,
    Reap,
    Refuse,
    Released,
    Ticked,
    Tier,
    Touch,
    Touched,
    Unpinned,
)
from adapter_slots.invariants import broken_rules
from adapter_slots.machine import SlotMachine
from adapter_slots.records import MachineConfig
from trtllm_lora import CacheError, EngineCache


@dataclass
class World:
    """One machine, one engine. `choose(n)` picks 0..n-1 and is the only source of chance."""

    config: MachineConfig
    pages: list[int]
    """Pages of adapter 1, 2, …"""
    choose: Callable[[int], int]
    lose_reports: bool = False
    now: float = 100.0
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
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        for i, pages in enumerate(self.pages, 1):
            self.post(Added(f"digest-{i}", f"adapter-{i}", i, pages, 10 * pages))

    def delay(self) -> float:
        """Up to a fifth of the report margin, so that two legs of a report stay within it."""
        return self.config.report_margin_s * self.choose(100) / 500

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Let something happen after a while."""
        heapq.heappush(self._later, (self.now + seconds, next(self._order), action))

    def post(self, event: Event) -> bool:
        """Give the machine an event and carry its effects out; False if it was refused."""
        held = {d for d, a in self.machine.adapters.items() if a.held}
        try:
            effects = self.machine.handle(event, self.now)
        except EventRefused:
            return False
        self.events.append(event)
        broken = broken_rules(self.machine)
        assert not broken, (broken, self.events[-20:])
        for effect in effects:
            if isinstance(effect, Evict) and effect.adapter in held:
                self._assert_was_let_go(effect, event)
            self._carry_out(effect)
        return True

    def _assert_was_let_go(self, effect: Evict, event: Event) -> None:
        """Rule 1: a held adapter leaves only because this very event ended the hold, or the engine had lost it."""
        ends_hold = isinstance(event, Released | Touched | Promoted | PromoteFailed | Ticked | Unpinned)
        still = self.machine.adapters[effect.adapter]
        lost = isinstance(event, Touched) and event.missed
        assert ends_hold and (lost or not (still.leases or still.pinned)), (effect, event)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
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
            case Refuse(lease, _, reason):
                self.waiting.discard(lease)
                self.refused[reason.value] += 1
            case Reap(lease):
                self.leases.discard(lease)
            case Evict():
                self.evictions.append(effect)

    def _promoted_to_host(self, adapter: str) -> None:
        if self.choose(20) == 0:
            self.post(PromoteFailed(adapter, Tier.HOST, "the disk said no"))
        else:
            self.post(Promoted(adapter, Tier.HOST))

    def _bind(self, adapter: str) -> None:
        known = self.machine.adapters[adapter]
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
        task = self.machine.adapters[adapter].task_id
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
        self.later(self.config.report_margin_s * self.choose(40), lambda: self._leave(lease, task))

    def _leave(self, lease: str, task: int) -> None:
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

    # --- what a test may do

    def acquire(self, i: int, *, wait_s: float = 60.0, hold_s: float = 60.0) -> None:
        """A request for adapter i."""
        lease = f"lease-{next(self._numbers)}"
        self.waiting.add(lease)
        self.wait_until[lease] = self.now + wait_s
        if not self.post(Acquired(f"digest-{i}", lease, self.now + wait_s, hold_s)):
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
            case _:
                self.pass_time(self.config.report_margin_s * self.choose(8) / 2)

    def pass_time(self, seconds: float) -> None:
        """Let time pass; whatever is due happens in order."""
        until = self.now + seconds
        while True:
            deadline = self.machine.next_deadline()
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
        late = [x.id for x in self.machine.leases.values() if not x.granted and self.wait_until[x.id] + 1 < until]
        assert not late, f"rule 5: {late} wait past their deadline"

    def settle(self) -> None:
        """Let everything end: unpin, and wait until nothing runs."""
        for i in range(1, len(self.pages) + 1):
            self.post(Unpinned(f"digest-{i}"))
        self.pass_time(600)
