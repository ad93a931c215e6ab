"""What operators and the registry tell the machine: which adapters exist, pins, warm-ups, evictions, draining."""

from __future__ import annotations

from adapter_slots.errors import EventRefused
from adapter_slots.events import Added, Reason, Tier
from adapter_slots.records import Adapter
from adapter_slots.working_set import WorkingSet

DRAINING_TEXT = "the slot manager is draining; `lora-slots slots drain --off` ends it"


class Membership(WorkingSet):
    """The slow events; none of them is on the way of a request."""

    def _added(self, event: Added, now: float) -> None:
        known = self.adapters.get(event.adapter)
        if known is not None:
            known.removed, known.name, known.pool = False, event.name, event.pool
            self._refuse_hopeless()
            return
        adapter = Adapter(event.adapter, event.name, event.pool, last_used=now)
        if event.facts is not None:
            adapter.tier = Tier.DISK
            wrong = self._learn(adapter, event.facts)
            if wrong and adapter.task_id == 0:
                raise EventRefused(wrong)  # another adapter's task id; too large is told to each lease
        self.adapters[event.adapter] = adapter

    def _removed(self, adapter: Adapter, now: float) -> None:
        adapter.removed, adapter.pinned = True, False
        adapter.tell(now, "removed from the registry")
        self._refuse_all(adapter, Reason.REMOVED, f"{adapter.name} was removed")
        self._forget_if_removed(adapter, now)

    def _pinned(self, adapter: Adapter, now: float) -> None:
        pins = [a for a in self.adapters.values() if a.pinned and a is not adapter]
        if len(pins) + 1 > self.config.num_slots:
            raise EventRefused(f"all {self.config.num_slots} slots would be pinned")
        pages = sum(a.pages for a in pins) + adapter.pages
        if pages > self.config.cache_pages:
            raise EventRefused(f"pins would take {pages} pages, the engine's cache has {self.config.cache_pages}")
        if not self.config.pools.admits(adapter.pool, (a.pool for a in pins), self.config.num_slots):
            raise EventRefused(f"pool {adapter.pool or 'none'} has no slot left for another pin")
        if self._too_large(adapter):
            raise EventRefused(self._too_large(adapter))
        adapter.pinned = True
        adapter.tell(now, "pinned")
        if adapter.tier is not Tier.SLOT:
            self._want(adapter, now)
        self._refuse_hopeless()

    def _unpinned(self, adapter: Adapter, now: float) -> None:
        adapter.pinned = False
        adapter.tell(now, "unpinned")
        self._unwant(adapter)
        self._forget_if_removed(adapter, now)

    def _warmed(self, adapter: Adapter, now: float) -> None:
        if adapter.removed:
            raise EventRefused(f"{adapter.name} was removed")
        if self._too_large(adapter):
            raise EventRefused(self._too_large(adapter))
        if adapter.tier is not Tier.SLOT:
            adapter.warming = True
            self._want(adapter, now)

    def _evict_asked(self, adapter: Adapter, now: float) -> None:
        if adapter.tier is not Tier.SLOT:
            raise EventRefused(f"{adapter.name} is not in a slot")
        if adapter.held:
            hint = "; unpin it first" if adapter.pinned else ""
            raise EventRefused(f"{adapter.name} is held: {adapter.holders}{hint}")
        self._leave_slot(adapter, Reason.OPERATOR, now)

    def _drained(self, on: bool) -> None:
        self.draining = on
        if on:
            for adapter in list(self.adapters.values()):
                if adapter.waiting or adapter.warming:
                    self._refuse_all(adapter, Reason.DRAINING, DRAINING_TEXT)
