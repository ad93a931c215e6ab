"""What is where, as plain data: the answers to `slots status` and `slots explain`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from adapter_slots.events import Tier
from adapter_slots.machine import SlotMachine
from adapter_slots.records import Adapter
from adapter_slots.registry import Entry, Registry


def status_of(machine: SlotMachine, registry: Registry, now: float) -> dict[str, Any]:
    """The working set at `now` (seconds of the manager's clock); call under the manager's lock."""
    now = machine.time(now)
    adapters = sorted((a for a in machine.adapters.values() if not a.removed), key=lambda a: (a.name, a.digest))
    return {
        "num_slots": machine.config.num_slots,
        "slots_used": sum(a.tier is Tier.SLOT or a.moving is Tier.SLOT for a in adapters),
        "cache_pages": machine.config.cache_pages,
        "cache_pages_free": machine.mirror.free_pages,
        "cache_pages_retired": sum(_retired_pages(machine)),
        "draining": machine.draining,
        "pools": pools_of(machine),
        "known": sorted(registry.entries),
        "registry_problem": registry.problem,
        "adapters": [_adapter(a, now) for a in adapters],
    }


def _retired_pages(machine: SlotMachine) -> Iterator[int]:
    """Pages of what left its slot: the engine keeps them until it needs the room, and gives them up first."""
    live = {a.task_id for a in machine.adapters.values() if a.tier is Tier.SLOT}
    return (machine.mirror.pages_of(task) for task in machine.mirror.resident() if task not in live)


def pools_of(machine: SlotMachine) -> dict[str, dict[str, int | None]]:
    """Pool -> reserved, cap, and slots it has now."""
    used = [a.pool for a in machine.adapters.values() if a.tier is Tier.SLOT or a.moving is Tier.SLOT]
    return {
        name: {"reserved": pool.reserved, "cap": pool.cap, "used": used.count(name)}
        for name, pool in machine.config.pools.by_name.items()
    }


def explain(machine: SlotMachine, entry: Entry, verdict: str, now: float) -> dict[str, Any]:
    """Everything known of one adapter; call under the manager's lock."""
    now = machine.time(now)
    adapter = machine.adapters.get(entry.digest)
    return {
        "name": entry.name,
        "version": entry.version,
        "base_model": entry.base_model,
        "digest": entry.digest,
        "source": entry.path,
        "verdict": verdict,
        "next_victims": _next_victims(machine),
        **(_adapter(adapter, now) if adapter else {"tier": None, "story": []}),
    }


def _next_victims(machine: SlotMachine) -> list[str]:
    """Whom the engine drops next; pinned and leased adapters are touched before their turn comes."""
    kept = {a.task_id for a in machine.adapters.values() if a.pinned or a.leases}
    order = (task for task in machine.mirror.eviction_order() if task not in kept)
    return [machine.adapter_of_task(task) for task in islice(order, 3)]


def _adapter(a: Adapter, now: float) -> dict[str, Any]:
    return {
        "name": a.name,
        "digest": a.digest,
        "task_id": a.task_id,
        "pool": a.pool,
        "tier": a.tier.name,
        "moving_to": a.moving.name if a.moving is not None else None,
        "pinned": a.pinned,
        "draining": a.draining,
        "leases": len(a.leases),
        "waiting": len(a.waiting),
        "pages": a.pages,
        "bytes": a.num_bytes,
        "uses": a.uses,
        "idle_s": round(now - a.last_used, 3),
        "failure": a.failure if a.failures else None,
        "last_load_s": {tier.name: round(seconds, 4) for tier, seconds in a.move_s.items()},
        "story": [{"ago_s": round(now - at, 3), "what": text} for at, text in a.story],
    }
