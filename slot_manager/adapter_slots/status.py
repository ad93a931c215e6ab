"""What is where, as plain data: the answer to `slots status`."""

from __future__ import annotations

from typing import Any

from adapter_slots.events import Tier
from adapter_slots.machine import SlotMachine
from adapter_slots.records import Adapter
from adapter_slots.registry import Registry


def status_of(machine: SlotMachine, registry: Registry, now: float) -> dict[str, Any]:
    """The working set at `now` (seconds of the machine's clock); call under the manager's lock."""
    adapters = sorted(machine.adapters.values(), key=lambda a: (a.name, a.digest))
    return {
        "num_slots": machine.config.num_slots,
        "slots_used": sum(a.tier is Tier.SLOT or a.moving is Tier.SLOT for a in adapters),
        "cache_pages": machine.config.cache_pages,
        "cache_pages_free": machine.mirror.free_pages,
        "known": sorted(registry.entries),
        "registry_problem": registry.problem,
        "adapters": [_adapter(a, now) for a in adapters],
    }


def _adapter(a: Adapter, now: float) -> dict[str, Any]:
    return {
        "name": a.name,
        "digest": a.digest,
        "task_id": a.task_id,
        "tier": a.tier.name,
        "moving_to": a.moving.name if a.moving is not None else None,
        "pinned": a.pinned,
        "leases": len(a.leases),
        "waiting": len(a.waiting),
        "pages": a.pages,
        "bytes": a.num_bytes,
        "idle_s": round(now - a.last_used, 3),
        "failure": a.failure if a.failures else None,
        "story": [{"ago_s": round(now - at, 3), "what": text} for at, text in a.story],
    }
