"""What must be true of a slot machine between two events; tests ask after every one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from adapter_slots.events import Tier
from adapter_slots.machine import SlotMachine
from adapter_slots.pools import NO_RIGHTS
from trtllm_lora.engine_cache import TaskState


def broken_rules(machine: SlotMachine) -> list[str]:
    """One line per broken rule; empty when all is well."""
    return [*_bounds(machine), *_tiers(machine), *_leases(machine), *_mirror(machine)]


def _bounds(machine: SlotMachine) -> Iterator[str]:
    in_slot = [a for a in machine.adapters.values() if a.tier is Tier.SLOT or a.moving is Tier.SLOT]
    in_host = [a for a in machine.adapters.values() if a.tier >= Tier.HOST or a.moving is Tier.HOST]
    if len(in_slot) > machine.config.num_slots:
        yield f"rule 2: {len(in_slot)} adapters in {machine.config.num_slots} slots"
    if sum(a.pages for a in in_slot) > machine.config.cache_pages:
        yield "rule 2: more pages in slots than the engine's cache has"
    if sum(a.num_bytes for a in in_host) > machine.config.host_bytes:
        yield "more bytes in HOST than allowed"
    binds = sum(a.moving is Tier.SLOT for a in in_slot)
    if binds > 1:
        yield "two binds at one time"
    if machine.binding != bool(binds):
        yield f"it takes itself for {'' if machine.binding else 'not '}binding, with {binds} binds"
    for name, pool in machine.config.pools.by_name.items():
        used = sum(a.pool == name for a in in_slot)
        if pool.cap is not None and used > pool.cap:
            yield f"rule 8: pool {name} has {used} slots, its cap is {pool.cap}"
    others = sum(
        max(0, count - machine.config.pools.by_name.get(name or "", NO_RIGHTS).reserved)
        for name, count in Counter(a.pool for a in in_slot).items()
    )
    reserved = sum(pool.reserved for pool in machine.config.pools.by_name.values())
    if others > machine.config.num_slots - reserved:
        yield f"rule 8: {others} adapters in {machine.config.num_slots - reserved} shared slots"


def _tiers(machine: SlotMachine) -> Iterator[str]:
    for a in machine.adapters.values():
        if a.moving is not None and a.moving != a.tier + 1:
            yield f"{a.name}: moves from {a.tier.name} to {a.moving.name}"
        if a.leases and a.tier is not Tier.SLOT:
            yield f"{a.name}: leased in {a.tier.name}"
        if a.tier > Tier.DISK and a.task_id == 0:
            yield f"{a.name}: in {a.tier.name} without a task id"
        if a.tier is Tier.SLOT and a.waiting and not a.draining:
            yield f"{a.name}: in a slot, and leases wait for it"
        if a.waiting and a.tier is not Tier.SLOT and (why := machine.no_room_ever(a)):
            yield f"{a.name}: leases wait in vain: {why}"


def _leases(machine: SlotMachine) -> Iterator[str]:
    for lease in machine.leases.values():
        a = machine.adapters.get(lease.adapter)
        if a is None:
            yield f"lease {lease.id} of an adapter that is not known"
        elif lease.granted != (lease.id in a.leases) or lease.granted == (lease.id in a.waiting):
            yield f"lease {lease.id}: granted is {lease.granted}, the adapter says otherwise"
    held = sum(len(a.leases) + len(a.waiting) for a in machine.adapters.values())
    if held != len(machine.leases):
        yield f"{held} leases at adapters, {len(machine.leases)} in all"


def _mirror(machine: SlotMachine) -> Iterator[str]:
    for a in machine.adapters.values():
        state = machine.mirror.state(a.task_id)
        if a.tier is Tier.SLOT and state is TaskState.ABSENT:
            yield f"rule 3: {a.name} is in a slot, the mirror has dropped it"
        if a.tier is Tier.SLOT and a.leases and state is not TaskState.IN_PROGRESS:
            yield f"rule 3: {a.name} is leased, the mirror says {state.name}"
        if a.tier is Tier.SLOT and not a.leases and not a.touching and state is TaskState.IN_PROGRESS:
            yield f"rule 3: {a.name} is idle, the mirror says IN_PROGRESS"
