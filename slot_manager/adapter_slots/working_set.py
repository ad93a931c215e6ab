"""State of the working set and the elementary steps on it; each step keeps the accounts right.

`machine.py` decides which step comes when. Steps append effects to `self._effects` and never fail half way.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from adapter_slots.errors import EventRefused
from adapter_slots.events import Effect, Evict, Facts, Grant, Promote, Reason, Refuse, Tier, Touch
from adapter_slots.policy import LeastRecentlyUsed, Policy
from adapter_slots.records import Adapter, Lease, MachineConfig
from adapter_slots.room import NEVER, SlotView, no_room_ever
from trtllm_lora.engine_cache import EngineCache

GUESSED_MOVE_S = 0.5
"""What a promotion is taken to last before one was seen."""


class WorkingSet:
    """Adapters, leases, the mirror of the engine's cache, and who is in which tier."""

    def __init__(self, config: MachineConfig, policy: Policy | None = None) -> None:
        self.config = config
        self.policy = policy or LeastRecentlyUsed()
        self.mirror = EngineCache(config.cache_pages)
        self.adapters: dict[str, Adapter] = {}
        self.leases: dict[str, Lease] = {}
        self.draining = False
        """Nothing new is granted."""
        self._by_task: dict[int, Adapter] = {}
        self._wanted: OrderedDict[str, float] = OrderedDict()
        """Digest -> since when somebody waits for it, or it is pinned or to be warmed and not in a slot."""
        self._in_host: dict[str, Adapter] = {}
        """In HOST or moving there; those in a slot included."""
        self._in_slot: dict[str, Adapter] = {}
        """In SLOT or moving there."""
        self._host_bytes = 0
        self._host_full: dict[str | None, int] = {}
        """Pool -> missing bytes for which nobody in HOST may go now: who misses as many need not look again."""
        self.binding = False
        """An adapter is moving to SLOT."""
        self._unsure_at = NEVER
        self._move_s: dict[Tier, float] = {}
        """Seconds a promotion to each tier takes, smoothed."""
        self._deadlines: list[tuple[float, str]] = []
        self._effects: list[Effect] = []

    # --- leases

    def _grant(self, adapter: Adapter, lease: Lease, now: float) -> None:
        lease.granted, lease.until = True, now + lease.hold_s
        heapq.heappush(self._deadlines, (lease.until, lease.id))
        if not adapter.leases:
            adapter.leased_since = now
        adapter.leases.add(lease.id)
        adapter.last_used = now
        adapter.uses += 1
        self.policy.used(adapter)
        self.mirror.bump(adapter.task_id)
        self._effects.append(Grant(lease.id, adapter.digest, adapter.task_id, lease.found_in, now - lease.acquired_at))

    def _grant_waiting(self, adapter: Adapter, now: float) -> None:
        for lease_id in list(adapter.waiting):
            del adapter.waiting[lease_id]
            self._grant(adapter, self.leases[lease_id], now)
        self._unwant(adapter)

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

    def _refuse_all(self, adapter: Adapter, reason: Reason, why: str, retry_after_s: float | None = None) -> None:
        for lease_id in adapter.waiting:
            del self.leases[lease_id]
            self._effects.append(Refuse(lease_id, adapter.digest, reason, why, retry_after_s))
        adapter.waiting.clear()
        adapter.warming = False
        self._unwant(adapter)

    def _refuse_hopeless(self) -> None:
        """A pin came into place, or an adapter's size was learnt: who can have no slot now need not wait for one."""
        for adapter in [self.adapters[digest] for digest in self._wanted]:
            if adapter.waiting and adapter.tier is not Tier.SLOT and (why := self.no_room_ever(adapter)):
                self._refuse_all(adapter, Reason.NO_SLOT, why)

    def _finished(self, adapter: Adapter, now: float) -> None:
        adapter.done_at = now
        if not adapter.touching:
            self.mirror.mark_done(adapter.task_id)

    def _touch(self, adapter: Adapter, now: float) -> None:
        if not adapter.touching:
            adapter.touching, adapter.touch_began = True, now
            self.mirror.bump(adapter.task_id)
            self._effects.append(Touch(adapter.digest))

    def _want(self, adapter: Adapter, now: float) -> None:
        self._wanted.setdefault(adapter.digest, now)

    def _unwant(self, adapter: Adapter) -> None:
        climbs = adapter.tier is not Tier.SLOT and (adapter.pinned or adapter.warming)
        if not adapter.waiting and not climbs:
            self._wanted.pop(adapter.digest, None)

    # --- tiers

    def _learn(self, adapter: Adapter, facts: Facts) -> str:
        """Take a bundle's facts; returns why they cannot be true, or ""."""
        other = self._by_task.get(facts.task_id, adapter)
        if other is not adapter:
            return (  # no name: the other may be another tenant's
                f"it and the adapter of digest {other.digest[:12]} are one adapter to the engine, task id "
                f"{facts.task_id}, under two digests: publish it once, and make the other name an alias"
            )
        adapter.task_id, adapter.pages, adapter.num_bytes = facts.task_id, facts.pages, facts.num_bytes
        self._by_task[facts.task_id] = adapter
        return self._too_large(adapter)

    def _begin(self, adapter: Adapter, tier: Tier, now: float) -> None:
        adapter.moving, adapter.move_began = tier, now
        self._effects.append(Promote(adapter.digest, tier))

    def _enter_host(self, adapter: Adapter, now: float) -> None:
        self._in_host[adapter.digest] = adapter
        self._host_bytes += adapter.num_bytes
        self._begin(adapter, Tier.HOST, now)

    def _enter_slot(self, adapter: Adapter, now: float) -> None:
        self._in_slot[adapter.digest] = adapter
        for task in self.mirror.put(adapter.task_id, adapter.pages):
            dropped = self._by_task[task]
            dropped.tell(now, f"dropped by the engine for {adapter.name}")
            self._forget_if_removed(dropped, now)
        self._begin(adapter, Tier.SLOT, now)
        self.binding = True

    def _arrived(self, adapter: Adapter, tier: Tier, now: float) -> None:
        seconds = now - adapter.move_began
        adapter.move_s[tier] = seconds
        known = self._move_s.get(tier, seconds)
        self._move_s[tier] = known + 0.2 * (seconds - known)
        adapter.moving, adapter.tier, adapter.failures = None, tier, 0
        self.binding = self.binding and tier is not Tier.SLOT
        adapter.tell(now, f"in {tier.name} after {seconds:.3f} s")

    def _move_failed(self, adapter: Adapter, now: float) -> None:
        if adapter.moving is Tier.SLOT:
            del self._in_slot[adapter.digest]
            self.mirror.drop(adapter.task_id)
            self._unsure_at, self.binding = now, False
        elif adapter.moving is Tier.HOST:
            del self._in_host[adapter.digest]
            self._host_bytes -= adapter.num_bytes
        adapter.moving = None

    def _leave_slot(self, adapter: Adapter, reason: Reason, now: float) -> None:
        del self._in_slot[adapter.digest]
        adapter.tier, adapter.draining = Tier.HOST, False
        self._tell_eviction(adapter, Tier.SLOT, reason, now)

    def _leave_host(self, adapter: Adapter, reason: Reason, now: float) -> None:
        del self._in_host[adapter.digest]
        self._host_bytes -= adapter.num_bytes
        adapter.tier = Tier.DISK
        self._tell_eviction(adapter, Tier.HOST, reason, now)

    def _tell_eviction(self, adapter: Adapter, tier: Tier, reason: Reason, now: float) -> None:
        adapter.tell(now, f"left {tier.name}: {reason.value}")
        self._effects.append(Evict(adapter.digest, tier, reason))

    def _forget_if_removed(self, adapter: Adapter, now: float) -> None:
        if not adapter.removed or adapter.held:
            return
        if adapter.tier is Tier.SLOT:
            self._leave_slot(adapter, Reason.REMOVED, now)
        if adapter.tier is Tier.HOST:
            self._leave_host(adapter, Reason.REMOVED, now)
        if adapter.task_id not in self.mirror:
            # while the engine holds it, its task id must stay known: a victim is named by it
            del self.adapters[adapter.digest]
            self._by_task.pop(adapter.task_id, None)

    # --- look-ups

    def adapter_of_task(self, task_id: int) -> str:
        """Name of the adapter that has a task id, for people."""
        adapter = self._by_task.get(task_id)
        return adapter.name if adapter else f"task {task_id}"

    def _view(self, now: float) -> SlotView:
        return SlotView(
            self._in_slot.values(), self.mirror, self._by_task, self.config, self.policy, now, self._unsure_at
        )

    def _eta_s(self, adapter: Adapter) -> float:
        """Seconds until a cold adapter could be in a slot, by what its moves, or others', took."""
        missing = [tier for tier in (Tier.DISK, Tier.HOST, Tier.SLOT) if tier > adapter.tier]
        return sum(adapter.move_s.get(tier) or self._move_s.get(tier, GUESSED_MOVE_S) for tier in missing)

    def _adapter(self, digest: str) -> Adapter:
        adapter = self.adapters.get(digest)
        if adapter is None:
            raise EventRefused(f"no adapter {digest[:12]}")
        return adapter

    def _lease(self, lease_id: str) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise EventRefused(f"no lease {lease_id}")
        return lease

    def _moving(self, digest: str, tier: Tier) -> Adapter:
        adapter = self._adapter(digest)
        if adapter.moving is not tier:
            raise EventRefused(f"{adapter.name} is not on its way to {tier.name}")
        return adapter

    def _touching(self, digest: str) -> Adapter:
        adapter = self._adapter(digest)
        if not adapter.touching:
            raise EventRefused(f"{adapter.name} is not being touched")
        return adapter

    def no_room_ever(self, adapter: Adapter) -> str:
        """Why an adapter can have no slot while the pins in place stay, whatever else ends; "" if it can."""
        return no_room_ever(adapter, self._in_slot.values(), self._in_host.values(), self.config)

    def _too_large(self, adapter: Adapter) -> str:
        if adapter.pages > self.config.cache_pages:
            return f"takes {adapter.pages} pages, the engine's LoRA cache has {self.config.cache_pages}"
        if adapter.num_bytes > self.config.host_bytes:
            return f"takes {adapter.num_bytes} bytes, HOST has {self.config.host_bytes}"
        return ""
