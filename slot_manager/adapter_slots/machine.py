"""The slot machine: every decision about which adapter is where. Events in, effects out, time as an argument.

Rules, each with a property test and a mutation that the test catches:

1. A leased, pinned, moving or waited-for adapter (*held*) is never evicted.
2. Slots in use, the one being bound included, never exceed `num_slots`, and their cache pages never exceed
   `cache_pages`: no put is sent that cannot fit.
3. The mirror (`trtllm_lora.EngineCache`) says whom the engine would drop next. Before a bind that needs pages, live
   adapters that finished earlier than the retired ones are touched, so that the engine drops whom we chose.
4. Eviction runs on the timer (idle, watermark); eviction for a bind is the exception and says so in its reason.
5. One move per adapter at a time, however many wait. Waiting leases have deadlines; an adapter that waited
   `max_wait_s` drains another one: that one gets no new leases until it left its slot.
6. Every Promote and Touch ends in exactly one event. A refused event raises EventRefused and changes nothing.
7. An engine miss demotes the adapter to HOST and binds it again if anybody wants it.

Theory of operation. An adapter climbs DISK -> HOST -> SLOT one tier at a time, as long as somebody *wants* it (waits
for it, or pinned it). `_advance` runs after every event and starts each move that fits, longest-wanting first. Binds
go one at a time: the engine's put may evict, and only a known order of puts can be mirrored. "Retired" is an adapter
that left its slot here while the engine still holds it.

This file never reads a clock, a disk or a socket.
"""

from __future__ import annotations

import heapq

from adapter_slots.errors import EventRefused
from adapter_slots.events import (
    Acquired,
    Added,
    Effect,
    Event,
    EvictAsked,
    Missed,
    Pinned,
    Promoted,
    PromoteFailed,
    Reap,
    Reason,
    Refuse,
    Released,
    Removed,
    Ticked,
    Tier,
    Touched,
    Unpinned,
)
from adapter_slots.policy import LeastRecentlyUsed, Policy
from adapter_slots.records import Adapter, Lease, MachineConfig
from adapter_slots.room import room_in_host, room_in_slots
from adapter_slots.working_set import WorkingSet


class SlotMachine(WorkingSet):
    """State of the working set of one engine. See the module's rules.

    `handle(event, now)` is the one door; `next_deadline()` says when a Ticked is due. `invariants.broken_rules`
    lists what should never be.
    """

    def __init__(self, config: MachineConfig, policy: Policy | None = None) -> None:
        super().__init__(config)
        self.policy = policy or LeastRecentlyUsed()
        self._tick_due: float | None = None

    # --- the door

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; returns the effects in the order they must be carried out.

        Raises:
            EventRefused: the event makes no sense in this state; nothing was changed.
        """
        match event:
            case Acquired():
                self._acquired(event, now)
            case Released(lease):
                self._released(self._lease(lease), now)
            case Promoted(adapter, tier):
                self._promoted(self._moving(adapter, tier), tier, now)
            case PromoteFailed():
                self._promote_failed(event, now)
            case Touched(adapter, missed):
                self._touched(self._touching(adapter), missed, now)
            case Missed(adapter):
                self._missed(self._adapter(adapter), now)
            case Ticked():
                self._ticked(now)
            case Pinned(adapter):
                self._pinned(self._adapter(adapter), now)
            case Unpinned(adapter):
                self._unpinned(self._adapter(adapter), now)
            case EvictAsked(adapter):
                self._evict_asked(self._adapter(adapter), now)
            case Added():
                self._added(event, now)
            case Removed(adapter):
                self._removed(self._adapter(adapter), now)
        if self._wanted:
            self._advance(now)
        self._arm(now)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """When a Ticked is due, None if nothing can happen by time alone."""
        while self._deadlines and self._deadlines[0][1] not in self.leases:
            heapq.heappop(self._deadlines)
        due = [self._deadlines[0][0]] if self._deadlines else []
        if self._tick_due is not None:
            due.append(self._tick_due)
        return min(due, default=None)

    # --- leases

    def _acquired(self, event: Acquired, now: float) -> None:
        adapter = self._adapter(event.adapter)
        if event.lease in self.leases:
            raise EventRefused(f"lease {event.lease} is still running")
        if adapter.removed:
            raise EventRefused(f"{adapter.name} was removed")
        too_large = self._too_large(adapter)
        if too_large:
            self._effects.append(Refuse(event.lease, adapter.digest, Reason.TOO_LARGE, too_large))
            return
        if adapter.tier is not Tier.SLOT and now < adapter.retry_at:
            self._effects.append(Refuse(event.lease, adapter.digest, Reason.FAILED, adapter.failure))
            return
        adapter.last_used = now
        lease = Lease(event.lease, adapter.digest, now, adapter.tier, event.wait_until, event.hold_s)
        self.leases[lease.id] = lease
        if adapter.tier is Tier.SLOT and not adapter.draining:
            self._grant(adapter, lease, now)
            return
        adapter.waiting[lease.id] = None
        heapq.heappush(self._deadlines, (lease.wait_until, lease.id))
        self._want(adapter, now)

    def _released(self, lease: Lease, now: float) -> None:
        adapter = self.adapters[lease.adapter]
        del self.leases[lease.id]
        adapter.waiting.pop(lease.id, None)
        if lease.id in adapter.leases:
            adapter.leases.remove(lease.id)
            adapter.last_used = now
            if not adapter.leases:
                self._finished(adapter, now)
        self._unwant(adapter)
        self._forget_if_removed(adapter, now)

    # --- moves

    def _promoted(self, adapter: Adapter, tier: Tier, now: float) -> None:
        adapter.moving, adapter.tier, adapter.failures = None, tier, 0
        adapter.tell(now, f"in {tier.name}")
        if tier is Tier.SLOT:
            self._finished(adapter, now)
            self._grant_waiting(adapter, now)
        self._forget_if_removed(adapter, now)

    def _promote_failed(self, event: PromoteFailed, now: float) -> None:
        adapter = self._moving(event.adapter, event.tier)
        self._move_failed(adapter)
        adapter.failures += 1
        adapter.failure = event.why
        adapter.retry_at = now + min(self.config.backoff_s * 2 ** (adapter.failures - 1), self.config.max_backoff_s)
        adapter.tell(now, f"{event.tier.name} failed: {event.why}")
        if event.engine_lost_idle:
            for task in self.mirror.eviction_order():
                self._missed(self._by_task[task], now)
        if not event.transient:
            self._refuse_all(adapter, Reason.FAILED, event.why)
        self._forget_if_removed(adapter, now)

    def _touched(self, adapter: Adapter, missed: bool, now: float) -> None:
        adapter.touching = False
        adapter.touched_at = now
        if missed:
            self._missed(adapter, now)
        elif not adapter.leases and adapter.moving is None:
            # a touch is a request like any other: it makes the task the most recently finished one
            self.mirror.bump(adapter.task_id)
            self._finished(adapter, now)

    def _missed(self, adapter: Adapter, now: float) -> None:
        if adapter.moving is Tier.SLOT:
            return  # it is being bound again already
        self.mirror.drop(adapter.task_id)
        if adapter.tier is Tier.SLOT:
            self._leave_slot(adapter, Reason.MISS, now)
            if adapter.pinned or adapter.waiting:
                self._want(adapter, now)

    def _advance(self, now: float) -> None:
        binding = any(a.moving is Tier.SLOT for a in self._in_slot.values())
        host_moves = sum(a.moving is Tier.HOST for a in self._in_host.values())
        others_want = False
        for digest, since in list(self._wanted.items()):
            adapter = self.adapters[digest]
            others_want |= adapter.tier is not Tier.SLOT
            if adapter.moving is not None or now < adapter.retry_at:
                continue
            if adapter.tier is Tier.DISK and host_moves < self.config.max_host_moves:
                host_moves += self._promote_to_host(adapter, now)
            elif adapter.tier is Tier.HOST and not binding:
                # the first that wants a slot decides: one that came later must not overtake it for ever
                binding = True
                self._promote_to_slot(adapter, since, now)
        if not others_want:
            self._stop_draining(now)

    def _promote_to_host(self, adapter: Adapter, now: float) -> bool:
        room = room_in_host(adapter, self._in_host.values(), self._host_bytes, self.config, self.policy)
        if not room.ready:
            return False
        for victim in room.evict:
            self._leave_host(victim, Reason.ROOM, now)
        self._enter_host(adapter)
        return True

    def _promote_to_slot(self, adapter: Adapter, since: float, now: float) -> None:
        room = room_in_slots(adapter, self._in_slot.values(), self.mirror, self._by_task, self.config, self.policy, now)
        for suspect in room.touch:
            self._touch(suspect)
        if not room.ready:
            if not room.touch and now - since >= self.config.max_wait_s:
                self._drain_one(now)
            return
        for victim in room.evict:
            self._leave_slot(victim, Reason.BIND, now)
        self._enter_slot(adapter, now)

    def _drain_one(self, now: float) -> None:
        if any(a.draining for a in self._in_slot.values()):
            return
        victim = self.policy.victim(a for a in self._in_slot.values() if not a.pinned and a.moving is None)
        if victim is not None:
            victim.draining = True
            victim.tell(now, "drains: another adapter waited long enough")

    def _stop_draining(self, now: float) -> None:
        for adapter in [a for a in self._in_slot.values() if a.draining]:
            adapter.draining = False
            self._grant_waiting(adapter, now)

    # --- time

    def _ticked(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.leases.get(lease_id)
            if lease is None or now < (lease.until if lease.granted else lease.wait_until):
                continue
            if lease.granted:
                self._effects.append(Reap(lease.id, lease.adapter))
            else:
                why = f"no slot within {now - lease.acquired_at:.1f} s"
                self._effects.append(Refuse(lease.id, lease.adapter, Reason.DEADLINE, why))
            self._released(lease, now)
        if self._tick_due is not None and now >= self._tick_due:
            self._tick_due = None
            self._evict_idle(now)
            self._refresh_pins(now)

    def _evict_idle(self, now: float) -> None:
        for adapter in [a for a in self._in_slot.values() if not a.held]:
            if now - adapter.last_used >= self.config.idle_s:
                self._leave_slot(adapter, Reason.IDLE, now)
        surplus = len(self._in_slot) - self.config.watermark
        for _ in range(surplus):
            idle = (a for a in self._in_slot.values() if not a.held and now - a.last_used >= self.config.min_idle_s)
            victim = self.policy.victim(idle)
            if victim is None:
                return
            self._leave_slot(victim, Reason.WATERMARK, now)

    def _refresh_pins(self, now: float) -> None:
        for adapter in self._in_slot.values():
            fresh_until = max(adapter.done_at, adapter.touched_at) + self.config.refresh_s
            if adapter.pinned and not adapter.leases and adapter.moving is None and now >= fresh_until:
                self._touch(adapter)

    def _arm(self, now: float) -> None:
        if not self._in_slot and not self._wanted:
            self._tick_due = None
        elif self._tick_due is None:
            self._tick_due = now + self.config.tick_s

    # --- operators and the registry

    def _pinned(self, adapter: Adapter, now: float) -> None:
        pins = [a for a in self.adapters.values() if a.pinned and a is not adapter]
        if len(pins) + 1 > self.config.num_slots:
            raise EventRefused(f"all {self.config.num_slots} slots would be pinned")
        pages = sum(a.pages for a in pins) + adapter.pages
        if pages > self.config.cache_pages:
            raise EventRefused(f"pins would take {pages} pages, the engine's cache has {self.config.cache_pages}")
        if self._too_large(adapter):
            raise EventRefused(self._too_large(adapter))
        adapter.pinned = True
        adapter.tell(now, "pinned")
        if adapter.tier is not Tier.SLOT:
            self._want(adapter, now)

    def _unpinned(self, adapter: Adapter, now: float) -> None:
        adapter.pinned = False
        adapter.tell(now, "unpinned")
        self._unwant(adapter)

    def _evict_asked(self, adapter: Adapter, now: float) -> None:
        if adapter.tier is not Tier.SLOT:
            raise EventRefused(f"{adapter.name} is not in a slot")
        if adapter.held:
            raise EventRefused(f"{adapter.name} is held: {adapter.holders}")
        self._leave_slot(adapter, Reason.OPERATOR, now)

    def _added(self, event: Added, now: float) -> None:
        known = self.adapters.get(event.adapter)
        if known is not None:
            known.removed, known.name = False, event.name
            return
        other = self._by_task.get(event.task_id)
        if other is not None:
            raise EventRefused(f"task id {event.task_id} of {event.name} belongs to {other.name} ({other.digest[:12]})")
        adapter = Adapter(event.adapter, event.name, event.task_id, event.pages, event.num_bytes, last_used=now)
        self.adapters[event.adapter] = adapter
        self._by_task[event.task_id] = adapter

    def _removed(self, adapter: Adapter, now: float) -> None:
        adapter.removed, adapter.pinned = True, False
        adapter.tell(now, "removed from the registry")
        self._refuse_all(adapter, Reason.REMOVED, f"{adapter.name} was removed")
        self._forget_if_removed(adapter, now)
