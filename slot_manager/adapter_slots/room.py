"""Where room for a promotion comes from. Pure decisions: nothing is changed here, the machine applies the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from adapter_slots.events import Tier
from adapter_slots.policy import Policy
from adapter_slots.records import Adapter, MachineConfig
from trtllm_lora.engine_cache import EngineCache


@dataclass(frozen=True, slots=True)
class Room:
    """What must happen before an adapter can move up. `ready` is false while it has to wait."""

    ready: bool
    evict: tuple[Adapter, ...] = ()
    touch: tuple[Adapter, ...] = ()
    """Live adapters the engine might drop in place of the evicted ones: touch them, then ask again."""


def room_in_host(
    adapter: Adapter, in_host: Collection[Adapter], used_bytes: int, config: MachineConfig, policy: Policy
) -> Room:
    """Room for `adapter.num_bytes` in HOST. Adapters in a slot keep their HOST copy."""
    evict: list[Adapter] = []
    free = config.host_bytes - used_bytes
    while free < adapter.num_bytes:
        victim = policy.victim(a for a in in_host if a.tier is Tier.HOST and not a.held and a not in evict)
        if victim is None:
            return Room(ready=False)
        evict.append(victim)
        free += victim.num_bytes
    return Room(ready=True, evict=tuple(evict))


def room_in_slots(
    adapter: Adapter,
    in_slot: Collection[Adapter],
    mirror: EngineCache,
    by_task: Mapping[int, Adapter],
    config: MachineConfig,
    policy: Policy,
    now: float,
) -> Room:
    """A slot and `adapter.pages` in the engine's cache, so that the engine drops none but evicted adapters."""
    evict: list[Adapter] = []
    live = {id(a): a for a in in_slot}
    while len(live) >= config.num_slots or _pages(live.values()) + adapter.pages > config.cache_pages:
        victim = policy.victim(a for a in live.values() if not a.held)
        if victim is None:
            return Room(ready=False)
        evict.append(victim)
        del live[id(victim)]
    victims = mirror.victims(0 if adapter.task_id in mirror else adapter.pages)
    if victims is None:
        return Room(ready=False)
    touch = _suspects(victims, live.values(), by_task, config, now)
    if touch:
        # nothing leaves its slot before the room is certain
        return Room(ready=False, touch=touch)
    return Room(ready=True, evict=tuple(evict))


def _pages(adapters: Collection[Adapter]) -> int:
    return sum(a.pages for a in adapters)


def _suspects(
    victims: tuple[int, ...],
    live: Collection[Adapter],
    by_task: Mapping[int, Adapter],
    config: MachineConfig,
    now: float,
) -> tuple[Adapter, ...]:
    """Live adapters whom the engine might drop instead.

    What we know of the engine is old by `report_margin_s`: end reports arrive late and may swap places, so an
    adapter that finished that little after the last victim counts as older than it; and a request granted that
    recently may not have reached the engine yet, which still calls its adapter done. A touch settles both.
    """
    if not victims:
        return ()
    live_tasks = {a.task_id for a in live}
    retired = [by_task[task].done_at for task in victims if task in by_task and task not in live_tasks]
    horizon = max(retired, default=0.0) + config.report_margin_s
    return tuple(
        a
        for a in live
        if a.moving is None
        and (not a.leases or now - a.leased_since < config.report_margin_s)
        and (a.touching or a.task_id in victims or (a.done_at <= horizon and a.touched_at < a.done_at))
    )
