"""State of the working set and the elementary steps on it; each step keeps the accounts right.

`machine.py` decides which step comes when. Steps append effects to `self._effects` and never fail half way.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from adapter_slots.errors import EventRefused
from adapter_slots.events import Effect, Evict, Grant, Promote, Reason, Refuse, Tier, Touch
from adapter_slots.records import Adapter, Lease, MachineConfig
from trtllm_lora.engine_cache import EngineCache


class WorkingSet:
    """Adapters, leases, the mirror of the engine's cache, and who is in which tier."""

    def __init__(self, config: MachineConfig) -> None:
        self.config = config
        self.mirror = EngineCache(config.cache_pages)
        self.adapters: dict[str, Adapter] = {}
        self.leases: dict[str, Lease] = {}
        self._by_task: dict[int, Adapter] = {}
        self._wanted: OrderedDict[str, float] = OrderedDict()
        """Digest -> since when somebody waits for it, or it is pinned and not in a slot."""
        self._in_host: dict[str, Adapter] = {}
        """In HOST or moving there; those in a slot included."""
        self._in_slot: dict[str, Adapter] = {}
        """In SLOT or moving there."""
        self._host_bytes = 0
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
        self.mirror.bump(adapter.task_id)
        self._effects.append(Grant(lease.id, adapter.digest, adapter.task_id, lease.found_in, now - lease.acquired_at))

    def _grant_waiting(self, adapter: Adapter, now: float) -> None:
        for lease_id in list(adapter.waiting):
            del adapter.waiting[lease_id]
            self._grant(adapter, self.leases[lease_id], now)
        self._unwant(adapter)

    def _refuse_all(self, adapter: Adapter, reason: Reason, why: str) -> None:
        for lease_id in adapter.waiting:
            del self.leases[lease_id]
            self._effects.append(Refuse(lease_id, adapter.digest, reason, why))
        adapter.waiting.clear()
        self._unwant(adapter)

    def _finished(self, adapter: Adapter, now: float) -> None:
        adapter.done_at = now
        if not adapter.touching:
            self.mirror.mark_done(adapter.task_id)

    def _touch(self, adapter: Adapter) -> None:
        if not adapter.touching:
            adapter.touching = True
            self.mirror.bump(adapter.task_id)
            self._effects.append(Touch(adapter.digest))

    def _want(self, adapter: Adapter, now: float) -> None:
        self._wanted.setdefault(adapter.digest, now)

    def _unwant(self, adapter: Adapter) -> None:
        if not adapter.waiting and not (adapter.pinned and adapter.tier is not Tier.SLOT):
            self._wanted.pop(adapter.digest, None)

    # --- tiers

    def _enter_host(self, adapter: Adapter) -> None:
        adapter.moving = Tier.HOST
        self._in_host[adapter.digest] = adapter
        self._host_bytes += adapter.num_bytes
        self._effects.append(Promote(adapter.digest, Tier.HOST))

    def _enter_slot(self, adapter: Adapter, now: float) -> None:
        adapter.moving = Tier.SLOT
        self._in_slot[adapter.digest] = adapter
        for task in self.mirror.put(adapter.task_id, adapter.pages):
            dropped = self._by_task[task]
            dropped.tell(now, f"dropped by the engine for {adapter.name}")
            self._forget_if_removed(dropped, now)
        self._effects.append(Promote(adapter.digest, Tier.SLOT))

    def _move_failed(self, adapter: Adapter) -> None:
        if adapter.moving is Tier.SLOT:
            del self._in_slot[adapter.digest]
            self.mirror.drop(adapter.task_id)
        else:
            del self._in_host[adapter.digest]
            self._host_bytes -= adapter.num_bytes
        adapter.moving = None

    def _leave_slot(self, adapter: Adapter, reason: Reason, now: float) -> None:
        del self._in_slot[adapter.digest]
        adapter.tier, adapter.draining = Tier.HOST, False
        adapter.tell(now, f"left SLOT: {reason.value}")
        self._effects.append(Evict(adapter.digest, Tier.SLOT, reason))

    def _leave_host(self, adapter: Adapter, reason: Reason, now: float) -> None:
        del self._in_host[adapter.digest]
        self._host_bytes -= adapter.num_bytes
        adapter.tier = Tier.DISK
        adapter.tell(now, f"left HOST: {reason.value}")
        self._effects.append(Evict(adapter.digest, Tier.HOST, reason))

    def _forget_if_removed(self, adapter: Adapter, now: float) -> None:
        if not adapter.removed or adapter.held:
            return
        if adapter.tier is Tier.SLOT:
            self._leave_slot(adapter, Reason.REMOVED, now)
        if adapter.tier is Tier.HOST:
            self._leave_host(adapter, Reason.REMOVED, now)
        if adapter.task_id not in self.mirror:
            # while the engine holds it, its task id must stay known: a victim is named by it
            del self.adapters[adapter.digest], self._by_task[adapter.task_id]

    # --- look-ups

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

    def _too_large(self, adapter: Adapter) -> str:
        if adapter.pages > self.config.cache_pages:
            return f"takes {adapter.pages} pages, the engine's LoRA cache has {self.config.cache_pages}"
        if adapter.num_bytes > self.config.host_bytes:
            return f"takes {adapter.num_bytes} bytes, HOST has {self.config.host_bytes}"
        return ""
