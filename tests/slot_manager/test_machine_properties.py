"""The rules of machine.py under random use, against an engine with the real cache's rules."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from fakes.slot_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_slots.errors import EventRefused
from adapter_slots.events import Acquired, Added, Evict, Facts, Promote, Promoted, Reason, Refuse, Tier
from adapter_slots.machine import SlotMachine
from adapter_slots.policy import GreedyDualSizeFrequency, LeastRecentlyUsed
from adapter_slots.pools import Pool, Pools
from adapter_slots.records import Adapter, MachineConfig
from adapter_slots.transitions import TRANSITIONS, Transition
from trtllm_lora import CacheError

MIXED = [1, 2, 1, 3, 1, 2, 1, 1, 2, 3, 1, 1]
POOLS = Pools({"gold": Pool(reserved=1), "capped": Pool(cap=1)})

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
        num_slots=4, cache_pages=7, host_bytes=150, idle_s=5.0, min_idle_s=0.5, max_wait_s=2.0, refresh_s=3.0
    )
    world = World(config, MIXED, chance.randrange, lose_reports=lose_reports)
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


def test_the_machine_never_leaves_its_transition_table() -> None:
    """Every step of random walks is a row of the table, and every row is taken."""
    taken: set[Transition] = set()
    for seed in range(3):
        chance = random.Random(seed)
        config = MachineConfig(4, cache_pages=7, host_bytes=150, idle_s=5.0, max_wait_s=1.0, pools=POOLS)
        world = World(config, MIXED, chance.randrange, pools=(None, "gold", "capped"))
        for _ in range(3_000):
            world.step()
        taken |= set(world.steps)
    assert taken == set(TRANSITIONS)


def test_a_restarted_engine_is_healed_within_a_tick() -> None:
    """After a restart no adapter stays in a slot that the engine does not hold, and pinned ones come back."""
    chance = random.Random(5)
    config = MachineConfig(4, cache_pages=7, host_bytes=500, verify_s=1.0, min_residency_s=0.0, max_wait_s=0.5)
    world = World(config, MIXED, chance.randrange)
    world.faults = False
    for _ in range(60):
        for _ in range(40):
            world.step()
        world.restart_engine()
        world.pass_time(config.tick_s + 3 * config.report_margin_s)
        assert not world.strangers()
        world.pass_time(30.0)  # requests wait and run up to ten seconds each
        pinned = [a for a in world.machine.adapters.values() if a.pinned]
        assert all(a.tier is Tier.SLOT for a in pinned), [(a.name, a.holders) for a in world.machine.adapters.values()]


def test_reserved_slots_stay_free_for_their_pool_and_caps_hold() -> None:
    """Rule 8 under random use; the invariants count, this asks that reserved slots are had at once."""
    chance = random.Random(11)
    config = MachineConfig(4, cache_pages=9, host_bytes=500, pools=POOLS, min_residency_s=0.0)
    world = World(config, MIXED, chance.randrange, pools=(None, "gold", "capped"))
    for _ in range(4_000):
        world.step()
    assert world.misses == 0
    crowd = World(config, [1] * 6, random.Random(1).randrange, pools=(None, None, None, None, None, "gold"))
    crowd.faults = False
    for i in range(1, 6):
        crowd.acquire(i)
    crowd.pass_time(1.0)
    assert len(crowd.leases) == 3, "three shared slots"
    crowd.acquire(6)
    crowd.pass_time(1.0)
    assert crowd.machine.adapters["digest-6"].leases, "the reserved slot was kept for gold"


def test_with_more_hot_adapters_than_slots_the_swap_rate_is_bounded() -> None:
    """min_residency_s: four slots bind at most four adapters per residency, however many are wanted."""
    config = MachineConfig(4, cache_pages=20, host_bytes=500, min_residency_s=2.0)
    world = World(config, [1] * 12, random.Random(2).randrange)
    world.faults = False
    for i in range(600):
        world.acquire(1 + i % 12, wait_s=20.0)
        world.pass_time(0.1)
    binds = sum(count for row, count in world.steps.items() if row.to == "HOST→SLOT")
    assert binds <= 4 * (60 / 2.0 + 1)
    assert world.granted > 250


def test_gdsf_keeps_what_is_used_often() -> None:
    """Nine uses to one: with GDSF the frequent adapter is not the victim although it was used first."""
    policy = GreedyDualSizeFrequency()
    often, seldom = (Adapter(name, name, num_bytes=100) for name in ("often", "seldom"))
    for adapter, uses, at in ((often, 9, 1.0), (seldom, 1, 2.0)):
        adapter.uses, adapter.last_used = uses, at
        policy.used(adapter)
    assert policy.victim([often, seldom]) is seldom
    assert LeastRecentlyUsed().victim([often, seldom]) is often


def test_a_cold_adapter_is_refused_at_once_if_the_lease_does_not_wait() -> None:
    """Fail fast: COLD with the time it is expected to take, and the adapter is warmed meanwhile."""
    machine = SlotMachine(MachineConfig(1, cache_pages=2, host_bytes=100))
    machine.handle(Added("d", "one", Facts(1, 1, 10)), 0.0)
    effects = machine.handle(Acquired("d", "l", 10.0, 10.0, waits=False), 1.0)
    refusals = [effect for effect in effects if isinstance(effect, Refuse)]
    assert [effect.reason for effect in refusals] == [Reason.COLD]
    assert refusals[0].retry_after_s == pytest.approx(1.0)
    assert Promote("d", Tier.HOST) in effects


def test_two_digests_with_one_task_id_are_refused_loudly() -> None:
    """The engine would answer one with the other's weights."""
    machine = SlotMachine(MachineConfig(2, cache_pages=2, host_bytes=100))
    machine.handle(Added("a", "one", Facts(7, 1, 10)), 0.0)
    with pytest.raises(EventRefused, match="task id 7 of two belongs to one"):
        machine.handle(Added("b", "two", Facts(7, 1, 10)), 0.0)
    machine.handle(Added("c", "three"), 0.0)
    machine.handle(Acquired("c", "l", 10.0, 10.0), 0.0)
    effects = machine.handle(Promoted("c", Tier.DISK, Facts(7, 1, 10)), 1.0)
    assert [type(effect) for effect in effects] == [Refuse]
    assert machine.adapters["c"].tier is Tier.REMOTE


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


def _pools_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pools, "admits", lambda *_: True)


def _misses_are_believed_lonely(patch: pytest.MonkeyPatch) -> None:
    original = SlotMachine._missed

    def lonely(machine: SlotMachine, adapter: Adapter, now: float) -> None:
        touch = machine._touch
        machine._touch = lambda *_: None  # type: ignore[method-assign]
        original(machine, adapter, now)
        machine._touch = touch  # type: ignore[method-assign]

    patch.setattr(SlotMachine, "_missed", lonely)


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
    "rule 7: one miss is believed to be the only one": _misses_are_believed_lonely,
    "rule 8: pools are ignored": _pools_are_ignored,
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
    test_a_restarted_engine_is_healed_within_a_tick()
    test_reserved_slots_stay_free_for_their_pool_and_caps_hold()
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
