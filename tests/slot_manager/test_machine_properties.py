"""The rules of machine.py under random use, against an engine with the real cache's rules."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection

import pytest
from fakes.slot_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_slots import room
from adapter_slots.errors import EventRefused
from adapter_slots.events import (
    Acquired,
    Added,
    Effect,
    Evict,
    EvictAsked,
    Facts,
    Pinned,
    Promote,
    Promoted,
    PromoteFailed,
    Reason,
    Refuse,
    Released,
    Ticked,
    Tier,
    Touch,
    Touched,
    Unpinned,
    Warmed,
)
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs, page_lists, st.randoms(use_true_random=False))
def test_a_clock_that_goes_back_breaks_no_deadline(
    config: MachineConfig, pages: list[int], chance: random.Random
) -> None:
    """By seconds or hours, at any moment: nobody waits longer, nobody starves, the engine never misses."""
    world = World(config, pages, chance.randrange)
    for _ in range(60):
        if chance.randrange(8) == 0:
            world.set_clock_back(chance.choice([0.1, 3.0, 7200.0]))
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
    assert world.refused["no_slot"] > 500
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


def test_who_can_have_no_slot_is_refused_at_once() -> None:
    """All slots pinned: refused before any wait; so is who waited before the last pin; unpinned, it is granted."""
    machine = SlotMachine(MachineConfig(1, cache_pages=4, host_bytes=100))
    for i, name in enumerate(("one", "two"), 1):
        machine.handle(Added(name, name, Facts(i, 1, 10)), 0.0)
    machine.handle(Pinned("one"), 0.0)
    assert refusals(machine.handle(Acquired("two", "early", 30.0, 10.0), 1.0)) == [], "the pin has no slot yet"
    machine.handle(Promoted("one", Tier.HOST), 1.0)
    machine.handle(Promoted("two", Tier.HOST), 1.0)
    early = refusals(machine.handle(Promoted("one", Tier.SLOT), 2.0))
    assert [(r.lease, r.reason) for r in early] == [("early", Reason.NO_SLOT)]
    (told,) = refusals(machine.handle(Acquired("two", "late", 30.0, 10.0), 3.0))
    assert (told.reason, told.why) == (Reason.NO_SLOT, "all 1 slots are pinned")
    machine.handle(Unpinned("one"), 4.0)
    assert refusals(machine.handle(Acquired("two", "again", 30.0, 10.0), 5.0)) == []


def refusals(effects: list[Effect]) -> list[Refuse]:
    """The refusals among effects."""
    return [effect for effect in effects if isinstance(effect, Refuse)]


def test_slots_and_bytes_that_rules_keep_are_refused_at_once() -> None:
    """Every slot reserved for a pool, or HOST full of pinned adapters: the reason says which."""
    reserved = SlotMachine(MachineConfig(1, cache_pages=4, host_bytes=100, pools=Pools({"gold": Pool(reserved=1)})))
    reserved.handle(Added("d", "one", Facts(1, 1, 10)), 0.0)
    (told,) = refusals(reserved.handle(Acquired("d", "l", 30.0, 10.0), 0.0))
    assert told.why == "pool none has no slot beside those that are pinned, or reserved for other pools"
    full = SlotMachine(MachineConfig(2, cache_pages=4, host_bytes=100))
    for i, name in enumerate(("one", "two"), 1):
        full.handle(Added(name, name, Facts(i, 1, 60)), 0.0)
    full.handle(Pinned("one"), 0.0)
    full.handle(Promoted("one", Tier.HOST), 0.0)
    (told,) = refusals(full.handle(Acquired("two", "l", 30.0, 10.0), 0.0))
    assert told.why == "takes 60 bytes, and pinned adapters hold 60 of the 100 of HOST"


def test_a_lease_that_waited_in_vain_is_told_the_cause() -> None:
    """The last failure if there was one; else what it waited for, without the names of others."""
    machine = SlotMachine(MachineConfig(1, cache_pages=4, host_bytes=100, max_wait_s=100.0))
    for i, name in enumerate(("one", "two"), 1):
        machine.handle(Added(name, name, Facts(i, 1, 10)), 0.0)
    machine.handle(Acquired("two", "a", 3.0, 10.0), 0.0)
    machine.handle(PromoteFailed("two", Tier.HOST, "shared memory has no room for 10 bytes", transient=True), 1.0)
    (told,) = refusals(machine.handle(Ticked(), 3.0))
    assert told.why == "no slot within 3.0 s: shared memory has no room for 10 bytes"
    machine.handle(Acquired("one", "b", 9.0, 99.0), 4.0)
    machine.handle(Promoted("one", Tier.HOST), 4.0)
    machine.handle(Promoted("one", Tier.SLOT), 4.0)
    machine.handle(Acquired("two", "c", 9.0, 10.0), 5.0)
    machine.handle(Promoted("two", Tier.HOST), 5.0)
    told = next(r for r in refusals(machine.handle(Ticked(), 9.0)) if r.lease == "c")
    assert told.why == "no slot within 4.0 s: 1 slots: 1 leased"


def test_an_end_whose_report_may_be_late_is_asked_for() -> None:
    """Two leases end in the engine, the reports swap places: whose end is not reported yet is touched before a bind."""
    machine = SlotMachine(MachineConfig(2, cache_pages=2, host_bytes=100, min_residency_s=0.0))
    for i, name in enumerate(("first", "second", "third"), 1):
        machine.handle(Added(name, name, Facts(i, 1, 10)), 0.0)
        machine.handle(Acquired(name, f"lease-{name}", 60.0, 60.0), 0.0)
        machine.handle(Promoted(name, Tier.HOST), 0.0)
    for name in ("first", "second"):
        machine.handle(Promoted(name, Tier.SLOT), 1.0)
    effects = machine.handle(Released("lease-second"), 5.0)
    assert effects == [Touch("first")], "the engine may have ended its request before the second's: it would drop it"
    assert Promote("third", Tier.SLOT) in machine.handle(Touched("first"), 5.1)


def test_a_host_that_is_fuller_than_its_bound_gives_up_what_is_idle() -> None:
    """Others fill the same shared memory: idle copies make room for as many bytes, and the move is tried again."""
    machine = SlotMachine(MachineConfig(2, cache_pages=4, host_bytes=100, backoff_s=1.0))
    for i, name in enumerate(("idle", "slot", "new"), 1):
        machine.handle(Added(name, name, Facts(i, 1, 20)), 0.0)
        machine.handle(Warmed(name), 0.0)
    for name in ("idle", "slot"):
        machine.handle(Promoted(name, Tier.HOST), 0.0)
        machine.handle(Promoted(name, Tier.SLOT), 0.0)
    machine.handle(EvictAsked("idle"), 1.0)
    effects = machine.handle(PromoteFailed("new", Tier.HOST, "full", transient=True, short_bytes=20), 2.0)
    assert effects == [Evict("idle", Tier.HOST, Reason.ROOM)]
    assert machine.adapters["slot"].tier is Tier.SLOT
    assert Promote("new", Tier.HOST) in machine.handle(Ticked(), 3.0)


@pytest.mark.parametrize(("short_bytes", "leaves"), [(21, []), (20, [Tier.SLOT, Tier.HOST])])
def test_nothing_leaves_a_full_host_that_would_stay_too_full(short_bytes: int, leaves: list[Tier]) -> None:
    """Others hold the shared memory: what is idle goes only where that makes room enough, from its slot too."""
    machine = SlotMachine(MachineConfig(2, cache_pages=4, host_bytes=100, min_residency_s=0.0))
    for i, name in enumerate(("slot", "new"), 1):
        machine.handle(Added(name, name, Facts(i, 1, 20)), 0.0)
        machine.handle(Warmed(name), 0.0)
    machine.handle(Promoted("slot", Tier.HOST), 0.0)
    machine.handle(Promoted("slot", Tier.SLOT), 0.0)
    failed = PromoteFailed("new", Tier.HOST, "full", transient=True, short_bytes=short_bytes)
    assert machine.handle(failed, 9.0) == [Evict("slot", tier, Reason.ROOM) for tier in leaves]


def test_a_host_that_holds_less_than_the_slots_starves_nobody() -> None:
    """HOST is full of adapters in slots, and slots are free: an idle one gives up both, a leased one drains."""
    config = MachineConfig(4, cache_pages=9, host_bytes=25, max_wait_s=1.0, min_residency_s=0.0, idle_s=300.0)
    world = World(config, [1, 1, 1, 1], random.Random(3).randrange)
    world.faults = False
    for i in (1, 2):
        world.acquire(i, hold_s=1000.0)
        world.pass_time(2.0)
    world.pass_time(20.0)
    assert not world.leases, "both are idle, in slots, and all of HOST"
    world.acquire(3)
    world.pass_time(1.0)
    assert world.machine.adapters["digest-3"].tier is Tier.SLOT
    granted_cold = False
    for i in range(300):
        world.acquire(1 + i % 2 * 2)  # two hot ones whose leases overlap without a gap
        if i == 40:
            world.acquire(4, wait_s=30.0)
        world.pass_time(0.1)
        granted_cold |= bool(world.machine.adapters["digest-4"].leases)
    assert granted_cold


def test_two_digests_with_one_task_id_are_refused_loudly() -> None:
    """The engine would answer one with the other's weights."""
    machine = SlotMachine(MachineConfig(2, cache_pages=2, host_bytes=100))
    machine.handle(Added("a", "one", Facts(7, 1, 10)), 0.0)
    with pytest.raises(EventRefused, match="it and the adapter of digest a are one adapter to the engine, task id 7"):
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


def _time_is_what_the_clock_shows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotMachine, "_clock_shows", lambda _, now: now)


def _who_waits_in_vain_goes_on_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotMachine, "_refuse_hopeless", lambda _: None)


def _leases_count_as_pins(patch: pytest.MonkeyPatch) -> None:
    original = SlotMachine.no_room_ever

    def eager(machine: SlotMachine, adapter: Adapter) -> str:
        full = len(machine._in_slot) == machine.config.num_slots and all(a.held for a in machine._in_slot.values())
        return "all slots are held" if full and adapter.digest not in machine._in_slot else original(machine, adapter)

    patch.setattr(SlotMachine, "no_room_ever", eager)


def _late_reports_swap_no_places(patch: pytest.MonkeyPatch) -> None:
    original = room._suspects

    def trusting(victims: tuple[int, ...], live: Collection[Adapter], view: room.SlotView) -> tuple[Adapter, ...]:
        found = original(victims, live, view)
        return tuple(a for a in found if not a.leases or view.now - a.leased_since < view.config.report_margin_s)

    patch.setattr("adapter_slots.room._suspects", trusting)


def _copies_of_slots_are_never_given_up(patch: pytest.MonkeyPatch) -> None:
    original = room.room_in_host

    def stingy(adapter: Adapter, short: int, in_host: Collection[Adapter], view: room.SlotView) -> room.Room:
        return original(adapter, short, in_host, dataclasses.replace(view, in_slot=()))

    patch.setattr("adapter_slots.machine.room_in_host", stingy)


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
    "rule 3: end reports that swap places": _late_reports_swap_no_places,
    "rule 5: time is what the clock shows": _time_is_what_the_clock_shows,
    "rule 5: who waits in vain goes on waiting": _who_waits_in_vain_goes_on_waiting,
    "rule 5: leases count as pins": _leases_count_as_pins,
    "rule 5: copies of slots are never given up": _copies_of_slots_are_never_given_up,
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
    _set_back()
    test_a_host_that_holds_less_than_the_slots_starves_nobody()
    test_an_end_whose_report_may_be_late_is_asked_for()
    starvation = _starve()
    assert starvation.granted_cold, "a cold adapter starved behind hot ones"


def _set_back() -> None:
    """The clock is set back by an hour while somebody waits for a slot that is leased; he waits no longer for it."""
    world = World(MachineConfig(1, cache_pages=2, host_bytes=100), [1, 1], random.Random(3).randrange)
    world.faults = False
    world.acquire(1)
    world.pass_time(2.0)
    world.acquire(2, wait_s=4.0)
    world.pass_time(1.0)
    world.set_clock_back(3600.0)
    world.pass_time(8.0)


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
