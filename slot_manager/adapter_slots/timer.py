"""What the slot machine does by time alone, and what time is to it.

Time goes on from where it was when the caller's clock goes back: nobody waits longer for it, but for the time since
the event before, at most a tick, which nobody can know.
"""

from __future__ import annotations

import heapq

from adapter_slots.events import Reap, Reason, Refuse
from adapter_slots.membership import Membership
from adapter_slots.policy import Policy
from adapter_slots.records import MachineConfig
from adapter_slots.room import NEVER, why_waiting

ROUNDING_S = 1e-6
"""A deadline counts as come so much earlier: adding and taking away what the clock went back rounds."""


class Timer(Membership):
    """Deadlines and the tick."""

    def __init__(self, config: MachineConfig, policy: Policy | None = None) -> None:
        super().__init__(config, policy)
        self._tick_due: float | None = None
        self._clock_showed = NEVER
        """The last time the caller's clock showed."""
        self._behind = 0.0
        """Seconds that the caller's clock went back, all together."""

    def time(self, now: float) -> float:
        """The machine's own time when the caller's clock shows `now`; stories and deadlines are in it."""
        return now + self._behind

    def next_deadline(self) -> float | None:
        """When a Ticked is due, by the caller's clock; None if nothing can happen by time alone."""
        while self._deadlines and self._deadlines[0][1] not in self.leases:
            heapq.heappop(self._deadlines)
        due = [self._deadlines[0][0]] if self._deadlines else []
        if self._tick_due is not None:
            due.append(self._tick_due)
        return min(due) - self._behind if due else None

    def _clock_shows(self, now: float) -> float:
        """The machine's time, at an event that came when the caller's clock showed `now`."""
        self._behind += max(0.0, self._clock_showed - now)
        self._clock_showed = now
        return self.time(now)

    def _ticked(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now + ROUNDING_S:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.leases.get(lease_id)
            if lease is None or now + ROUNDING_S < (lease.until if lease.granted else lease.wait_until):
                continue
            if lease.granted:
                self._effects.append(Reap(lease.id, lease.adapter))
            else:
                adapter = self.adapters[lease.adapter]
                cause = why_waiting(adapter, self._in_slot.values(), self.config, now)
                why = f"no slot within {now - lease.acquired_at:.1f} s: {cause}"
                eta_s = self._eta_s(adapter)
                self._effects.append(Refuse(lease.id, lease.adapter, Reason.DEADLINE, why, eta_s))
            self._released(lease, now)
        if self._tick_due is not None and now + ROUNDING_S >= self._tick_due:
            self._tick_due = None
            self._evict_idle(now)
            self._refresh(now)

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

    def _refresh(self, now: float) -> None:
        """Touch pinned adapters before they grow old, and the one adapter that was seen in the engine longest ago."""
        still = [a for a in self._in_slot.values() if a.moving is None and not a.touching]
        for adapter in still:
            if adapter.pinned and not adapter.leases and now >= adapter.seen_at + self.config.refresh_s:
                self._touch(adapter, now)
        oldest = min(still, key=lambda a: a.seen_at, default=None)
        if oldest is not None and now >= oldest.seen_at + self.config.verify_s:
            self._touch(oldest, now)

    def _arm(self, now: float) -> None:
        if not self._in_slot and not self._wanted:
            self._tick_due = None
        elif self._tick_due is None:
            self._tick_due = now + self.config.tick_s
