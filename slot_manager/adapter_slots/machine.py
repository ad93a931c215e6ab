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
7. An engine miss demotes the adapter to HOST and binds it again; one miss makes every other adapter be looked at.
8. Slots reserved for a pool are never taken by another; a pool with a cap never has more.

Theory of operation. An adapter climbs REMOTE -> DISK -> HOST -> SLOT one tier at a time, as long as somebody *wants* it
(waits for it, pinned it, or asked for it to be warmed). `_advance` runs after every event and starts each move that
fits, longest-wanting first. Binds go one at a time: the engine's put may evict, and only a known order of puts can be
mirrored. "Retired" is an adapter that left its slot here while the engine still holds it.

This file never reads a clock, a disk or a socket.
"""

from __future__ import annotations

import heapq

from adapter_slots.errors import EventRefused
from adapter_slots.events import (
    Acquired,
    Added,
    Doubted,
    Drained,
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
    Warmed,
)
from adapter_slots.membership import DRAINING_TEXT
from adapter_slots.records import Adapter, Lease
from adapter_slots.room import could_fit, room_in_host, room_in_slots
from adapter_slots.timer import Timer


class SlotMachine(Timer):
    """State of the working set of one engine. See the module's rules.

    `handle(event, now)` is the one door; `next_deadline()` says when a Ticked is due. `invariants.broken_rules`
    lists what should never be.
    """

    # --- the door

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; returns the effects in the order they must be carried out.

        Raises:
            EventRefused: the event makes no sense in this state; nothing was changed.
        """
        now = self._clock_shows(now)
        match event:
            case Acquired():
                self._acquired(event, now)
            case Released(lease):
                self._released(self._lease(lease), now)
            case Promoted(adapter, tier):
                self._promoted(self._moving(adapter, tier), event, now)
            case PromoteFailed():
                self._promote_failed(event, now)
            case Touched(adapter):
                self._touched(self._touching(adapter), event, now)
            case Missed(adapter):
                self._missed(self._adapter(adapter), now)
            case Doubted():
                self._doubted(now)
            case Ticked():
                self._ticked(now)
            case Pinned(adapter):
                self._pinned(self._adapter(adapter), now)
            case Unpinned(adapter):
                self._unpinned(self._adapter(adapter), now)
            case Warmed(adapter):
                self._warmed(self._adapter(adapter), now)
            case EvictAsked(adapter):
                self._evict_asked(self._adapter(adapter), now)
            case Drained(on):
                self._drained(on)
            case Added():
                self._added(event, now)
            case Removed(adapter):
                self._removed(self._adapter(adapter), now)
        if self._wanted:
            self._advance(now)
        self._arm(now)
        effects, self._effects = self._effects, []
        return effects

    # --- leases

    def _acquired(self, event: Acquired, now: float) -> None:
        adapter = self._adapter(event.adapter)
        if event.lease in self.leases:
            raise EventRefused(f"{event.lease} is still running: give every request an id of its own")
        refusal = self._refusal(adapter, event, now)
        if refusal is not None:
            self._effects.append(refusal)
            return
        adapter.last_used = now
        wait_until = self.time(event.wait_until)
        lease = Lease(event.lease, adapter.digest, now, adapter.tier, wait_until, event.hold_s)
        self.leases[lease.id] = lease
        if adapter.tier is Tier.SLOT and not adapter.draining:
            self._grant(adapter, lease, now)
            return
        adapter.waiting[lease.id] = None
        heapq.heappush(self._deadlines, (lease.wait_until, lease.id))
        self._want(adapter, now)

    def _refusal(self, adapter: Adapter, event: Acquired, now: float) -> Refuse | None:
        """Why a lease is refused at once, if it is."""
        refuse = (event.lease, adapter.digest)
        if self.draining:
            return Refuse(*refuse, Reason.DRAINING, DRAINING_TEXT)
        if adapter.removed:
            return Refuse(*refuse, Reason.REMOVED, "it was removed")
        if self._too_large(adapter):
            return Refuse(*refuse, Reason.TOO_LARGE, self._too_large(adapter))
        if adapter.tier is Tier.SLOT and not adapter.draining:
            return None
        if now < adapter.retry_at and not adapter.retries:
            return Refuse(*refuse, Reason.FAILED, adapter.failure, adapter.retry_at - now)
        if no_room := self.no_room_ever(adapter):
            return Refuse(*refuse, Reason.NO_SLOT, no_room)
        if event.waits:
            return None
        adapter.warming = True
        self._want(adapter, now)
        eta_s = self._eta_s(adapter)
        return Refuse(*refuse, Reason.COLD, f"in {adapter.tier.name}, ready in about {eta_s:.1f} s", eta_s)

    # --- moves

    def _promoted(self, adapter: Adapter, event: Promoted, now: float) -> None:
        self._arrived(adapter, event.tier, now)
        if event.facts is not None:
            wrong = self._learn(adapter, event.facts)
            conflict = adapter.task_id == 0
            if wrong:
                self._refuse_all(adapter, Reason.CONFLICT if conflict else Reason.TOO_LARGE, wrong)
            self._refuse_hopeless()
            if conflict:  # another adapter has its task id: it cannot go up
                adapter.tier, adapter.failure, adapter.retries = Tier.REMOTE, wrong, False
                adapter.retry_at = now + self.config.max_backoff_s
        if event.tier is Tier.SLOT:
            adapter.warming, adapter.bound_at = False, now
            self._finished(adapter, now)
            self._grant_waiting(adapter, now)
        if adapter.pinned:
            self._refuse_hopeless()
        self._forget_if_removed(adapter, now)

    def _promote_failed(self, event: PromoteFailed, now: float) -> None:
        adapter = self._moving(event.adapter, event.tier)
        self._move_failed(adapter, now)
        adapter.failures += 1
        adapter.failure, adapter.retries = event.why, event.transient
        adapter.retry_at = now + min(self.config.backoff_s * 2 ** (adapter.failures - 1), self.config.max_backoff_s)
        adapter.tell(now, f"{event.tier.name} failed: {event.why}")
        if event.gone:
            adapter.tier, adapter.retry_at, adapter.retries = Tier.REMOTE, now, True
        if event.short_bytes:
            self._make_room_in_host(adapter, event.short_bytes, now)
        if event.engine_lost_idle:
            for task in self.mirror.eviction_order():
                self._missed(self._by_task[task], now)
        if not adapter.retries:
            self._refuse_all(adapter, Reason.FAILED, event.why, adapter.retry_at - now)
            if adapter.pinned:
                self._want(adapter, now)
        self._forget_if_removed(adapter, now)

    def _touched(self, adapter: Adapter, event: Touched, now: float) -> None:
        adapter.touching = False
        if event.missed:
            self._missed(adapter, now)
        elif adapter.moving is None:
            if not event.failed:
                adapter.touched_at = adapter.touch_began
            if not adapter.leases:
                # a touch is a request like any other: it makes the task the most recently finished one
                self.mirror.bump(adapter.task_id)
                self._finished(adapter, now)
        self._forget_if_removed(adapter, now)

    def _missed(self, adapter: Adapter, now: float) -> None:
        if adapter.moving is Tier.SLOT:
            return  # it is being bound again already
        self.mirror.drop(adapter.task_id)
        for lease_id in adapter.leases:
            # the engine never evicts a task that runs, so these requests ended with it
            del self.leases[lease_id]
            self._effects.append(Reap(lease_id, adapter.digest))
        adapter.leases.clear()
        if adapter.tier is Tier.SLOT:
            self._leave_slot(adapter, Reason.MISS, now)
            adapter.warming = not adapter.removed and not self.draining
            if adapter.warming:
                self._want(adapter, now)
            self._doubted(now)  # where one was lost, others may be: a restarted engine has forgotten them all

    def _doubted(self, now: float) -> None:
        for adapter in self._in_slot.values():
            if adapter.moving is None and adapter.touch_began < now:
                self._touch(adapter, now)

    def _advance(self, now: float) -> None:
        binding = self.binding
        blocked = others_want = False
        known, slot, host = self.adapters, Tier.SLOT, Tier.HOST  # seventy may wait, at every event
        wanted = [(known[digest], since) for digest, since in self._wanted.items()]
        moves = sum([adapter.moving is not None for adapter, _ in wanted])
        reserved, most_moves = bool(self.config.pools.by_name), self.config.max_host_moves
        self._host_full.clear()
        for adapter, since in wanted:
            tier = adapter.tier
            others_want = others_want or tier is not slot
            if adapter.moving is not None or now < adapter.retry_at:
                continue
            if tier is host:
                # one that came later must not overtake for ever, but a slot reserved for it takes nothing from others
                if not binding and (not blocked or (reserved and self._has_reserved_slot(adapter))):
                    binding = self._promote_to_slot(adapter, since, now)
                    blocked = blocked or (not binding and could_fit(adapter, self._in_slot.values(), self.config))
            elif moves < most_moves and tier < host:
                moves += self._promote_to_memory(adapter, since, now)
        if not others_want:
            self._stop_draining(now)

    def _promote_to_memory(self, adapter: Adapter, since: float, now: float) -> bool:
        if adapter.tier is Tier.REMOTE:
            self._begin(adapter, Tier.DISK, now)
            return True
        short_bytes = self._host_bytes + adapter.num_bytes - self.config.host_bytes
        full = self._host_full.get(adapter.pool)
        ready = (full is None or short_bytes < full) and self._make_room_in_host(adapter, short_bytes, now)
        if ready:
            self._enter_host(adapter, now)
            return True
        self._host_full[adapter.pool] = min(short_bytes, full or short_bytes)
        if now - since >= self.config.max_wait_s:
            self._drain_one(adapter, now)
        return False

    def _make_room_in_host(self, adapter: Adapter, short_bytes: int, now: float) -> bool:
        room = room_in_host(adapter, short_bytes, self._in_host.values(), self._view(now))
        for victim in room.evict:
            if victim.tier is Tier.SLOT:
                self._leave_slot(victim, Reason.ROOM, now)
            self._leave_host(victim, Reason.ROOM, now)
        return room.ready

    def _has_reserved_slot(self, adapter: Adapter) -> bool:
        return self.config.pools.has_reserved(adapter.pool, (a.pool for a in self._in_slot.values()))

    def _promote_to_slot(self, adapter: Adapter, since: float, now: float) -> bool:
        room = room_in_slots(adapter, self._view(now))
        for suspect in room.touch:
            self._touch(suspect, now)
        if room.ready:
            for victim in room.evict:
                self._leave_slot(victim, Reason.BIND, now)
            self._enter_slot(adapter, now)
            self._host_full.clear()
        elif not room.touch and now - since >= self.config.max_wait_s:
            self._drain_one(adapter, now)
        return room.ready

    def _drain_one(self, waiter: Adapter, now: float) -> None:
        if any(a.draining for a in self._in_slot.values()):
            return
        pools, used = self.config.pools, [a.pool for a in self._in_slot.values()]
        victim = self.policy.victim(
            a
            for a in self._in_slot.values()
            if not a.pinned and a.moving is None and pools.yields(a.pool, waiter.pool, used)
        )
        if victim is not None:
            victim.draining = True
            self._host_full.clear()
            victim.tell(now, f"drains: {waiter.name} waited long enough")

    def _stop_draining(self, now: float) -> None:
        for adapter in [a for a in self._in_slot.values() if a.draining]:
            adapter.draining = False
            self._grant_waiting(adapter, now)
