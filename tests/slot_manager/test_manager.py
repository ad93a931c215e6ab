"""The shell: any thread may ask, moves run in its loop, and whatever fails ends in one event with a reason."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.bundles import SHAPE, small_bundle
from fakes.engine import MemoryEngine

from adapter_slots.disk import DiskTier
from adapter_slots.errors import (
    AdapterFailed,
    AdapterRejected,
    BadRequest,
    Draining,
    EngineFull,
    EngineRefused,
    LeaseRunning,
    NoRoom,
    SlotError,
    UnknownAdapter,
)
from adapter_slots.events import Grant, Tier
from adapter_slots.host import PREFIX, SHM
from adapter_slots.machine import SlotMachine
from adapter_slots.manager import Owner, SlotManager
from adapter_slots.mover import Limits, Mover
from adapter_slots.records import MachineConfig
from adapter_slots.registry import FILE_NAME, Registry, publish
from adapter_slots.store import Stores
from trtllm_lora import CacheGeometry

NAMES = ("ant", "bee", "cat", "dog")
SOON = 20.0


class Desk:
    """A manager over four small adapters, and a queue of what its owners were told."""

    def __init__(self, home: Path, **config: float) -> None:
        self.home = home
        self.bundles = {name: small_bundle(home / "bundles", name, seed) for seed, name in enumerate(NAMES)}
        for name, bundle in self.bundles.items():
            publish(home / FILE_NAME, bundle, name)
        self.engine = MemoryEngine()
        times = {"tick_s": 0.02, "backoff_s": 0.01, "min_residency_s": 0.0}
        bounds = {"num_slots": 2, "cache_pages": 8, "host_bytes": 2**20, **times, **config}
        machine = SlotMachine(MachineConfig(**bounds))  # type: ignore[arg-type]
        mover = Mover(DiskTier(CacheGeometry.of(SHAPE)), self.engine, Stores(), Limits())
        self.manager = SlotManager(machine, Registry(home / FILE_NAME), mover, remember_s=0.05)
        self.manager.start()
        self.told: queue.SimpleQueue[tuple[str, Grant | SlotError]] = queue.SimpleQueue()

    def acquire(self, name: str, lease: str, wait_s: float = SOON) -> None:
        """Ask for a lease; the answer comes through `next`."""
        owner = Owner(lambda grant: self.told.put((lease, grant)), lambda error: self.told.put((lease, error)))
        self.manager.acquire(name, lease, owner, wait_s=wait_s, hold_s=SOON)

    def next(self) -> tuple[str, Grant | SlotError]:
        """The next thing an owner was told."""
        return self.told.get(timeout=SOON)

    def grant(self, name: str, lease: str) -> Grant:
        """Ask and expect a grant."""
        self.acquire(name, lease)
        told, answer = self.next()
        assert isinstance(answer, Grant), answer
        assert told == lease
        return answer

    def tiers(self) -> dict[str, str]:
        """Name -> tier of every adapter that was ever asked for."""
        return {a["name"]: a["tier"] for a in self.manager.status()["adapters"]}

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for a state that the manager's own timer brings about."""
        deadline = threading.Event()
        for _ in range(int(SOON / 0.01)):
            if true():
                return
            deadline.wait(0.01)
        raise AssertionError(self.manager.status())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A running desk; closed, with nothing left in shared memory, at the end."""
    made = Desk(tmp_path)
    yield made
    made.manager.close()
    assert made.engine.closed
    assert not made.engine.registered
    assert not list(SHM.glob(f"{PREFIX}{os.getpid()}-*"))


def test_a_resident_adapter_is_granted_before_acquire_returns(desk: Desk) -> None:
    """The first lease moves the adapter up; the second is a hit, told in the caller's own thread."""
    first = desk.grant("ant", "one")
    assert first.found_in is Tier.DISK
    assert first.task_id == desk.bundles["ant"].task_id
    desk.acquire("ant", "two")
    _, second = desk.told.get_nowait()
    assert isinstance(second, Grant)
    assert second.found_in is Tier.SLOT


def test_many_requests_for_one_cold_adapter_cost_one_bind(desk: Desk) -> None:
    """Single-flight: 200 threads ask at once, the engine sees one bind, everybody is granted."""
    start = threading.Barrier(20)

    def ask(thread: int) -> None:
        start.wait()
        for i in range(10):
            desk.acquire("bee", f"{thread}-{i}")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    answers = [desk.next()[1] for _ in range(200)]
    assert all(isinstance(answer, Grant) for answer in answers)
    assert desk.engine.binds == {desk.bundles["bee"].task_id: 1}


def test_the_bound_holds_and_a_waiting_lease_gets_the_slot_that_falls_free(desk: Desk) -> None:
    """With both slots leased a third adapter waits; it is granted when one lease ends, never before."""
    desk.grant("ant", "a")
    desk.grant("bee", "b")
    desk.acquire("cat", "c")
    desk.until(lambda: desk.tiers().get("cat") == "HOST")
    assert desk.told.empty()
    assert desk.manager.release("a")
    lease, answer = desk.next()
    assert (lease, isinstance(answer, Grant)) == ("c", True)
    assert desk.tiers() == {"ant": "HOST", "bee": "SLOT", "cat": "SLOT"}


def test_status_tells_the_pages_that_evicted_adapters_still_hold(desk: Desk) -> None:
    """The engine keeps them until it needs the room; and whom it drops next are never the pinned and the leased."""
    for name in ("ant", "bee"):
        desk.grant(name, name)
        desk.manager.release(name)
    desk.manager.pin("bee")
    assert desk.manager.explain("ant")["next_victims"] == ["ant"]
    free = desk.manager.status()["cache_pages_free"]
    desk.manager.evict("ant")
    pages = next(a["pages"] for a in desk.manager.status()["adapters"] if a["name"] == "ant")
    told = desk.manager.status()
    assert (told["cache_pages_free"], told["cache_pages_retired"]) == (free, pages)
    desk.grant("cat", "c")
    assert desk.manager.explain("cat")["next_victims"] == ["ant"]


def test_a_lease_that_waits_too_long_is_refused(desk: Desk) -> None:
    """NoRoom, retryable, with the time it waited."""
    desk.grant("ant", "a")
    desk.grant("bee", "b")
    desk.acquire("cat", "c", wait_s=0.05)
    _, answer = desk.next()
    assert isinstance(answer, NoRoom)
    assert answer.retryable


def test_unknown_adapters_are_named_with_what_is_near(desk: Desk) -> None:
    """NOT_FOUND, and the base model is never an answer."""
    with pytest.raises(UnknownAdapter, match=r"no adapter 'bea'; near names: bee"):
        desk.acquire("bea", "x")


def test_a_lease_id_that_runs_is_refused(desk: Desk) -> None:
    """Two running requests cannot share an id: the end of one would free the other."""
    desk.grant("ant", "same")
    with pytest.raises(LeaseRunning):
        desk.acquire("ant", "same")


def test_an_engine_refusal_reaches_every_waiter_and_is_remembered(desk: Desk) -> None:
    """A permanent refusal: no retry within the back-off, the reason in the answer, other adapters unaffected."""
    desk.engine.fail_bind = [EngineRefused("lora_weights has to few values for attn_q")]
    desk.acquire("ant", "a")
    _, answer = desk.next()
    assert isinstance(answer, AdapterFailed)
    assert "has to few values" in str(answer)
    assert isinstance(desk.grant("bee", "b"), Grant)


def test_a_full_engine_is_tried_again_while_the_lease_waits(desk: Desk) -> None:
    """A transient failure keeps the lease waiting; the second bind grants it."""
    desk.engine.fail_bind = [EngineFull("Cache is full. There are no done tasks to evict", lost_idle=False)]
    assert desk.grant("ant", "a").task_id == desk.bundles["ant"].task_id
    assert desk.engine.binds[desk.bundles["ant"].task_id] == 2


def test_an_unexpected_exception_in_a_move_is_one_failed_move(desk: Desk) -> None:
    """Rule 6: whatever a tier raises ends in exactly one event."""
    desk.engine.fail_bind = [RuntimeError("surprise")]
    desk.acquire("ant", "a")
    _, answer = desk.next()
    assert isinstance(answer, AdapterFailed)
    assert "surprise" in str(answer)


def test_a_flipped_byte_never_reaches_the_engine(desk: Desk) -> None:
    """sha256 is checked before the bytes leave DISK."""
    file = desk.bundles["ant"].path / "model.lora_weights.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    desk.acquire("ant", "a")
    _, answer = desk.next()
    assert isinstance(answer, AdapterFailed)
    assert "sha256" in str(answer)
    assert not desk.engine.binds


def test_a_missing_or_misfit_bundle_is_refused_with_every_reason(desk: Desk) -> None:
    """An adapter of the registry whose bundle is gone, or does not fit the engine."""
    misfit = small_bundle(desk.home / "bundles", "wide", seed=9, rank=16)
    publish(desk.home / FILE_NAME, misfit, "wide")
    desk.until(lambda: "wide" in desk.manager.status()["known"])
    with pytest.raises(AdapterRejected, match="rank 16 of attn_q: the engine's max_lora_rank is 8"):
        desk.acquire("wide", "w")
    for file in desk.bundles["dog"].path.iterdir():
        file.unlink()
    with pytest.raises(AdapterRejected, match="no bundle here"):
        desk.acquire("dog", "d")


def test_idle_adapters_leave_on_the_timer_and_a_pinned_one_stays(tmp_path: Path) -> None:
    """The timer evicts what is idle; a pin holds."""
    desk = Desk(tmp_path, idle_s=0.05)
    try:
        desk.manager.pin("ant")
        desk.until(lambda: desk.tiers().get("ant") == "SLOT")
        desk.grant("bee", "b")
        assert desk.tiers()["bee"] == "SLOT"
        desk.manager.release("b")
        desk.until(lambda: desk.tiers()["bee"] == "HOST")
        assert desk.tiers()["ant"] == "SLOT"
        with pytest.raises(BadRequest, match="pinned"):
            desk.manager.evict("ant")
        desk.manager.unpin("ant")
        desk.until(lambda: desk.tiers()["ant"] == "HOST")
    finally:
        desk.manager.close()


def test_a_pinned_adapter_the_engine_forgot_is_bound_again(tmp_path: Path) -> None:
    """The refresh of a pin is a touch; its miss demotes the adapter and binds it again, unasked."""
    desk = Desk(tmp_path, refresh_s=0.05)
    try:
        task = desk.bundles["ant"].task_id
        desk.manager.pin("ant")
        desk.until(lambda: desk.tiers().get("ant") == "SLOT")
        desk.engine.cache.drop(task)
        desk.until(lambda: desk.engine.binds[task] == 2)
        desk.until(lambda: desk.tiers()["ant"] == "SLOT")
    finally:
        desk.manager.close()


def test_a_new_version_is_served_and_the_old_one_forgotten(desk: Desk) -> None:
    """Publishing other bytes under a name takes effect without a restart, under another task id."""
    old = desk.grant("ant", "old")
    desk.manager.release("old")
    publish(desk.home / FILE_NAME, small_bundle(desk.home / "bundles", "ant", seed=77), "ant")
    desk.until(lambda: desk.bundles["ant"].digest not in [a["digest"] for a in slots(desk)])
    new = desk.grant("ant", "new")
    assert new.task_id != old.task_id


def slots(desk: Desk) -> list[dict[str, str]]:
    """The adapters that are in a slot."""
    return [a for a in desk.manager.status()["adapters"] if a["tier"] == "SLOT"]


def test_a_broken_registry_is_reported_and_the_last_good_one_stays(desk: Desk) -> None:
    """Half a file is not an empty fleet."""
    (desk.home / FILE_NAME).write_text("schema: 1\nadapters: [")
    desk.until(lambda: desk.manager.status()["registry_problem"] is not None)
    assert isinstance(desk.grant("cat", "c"), Grant)


def test_closing_refuses_what_waits(tmp_path: Path) -> None:
    """Nobody is left hanging, and the door is shut."""
    desk = Desk(tmp_path)
    desk.grant("ant", "a")
    desk.grant("bee", "b")
    desk.acquire("cat", "c")
    desk.manager.close()
    assert isinstance(desk.next()[1], Draining)
    with pytest.raises(Draining):
        desk.acquire("ant", "later")
