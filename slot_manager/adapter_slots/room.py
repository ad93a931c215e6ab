"""Where room for a promotion comes from. Pure decisions: nothing is changed here, the machine applies the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from adapter_slots.events import Tier
from adapter_slots.policy import Policy
from adapter_slots.records import Adapter, MachineConfig
from trtllm_lora.engine_cache import EngineCache

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Room:
    """What must happen before an adapter can move up. `ready` is false while it has to wait."""

    ready: bool
    evict: tuple[Adapter, ...] = ()
    touch: tuple[Adapter, ...] = ()
    """Live adapters the engine might drop in place of the evicted ones: touch them, then ask again."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a decision about slots may look at."""

    in_slot: Collection[Adapter]
    mirror: EngineCache
    by_task: Mapping[int, Adapter]
    config: MachineConfig
    policy: Policy
    now: float
    unsure_at: float
    """When a bind last failed: whether the engine evicted for it nobody knows."""


def room_in_host(adapter: Adapter, short_bytes: int, in_host: Collection[Adapter], view: SlotView) -> Room:
    """Where the bytes come from that are missing in HOST for `adapter`: all of them, or nobody goes.

    Adapters in a slot keep their HOST copy, unless no other can go.
    """
    evict: list[Adapter] = []
    while short_bytes > 0:
        idle = (a for a in in_host if a.tier is Tier.HOST and not a.held and a not in evict)
        victim = view.policy.victim(idle) or slot_victim(adapter, [a for a in view.in_slot if a not in evict], view)
        if victim is None:
            return Room(ready=False)
        evict.append(victim)
        short_bytes -= victim.num_bytes
    return Room(ready=True, evict=tuple(evict))


def room_in_slots(adapter: Adapter, view: SlotView) -> Room:
    """A slot and `adapter.pages` in the engine's cache, so that the engine drops none but evicted adapters."""
    evict: list[Adapter] = []
    live = list(view.in_slot)
    while not _fits(adapter, live, view.config):
        victim = slot_victim(adapter, live, view)
        if victim is None:
            return Room(ready=False)
        evict.append(victim)
        live.remove(victim)
    victims = view.mirror.victims(0 if adapter.task_id in view.mirror else adapter.pages)
    if victims is None:
        return Room(ready=False)
    touch = _suspects(victims, live, view)
    if touch:
        # nothing leaves its slot before the room is certain
        return Room(ready=False, touch=touch)
    return Room(ready=True, evict=tuple(evict))


def could_fit(adapter: Adapter, live: Collection[Adapter], config: MachineConfig) -> bool:
    """Whether a slot could ever be had while the pins stay: if not, the adapter must not hold up those behind it."""
    return _fits(adapter, [a for a in live if a.pinned and a is not adapter], config)


def no_room_ever(
    adapter: Adapter, in_slot: Collection[Adapter], in_host: Collection[Adapter], config: MachineConfig
) -> str:
    """Why nothing that may end can make room for an adapter while the pins in place stay; "" if something can."""
    pins = [a for a in in_slot if a.pinned and a.tier is Tier.SLOT and a is not adapter]
    if len(pins) >= config.num_slots:
        return f"all {config.num_slots} slots are pinned"
    if _pages(pins) + adapter.pages > config.cache_pages:
        held = f"pinned adapters hold {_pages(pins)} of the {config.cache_pages} pages of the engine's LoRA cache"
        return f"takes {adapter.pages} pages, and {held}"
    if not config.pools.admits(adapter.pool, (a.pool for a in pins), config.num_slots):
        return f"pool {adapter.pool or 'none'} has no slot beside those that are pinned, or reserved for other pools"
    kept = sum(a.num_bytes for a in in_host if a.pinned and a.tier >= Tier.HOST and a is not adapter)
    if adapter.tier < Tier.HOST and kept + adapter.num_bytes > config.host_bytes:
        return f"takes {adapter.num_bytes} bytes, and pinned adapters hold {kept} of the {config.host_bytes} of HOST"
    return ""


def why_waiting(adapter: Adapter, in_slot: Collection[Adapter], config: MachineConfig, now: float) -> str:
    """What an adapter that is wanted in a slot waits for, in words; names of others are not told."""
    if adapter.failures:
        return adapter.failure
    if adapter.moving is not None:
        return f"on its way to {adapter.moving.name} for {now - adapter.move_began:.1f} s"
    if adapter.tier < Tier.HOST:
        return f"in {adapter.tier.name}, others are moved first or hold HOST"
    counts = Counter(
        "pinned" if a.pinned else "leased" if a.leases else "moving" if a.moving is not None else "idle"
        for a in in_slot
    )
    held = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    return f"{config.num_slots} slots: {held or 'none used'}"


def slot_victim(adapter: Adapter, live: Collection[Adapter], view: SlotView) -> Adapter | None:
    """Whom of the live adapters the policy would evict for `adapter`; None if nobody may go."""
    pools, now, residency_s = view.config.pools, view.now, view.config.min_residency_s
    idle = [
        a
        for a in live
        if not (a.leases or a.touching)  # the usual reasons to be held, and cheap
        and not a.held
        and now - a.bound_at >= residency_s
    ]
    if pools.by_name:
        used = [a.pool for a in live]
        idle = [a for a in idle if pools.yields(a.pool, adapter.pool, used)]
    return view.policy.victim(idle)


def _fits(adapter: Adapter, live: Collection[Adapter], config: MachineConfig) -> bool:
    return (
        len(live) < config.num_slots
        and _pages(live) + adapter.pages <= config.cache_pages
        and (not config.pools.by_name or config.pools.admits(adapter.pool, (a.pool for a in live), config.num_slots))
    )


def _pages(adapters: Collection[Adapter]) -> int:
    return sum([a.pages for a in adapters])  # a list is quicker than a generator, and this is asked at every turn


def _suspects(victims: tuple[int, ...], live: Collection[Adapter], view: SlotView) -> tuple[Adapter, ...]:
    """Live adapters whom the engine might drop instead.

    What we know of the engine is old by `report_margin_s`: end reports arrive late and may swap places, so an
    adapter that finished that little after the last victim counts as older than it; and a request granted that
    recently may not have reached the engine yet, which still calls its adapter done. Just so the last request of an
    adapter leased here may have ended in the engine, before a victim whose end was reported that recently. A touch
    that began after the last victim's end was reported settles all three. After a failed bind the mirror may be wrong
    about who is there at all; with every live adapter touched, whoever else is there is older, and goes first.
    """
    margin = view.config.report_margin_s
    newest = NEVER
    if victims:
        live_tasks = {a.task_id for a in live}
        retired = [view.by_task[task].done_at for task in victims if task in view.by_task and task not in live_tasks]
        newest = max(retired, default=NEVER)
    now, unsure_at, recent = view.now, view.unsure_at, view.now - newest < margin
    return tuple(
        [
            a
            for a in live
            if a.moving is None
            and (recent or not a.leases or now - a.leased_since < margin)
            and (
                (a.touching and victims)
                or a.task_id in victims
                or (a.done_at <= newest + margin and a.touched_at < newest)
                or (a.done_at <= unsure_at + margin and a.touched_at < unsure_at)
            )
        ]
    )
