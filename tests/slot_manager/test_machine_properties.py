"""The rules of machine.py under random use, against an engine with the real cache's rules."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from fakes.slot_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_slots.events import Acquired, Evict, Reason, Tier
from adapter_slots.machine import SlotMachine
from adapter_slots.records import Adapter, MachineConfig
from trtllm_lora import CacheError

configs = st.builds(
    MachineConfig,
    num_slots=st.integers(1, 4),
    cache_pages=st.integers(4, 9),
    host_bytes=st.sampled_from([60, 200]),
    idle_s=st.sampled_from([2.0, 300.0]),
    low_watermark=st.sampled_from([None, 1]),
    min_idle_s=st.just(0.5),
    max_wait_s=st.sampled_from([0.5, 3.0]),
    refresh_s=st.sampled_from([1.0, 60.0]),
)
page_lists = st.lists(st.integers(1, 3), min_size=2, max_size=7)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs, page_lists, st.randoms(use_true_random=False))
def test_no_rule_breaks_and_nobody_waits_for_ever(
    config: MachineConfig, pages: list[int], chance: random.Random
) -> None:
    """Whatever happens, the invariants hold, the engine never misses, and in the end nobody is left waiting."""
    world = World(config, pages, chance.randrange)
    for _ in range(80):
        world.step()
    world.settle()
    assert world.misses == 0
    assert not world.machine.leases
    assert not world.leases


def long_walk(steps: int, *, seed: int = 7, lose_reports: bool = False) -> World:
    """A long seeded walk with mixed ranks and pins."""
    chance = random.Random(seed)
    config = MachineConfig(
        num_slots=4, cache_pages=9, host_bytes=150, idle_s=5.0, min_idle_s=0.5, max_wait_s=2.0, refresh_s=3.0
    )
    world = World(config, [1, 2, 1, 3, 1, 2, 1, 1, 2, 3, 1, 1], chance.randrange, lose_reports=lose_reports)
    for _ in range(steps):
        world.step()
    world.settle()
    return world


def test_a_long_walk_has_no_engine_miss() -> None:
    """Twenty thousand steps with twelve adapters over four slots: 0 misses, every reason of eviction seen."""
    world = long_walk(20_000)
    assert world.misses == 0
    assert world.granted > 2_000
    reasons = {effect.reason for effect in world.evictions}
    assert {Reason.IDLE, Reason.BIND, Reason.ROOM} <= reasons


def test_lost_end_reports_are_reaped_and_cost_no_wrong_state() -> None:
    """A tenth of the reports lost: leases are reaped, invariants hold, nobody waits for ever."""
    world = long_walk(5_000, lose_reports=True)
    assert not world.machine.leases


Mutate = Callable[[pytest.MonkeyPatch], None]


def _leases_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapter, "held", property(lambda a: a.pinned or a.moving is not None or a.touching))


def _pins_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapter, "held", property(lambda a: bool(a.leases) or a.moving is not None or a.touching))


def _moving_does_not_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapter, "held", property(lambda a: bool(a.leases) or a.pinned or a.touching))


def _one_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    def more(config: MachineConfig) -> MachineConfig:
        object.__setattr__(config, "num_slots", config.num_slots + 1)
        return config

    original = SlotMachine.__init__
    patch.setattr(SlotMachine, "__init__", lambda self, config: original(self, more(dataclasses.replace(config))))
    patch.setattr("adapter_slots.invariants._bounds", _bounds_of_four)


def _bounds_of_four(machine: SlotMachine) -> list[str]:
    in_slot = [a for a in machine.adapters.values() if a.tier is Tier.SLOT or a.moving is Tier.SLOT]
    return ["five"] if len(in_slot) > 4 else []


def _nobody_is_touched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("adapter_slots.room._suspects", lambda *_: ())


def _idle_is_never_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotMachine, "_evict_idle", lambda *_: None)


def _two_binds_at_once(patch: pytest.MonkeyPatch) -> None:
    original = SlotMachine._advance

    def twice(machine: SlotMachine, now: float) -> None:
        original(machine, now)
        for a in list(machine.adapters.values()):
            if a.waiting and a.tier is Tier.HOST and a.moving is None and now >= a.retry_at:
                machine._promote_to_slot(a, now, now)

    patch.setattr(SlotMachine, "_advance", twice)


def _deadlines_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = SlotMachine._acquired

    def for_ever(machine: SlotMachine, event: Acquired, now: float) -> None:
        original(machine, event, now)
        if event.lease in machine.leases:
            machine.leases[event.lease].wait_until = float("inf")

    patch.setattr(SlotMachine, "_acquired", for_ever)


def _nobody_drains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotMachine, "_drain_one", lambda *_: None)


def _room_ignores_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("adapter_slots.room._pages", lambda _: 0)


def _end_is_not_marked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotMachine, "_finished", lambda _, adapter, now: setattr(adapter, "done_at", now))


MUTATIONS: dict[str, Mutate] = {
    "rule 1: leases do not hold": _leases_do_not_hold,
    "rule 1: pins do not hold": _pins_do_not_hold,
    "rule 1: moving does not hold": _moving_does_not_hold,
    "rule 2: one slot too many": _one_slot_too_many,
    "rule 2: pages are not counted": _room_ignores_pages,
    "rule 3: live adapters are not touched": _nobody_is_touched,
    "rule 3: the end of a request is not marked": _end_is_not_marked,
    "rule 4: idle adapters stay": _idle_is_never_evicted,
    "rule 5: two binds at one time": _two_binds_at_once,
    "rule 5: deadlines are forgotten": _deadlines_are_forgotten,
    "rule 5: nobody drains for a starving adapter": _nobody_drains,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_each_broken_rule_is_noticed(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk that passes with the machine as it is fails when one rule is broken on purpose."""
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, CacheFailure)):
        walk_must_be_clean()


class CacheFailure(Exception):
    """The mirror refused a put: the machine sent what cannot fit."""


def walk_must_be_clean() -> None:
    """What the tests above ask of a walk, in one place."""
    try:
        world = long_walk(3_000)
    except CacheError as error:
        raise CacheFailure(str(error)) from None
    assert world.misses == 0
    assert not world.machine.leases
    assert any(isinstance(e, Evict) and e.reason is Reason.IDLE for e in world.evictions)
    starvation = _starve()
    assert starvation.granted_cold, "a cold adapter starved behind hot ones"


class _Starved:
    granted_cold = False


def _starve() -> _Starved:
    """Two hot adapters whose leases overlap without a gap, one slot each, and a cold third one."""
    config = MachineConfig(num_slots=2, cache_pages=4, host_bytes=100, max_wait_s=1.0)
    world = World(config, [1, 1, 1], random.Random(3).randrange)
    result = _Starved()
    for i in range(400):
        world.acquire(1 + i % 2)
        if i == 40:
            world.acquire(3, wait_s=30.0)
        world.pass_time(0.1)
        result.granted_cold |= bool(world.machine.adapters["digest-3"].leases)
    return result
