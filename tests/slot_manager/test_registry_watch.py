"""A manager follows its registry: pins, canaries, bases, signatures; a change costs no request its answer."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.bundles import SHAPE, small_bundle
from fakes.engine import MemoryEngine

from adapter_slots.disk import DiskTier
from adapter_slots.errors import (
    AdapterCold,
    BadRequest,
    Draining,
    NotAdmitted,
    RegistryError,
    SlotError,
    UnknownAdapter,
)
from adapter_slots.machine import SlotMachine
from adapter_slots.manager import SlotManager
from adapter_slots.mover import Limits, Mover
from adapter_slots.records import MachineConfig
from adapter_slots.registry import FILE_NAME, Registry, publish, publish_at
from adapter_slots.registry_changes import Doc, add_version, give_share, make_current, remove, set_alias, set_rules
from adapter_slots.registry_home import FileHome, Reading, Stamp
from adapter_slots.registry_writing import change
from adapter_slots.router import Router
from adapter_slots.store import Stores
from trtllm_lora import Bundle, CacheGeometry
from trtllm_lora.bundle_writing import set_signature
from trtllm_lora.request_rules import RequestLimits
from trtllm_lora.signing import PrivateKey, new_key

SOON = 20.0
LIMITS = RequestLimits(vocab_size=100, max_input_len=31, max_seq_len=32)
NAMES = ("ant", "bee", "cat", "dog")


@dataclass
class Asked:
    """A request of the ensemble."""

    request_id: str = ""
    adapter: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    task_id: int | None = None
    has_weights: bool = False
    told: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def numbers(self) -> Mapping[str, float]:
        """What it asks of the engine."""
        return {"request_output_len": 4}

    def prompt_len(self) -> int:
        """Tokens."""
        return 3

    def forward(self, task_id: int | None) -> None:
        """Went on."""
        self.told.put(task_id)

    def fail(self, error: SlotError) -> None:
        """Was refused."""
        self.told.put(error)


class Desk:
    """A manager and a router over small adapters, and a hand on their registry."""

    def __init__(self, home: Path, *, state_file: Path | None = None, registry: Registry | None = None) -> None:
        self.home = FileHome(home / FILE_NAME)
        self.engine = MemoryEngine()
        times: dict[str, Any] = {"tick_s": 0.02, "backoff_s": 0.01, "min_residency_s": 0.0}
        self.registry = registry or Registry(self.home.file)
        disk = DiskTier(CacheGeometry.of(SHAPE), home / "disk")
        self.mover = Mover(disk, self.engine, Stores(), Limits(), lambda: self.registry.terms)
        machine = SlotMachine(MachineConfig(num_slots=3, cache_pages=8, host_bytes=2**20, **times))
        self.manager = SlotManager(machine, self.registry, self.mover, state_file=state_file, remember_s=0.05)
        self.manager.start()
        self.router = Router(self.manager, LIMITS, wait_s=SOON)

    def change(self, edit: Callable[[Doc], Doc]) -> None:
        """Change the registry, and wait until the manager has seen it."""
        change(self.home, "test", edit)
        self.seen()

    def seen(self) -> None:
        """Wait until the manager has taken in the registry as it is."""
        reading = self.home.read()
        assert reading is not None
        self.until(lambda: self.registry._stamp == reading.stamp)
        self.until(lambda: not self.manager._looking)  # a look ends when the machine was told

    def turn(self) -> None:
        """Wait until the manager has looked twice for what it may let go."""
        turns, turn = [], self.manager._watch.turn

        def counted() -> None:
            turn()
            turns.append(1)

        self.manager._watch.turn = counted  # type: ignore[method-assign]
        self.until(lambda: len(turns) >= 2)

    def let_bind(self) -> None:
        """Let the engine's binds pass."""

        async def release() -> None:
            self.engine.hold.set()

        self.manager._loop.spawn(release())

    def ask(self, adapter: str, request_id: str = "", **parameters: Any) -> Any:
        """Task id of a request, or its error."""
        asked = Asked(request_id, adapter, parameters)
        self.router.route(asked)
        return asked.told.get(timeout=SOON)

    def operate(self, op: str, **arguments: Any) -> Any:
        """The answer to an operation, or its error."""
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.router.operate(op, json.dumps(arguments), told.put, told.put)
        return told.get(timeout=SOON)

    def tiers(self) -> dict[str, str]:
        """Name -> tier."""
        return {a["name"]: a["tier"] for a in self.manager.status()["adapters"]}

    def pinned(self) -> set[str]:
        """Names of the machine that are pinned."""
        return {a["name"] for a in self.manager.status()["adapters"] if a["pinned"]}

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for a state that the manager's own timer brings about."""
        pause = threading.Event()
        for _ in range(int(SOON / 0.01)):
            if true():
                return
            pause.wait(0.01)
        raise AssertionError(self.manager.status())


def bundle(home: Path, name: str, seed: int) -> Bundle:
    """A small bundle."""
    return small_bundle(home / "bundles", name, seed)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A registry with four adapters."""
    for seed, name in enumerate(NAMES):
        publish(tmp_path / FILE_NAME, bundle(tmp_path, name, seed))
    return tmp_path


@pytest.fixture
def desk(home: Path) -> Iterator[Desk]:
    """A running desk."""
    made = Desk(home)
    yield made
    made.manager.close()


def pin(name: str, on: bool = True) -> Callable[[Doc], Doc]:
    """The edit that pins."""
    return lambda doc: set_rules(doc, name, {"pinned": on})


# --- pins


def test_a_pin_of_the_registry_holds_at_the_start_and_on_change(home: Path) -> None:
    """Into a slot unasked; out of the file, and it is idle like any other."""
    change(FileHome(home / FILE_NAME), "pin", pin("ant"))
    desk = Desk(home)
    try:
        desk.until(lambda: desk.tiers().get("ant") == "SLOT")
        desk.change(pin("bee"))
        desk.until(lambda: desk.tiers().get("bee") == "SLOT")
        assert desk.pinned() == {"ant", "bee"}
        desk.change(pin("ant", False))
        assert desk.pinned() == {"bee"}
        desk.manager.evict("ant")
    finally:
        desk.manager.close()


def test_only_what_the_registry_pinned_is_unpinned_by_it(desk: Desk) -> None:
    """An operator's pin stays, on the same adapter too; and no operator takes the registry's away."""
    desk.manager.pin("ant")
    desk.change(lambda doc: pin("bee")(pin("ant")(doc)))
    with pytest.raises(BadRequest, match="ant is pinned by the registry: `lora-slots adapters pin --off ant`"):
        desk.manager.unpin("ant")
    desk.change(lambda doc: pin("bee", False)(pin("ant", False)(doc)))
    assert desk.pinned() == {"ant"}
    desk.manager.unpin("ant")
    assert desk.pinned() == set()


def test_a_pin_goes_with_the_name_to_the_next_version(desk: Desk, home: Path) -> None:
    """Whoever pinned it: what is held is what the name means."""
    desk.manager.pin("bee")
    desk.change(pin("ant"))
    new = [bundle(home, name, seed) for name, seed in (("ant", 71), ("bee", 72))]
    for made in new:
        publish(desk.home.file, made)
    desk.seen()
    desk.until(lambda: {a["digest"] for a in desk.manager.status()["adapters"] if a["tier"] == "SLOT"} == {
        made.digest for made in new
    })  # fmt: skip
    assert desk.pinned() == {"ant", "bee"}


def test_a_pin_that_finds_no_room_is_told_and_comes_when_there_is(desk: Desk) -> None:
    """Four pins, three slots: the fourth is refused by name, in status."""
    desk.change(lambda doc: pin("dog")(pin("cat")(pin("bee")(pin("ant")(doc)))))
    assert desk.manager.status()["pins_refused"] == {"dog": "all 3 slots would be pinned"}
    desk.change(pin("ant", False))
    assert desk.manager.status()["pins_refused"] == {}
    assert desk.pinned() == {"bee", "cat", "dog"}


def test_pins_of_the_registry_are_not_an_operators_after_a_restart(home: Path) -> None:
    """The warm set keeps operators' pins alone: what the file took back meanwhile does not come again."""
    change(FileHome(home / FILE_NAME), "pin", pin("ant"))
    desk = Desk(home, state_file=home / "warm.json")
    desk.until(lambda: not desk.manager.status()["restoring"] and desk.tiers().get("ant") == "SLOT")
    desk.manager.pin("bee")
    desk.until(lambda: "bee" in (home / "warm.json").read_text() if (home / "warm.json").exists() else False)
    desk.manager.close()
    assert json.loads((home / "warm.json").read_text())["pinned"] == ["bee"]
    change(FileHome(home / FILE_NAME), "unpin", pin("ant", False))
    again = Desk(home, state_file=home / "warm.json")
    try:
        again.until(lambda: not again.manager.status()["restoring"])
        assert again.pinned() == {"bee"}
    finally:
        again.manager.close()


# --- aliases


@pytest.fixture
def canary(desk: Desk, home: Path) -> dict[int, str]:
    """Half of alias `support` goes to a second version of ant; task id -> version."""
    second = bundle(home, "ant", 70)

    def edit(doc: Doc) -> Doc:
        path = f"bundles/{second.digest}"
        doc, number = add_version(doc, "ant", {"digest": second.digest, "path": path}, makes_current=False)
        return give_share(set_alias(doc, "support", {"ant": 100}), "support", f"ant@{number}", 50.0)

    desk.change(edit)
    first = bundle(home, "ant", 0)
    return {first.task_id: "ant", second.task_id: "ant@2"}


def test_requests_of_an_alias_are_shared_out_and_stick(desk: Desk, canary: dict[int, str]) -> None:
    """By session, else by request id, else by chance; the direct door agrees with the ensemble's."""
    alias = desk.registry.aliases["support"]
    for number in range(40):
        key = f"user-{number}"
        version = canary[desk.ask("support", f"r-{number}", session=key)]
        assert version == alias.choose(key)
        assert canary[desk.ask("support", key)] == version, "the request id is the key of a request without a session"
        lease = desk.operate("lease", adapter="support", request_id=f"lease-{number}", session=key)
        assert (canary[lease["task_id"]], lease["adapter"], lease["version"]) == (
            version,
            "ant",
            1 + (version == "ant@2"),
        )
    assert {canary[desk.ask("support")] for _ in range(40)} == {"ant", "ant@2"}
    assert canary[desk.ask("support", session=7)] == alias.choose("7"), "HTTP sends numbers as they are"


def test_a_version_can_be_named(desk: Desk, canary: dict[int, str]) -> None:
    """`adapter@version` and its task id lead to that very content, and explain says so."""
    ids = {name: task for task, name in canary.items()}
    assert desk.ask("ant@2") == ids["ant@2"]
    assert desk.ask("ant") == desk.ask("ant@1") == ids["ant"]
    asked = Asked(task_id=ids["ant@2"])
    desk.router.route(asked)
    assert asked.told.get(timeout=SOON) == ids["ant@2"]
    assert desk.manager.explain("ant@2")["version"] == 2
    assert set(desk.tiers()) == {"ant", "ant@2"}


def test_promotion_relabels_and_lets_the_old_version_go(desk: Desk, canary: dict[int, str]) -> None:
    """The new current version has the plain name; the old one leaves the machine once nothing leads to it."""
    ids = {name: task for task, name in canary.items()}
    desk.ask("ant@2")
    desk.ask("ant")
    desk.change(lambda doc: set_alias(make_current(doc, "ant", 2), "support", {"ant": 100}))
    desk.until(lambda: [a["task_id"] for a in desk.manager.status()["adapters"] if not a["leases"]] == [])
    assert {a["name"]: a["task_id"] for a in desk.manager.status()["adapters"]}["ant"] == ids["ant@2"]
    assert desk.ask("ant") == ids["ant@2"]
    assert desk.ask("ant@1") == ids["ant"], "it can still be named"


def test_a_change_of_version_costs_no_waiting_request_its_answer(desk: Desk, home: Path) -> None:
    """A request waits for the old version while the new one is published: it gets the old one, nobody an error."""
    desk.engine.hold.clear()
    old, new = bundle(home, "ant", 0), bundle(home, "ant", 73)
    waiting = Asked("old", "ant")
    desk.router.route(waiting)
    desk.until(lambda: desk.manager.status()["adapters"][0]["moving_to"] == "SLOT")
    publish(desk.home.file, new)
    desk.seen()
    desk.turn()
    later = Asked("new", "ant")
    desk.router.route(later)
    desk.let_bind()
    assert waiting.told.get(timeout=SOON) == old.task_id
    assert later.told.get(timeout=SOON) == new.task_id


def test_an_adapter_that_left_the_registry_is_gone_at_once(desk: Desk) -> None:
    """Its running requests end in peace; new ones, and those that wait, are told."""
    running = desk.ask("ant", "running")
    desk.change(lambda doc: remove(doc, "ant"))
    assert isinstance(desk.ask("ant"), UnknownAdapter)
    assert desk.router.end("running", 1), running
    desk.until(lambda: "ant" not in desk.tiers())


# --- cold policies


def test_the_adapters_cold_policy_is_the_default_of_its_requests(desk: Desk) -> None:
    """`fail`: a cold one is refused at once, unless the request waits; `base` answers where it can be marked."""
    desk.change(lambda doc: set_rules(set_rules(doc, "ant", {"cold": "fail"}), "bee", {"cold": "base"}))
    desk.engine.hold.clear()
    assert isinstance(desk.ask("ant"), AdapterCold)
    assert isinstance(desk.ask("bee"), AdapterCold), "the ensemble cannot mark an answer of the base"
    assert desk.operate("lease", adapter="bee", request_id="b")["base"] is True
    waiting = Asked("w", "ant", {"cold": "wait"})
    desk.router.route(waiting)
    desk.let_bind()
    assert isinstance(waiting.told.get(timeout=SOON), int)
    desk.until(lambda: desk.tiers()["bee"] == "SLOT")  # it was warmed meanwhile


# --- bases and signatures


@pytest.fixture
def key(tmp_path: Path) -> PrivateKey:
    """The key that releases."""
    return new_key(tmp_path / "release.key")


def demand(doc: Doc, key: PrivateKey) -> Doc:
    """Only signed adapters from now on."""
    return {**doc, "require_signatures": True, "trusted_keys": [key.public.text]}


def refused(answer: Any, words: str) -> None:
    """An answer must be a refusal with these words, for good."""
    assert isinstance(answer, NotAdmitted), answer
    assert words in str(answer)
    assert answer.wire_text.startswith("[FAILED_PRECONDITION] ")
    assert not answer.retryable


def test_only_signed_adapters_are_served(desk: Desk, home: Path, key: PrivateKey) -> None:
    """Unsigned, signed by another, signed for another digest: refused by name before a byte moves; signed: served."""
    other = new_key(home / "other.key")
    made = {name: bundle(home, name, seed) for seed, name in enumerate(NAMES)}
    set_signature(made["bee"], other.sign(made["bee"].digest))
    set_signature(made["cat"], key.sign(made["dog"].digest))
    set_signature(made["dog"], key.sign(made["dog"].digest))
    desk.change(lambda doc: demand(doc, key))
    refused(desk.ask("ant"), f"adapter 'ant@1': not signed; trusted keys: {key.public.id}")
    refused(desk.ask("bee"), f"signed by key '{other.public.id}', which is not trusted")
    refused(desk.ask("cat"), f"its signature by key {key.public.id} is not one of digest {made['cat'].digest[:12]}")
    assert desk.manager.explain("ant")["verdict"].endswith(f"not signed; trusted keys: {key.public.id}")
    assert not desk.engine.registered
    assert desk.ask("dog") == made["dog"].task_id


def test_a_signature_in_the_registry_counts_as_one_in_the_bundle(desk: Desk, home: Path, key: PrivateKey) -> None:
    """And goes before it: a wrong one there is not healed by a right one here."""
    ant = bundle(home, "ant", 0)

    def signed(text: str) -> Callable[[Doc], Doc]:
        versions = [{"version": 1, "digest": ant.digest, "path": f"bundles/{ant.digest}", "signature": text}]
        return lambda doc: demand({**doc, "adapters": {"ant": {"versions": versions}}}, key)

    desk.change(signed(key.sign(ant.digest)))
    assert desk.ask("ant") == ant.task_id
    set_signature(ant, key.sign(ant.digest))
    desk.change(signed(key.sign("0" * 64)))
    refused(desk.ask("ant"), "is not one of digest")


def test_what_was_served_unsigned_is_not_let_through_by_another_change(desk: Desk, home: Path, key: PrivateKey) -> None:
    """Signatures are demanded, and before its next use the adapter gets another pool, or another name beside it."""
    ant, bee = bundle(home, "ant", 0), bundle(home, "bee", 1)
    assert [desk.ask("ant"), desk.ask("bee")] == [ant.task_id, bee.task_id]
    desk.change(lambda doc: demand(doc, key))
    desk.change(lambda doc: set_rules({**doc, "pools": {"gold": {"cap": 2}}}, "ant", {"pool": "gold"}))
    path = f"bundles/{bee.digest}"
    desk.change(lambda doc: add_version(doc, "zoo", {"digest": bee.digest, "path": path})[0])
    for name in ("ant", "bee", "zoo"):
        refused(desk.ask(name), f"adapter '{name}@1': not signed")


def test_a_version_that_only_its_number_leads_to_is_looked_at_anew_too(desk: Desk, home: Path, key: PrivateKey) -> None:
    """`ant@1` was served before signatures were demanded, and superseded in the same change."""
    bundle(home, "ant", 0)
    second = bundle(home, "ant", 7)
    set_signature(second, key.sign(second.digest))
    assert isinstance(desk.ask("ant@1"), int)
    change = {"digest": second.digest, "path": f"bundles/{second.digest}"}
    desk.change(lambda doc: demand(add_version(doc, "ant", change)[0], key))
    assert desk.ask("ant") == second.task_id
    refused(desk.ask("ant@1"), "adapter 'ant@1': not signed")


def test_two_names_of_one_content_are_judged_each_by_what_it_claims(desk: Desk, home: Path) -> None:
    """The one that says that it was trained on another base is refused, though its twin is served."""
    ant = bundle(home, "ant", 0)
    assert desk.ask("ant") == ant.task_id
    twin = {"digest": ant.digest, "path": f"bundles/{ant.digest}", "base_model": "other/base"}
    desk.change(lambda doc: add_version({**doc, "base_model": "this/base"}, "twin", twin)[0])
    refused(desk.ask("twin"), "adapter 'twin@1': it was trained on other/base")
    assert desk.ask("ant") == ant.task_id


def test_a_refusal_names_what_was_asked_for_alone(desk: Desk, home: Path) -> None:
    """Two tenants' names of one content: neither learns the other's, whatever the refusal is."""
    ant = bundle(home, "ant", 0)
    desk.change(lambda doc: add_version(doc, "secret", {"digest": ant.digest, "path": f"bundles/{ant.digest}"})[0])
    assert desk.ask("secret") == desk.ask("ant") == ant.task_id
    desk.manager.drain()
    for name, other in (("ant", "secret"), ("secret", "ant")):
        error = desk.ask(name)
        assert isinstance(error, Draining)
        assert f"adapter {name!r}: " in str(error)
        assert repr(other) not in str(error)
        assert error.adapter == name


def test_a_key_that_is_trusted_no_more_ends_what_it_signed(desk: Desk, home: Path, key: PrivateKey) -> None:
    """On the next read of the registry, without a restart: residents and pins included."""
    ant = bundle(home, "ant", 0)
    set_signature(ant, key.sign(ant.digest))
    desk.change(lambda doc: pin("ant")(demand(doc, key)))
    desk.until(lambda: desk.tiers().get("ant") == "SLOT")
    assert desk.ask("ant") == ant.task_id
    other = new_key(home / "other.key")
    desk.change(lambda doc: demand(doc, other))
    refused(desk.ask("ant"), "which is not trusted")
    assert desk.pinned() == set()
    assert "not trusted" in desk.manager.status()["pins_refused"]["ant"]
    set_signature(ant, other.sign(ant.digest))
    desk.change(lambda doc: {**doc, "base_model": "any"})
    assert desk.ask("ant") == ant.task_id


@pytest.fixture
def remote(home: Path) -> Bundle:
    """A bundle in a store: a directory with a URL."""
    made = small_bundle(home / "made", "far", seed=50)
    shutil.copytree(made.path, home / "store" / "far")
    publish_at(home / FILE_NAME, "far", made.digest, f"file://{home}/store/far")
    return made


def test_an_unsigned_bundle_of_a_store_is_refused_before_its_bytes_are_fetched(
    remote: Bundle, home: Path, key: PrivateKey
) -> None:
    """Its manifest is read, nothing else is; the refusal is remembered and seen, and ends when the store has a
    signature."""
    change(FileHome(home / FILE_NAME), "demand", lambda doc: demand(doc, key))
    desk = Desk(home)
    try:
        weights = home / "store" / "far" / "model.lora_weights.npy"
        weights.rename(home / "aside")  # a fetch would say that it is missing
        refused(desk.ask("far"), "adapter 'far@1': not signed")
        explained = desk.manager.explain("far")
        assert "not signed" in explained["verdict"]
        assert "not signed" in explained["failure"]
        assert explained["tier"] == "REMOTE"
        assert not any((home / "disk").rglob("*.npy"))
        (home / "aside").rename(weights)
        set_signature(Bundle(home / "store" / "far", remote.manifest), key.sign(remote.digest))
        desk.until(lambda: desk.ask("far") == remote.task_id)
        assert desk.manager.explain("far")["verdict"] == "fits the engine"
    finally:
        desk.manager.close()


def test_a_copy_on_disk_that_was_not_signed_is_fetched_anew_when_signatures_are_demanded(
    remote: Bundle, home: Path, key: PrivateKey
) -> None:
    """The store has a signature that the copy of an earlier time lacks."""
    desk = Desk(home)
    try:
        assert desk.ask("far", "a") == remote.task_id
        desk.router.end("a", 1)
        set_signature(Bundle(home / "store" / "far", remote.manifest), key.sign(remote.digest))
        desk.change(lambda doc: demand(doc, key))
        assert desk.ask("far", "b") == remote.task_id
    finally:
        desk.manager.close()


def based(home: Path, name: str, base: str | None) -> Callable[[Doc], Doc]:
    """The edit that says what an adapter was trained on."""

    def edit(doc: Doc) -> Doc:
        versions = [{**v, **({"base_model": base} if base else {})} for v in doc["adapters"][name]["versions"]]
        adapters = {**doc["adapters"], name: {"versions": versions}}
        return {**doc, "base_model": "meta/llama@abc", "adapters": adapters}

    return edit


@pytest.mark.parametrize("base", ["meta/llama@def", "mistral@abc", "meta/llama-2"])
def test_an_adapter_of_another_base_is_refused_with_both_named(desk: Desk, home: Path, base: str) -> None:
    """At its first use, and in explain."""
    desk.change(based(home, "ant", base))
    refused(desk.ask("ant"), f"it was trained on {base}, this server's base is meta/llama@abc")
    assert base in desk.manager.explain("ant")["verdict"]
    assert isinstance(desk.ask("bee"), int), "one that says nothing of its base is served"


@pytest.mark.parametrize("base", ["meta/llama@abc", "meta/llama", None])
def test_an_adapter_of_this_base_is_served(desk: Desk, home: Path, base: str | None) -> None:
    """A revision that is not said is not held against it."""
    desk.change(based(home, "ant", base))
    assert isinstance(desk.ask("ant"), int)


# --- the reading itself


class SlowHome(FileHome):
    """A registry that takes its time."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.go, self.threads = threading.Event(), set[str]()
        self.slow = False

    def read(self, known: Stamp | None = None) -> Reading | None:
        """Wait first."""
        if self.slow:
            self.threads.add(threading.current_thread().name)
            assert self.go.wait(SOON)
        return super().read(known)


def test_requests_are_served_while_a_registry_is_read(home: Path) -> None:
    """Thousands of entries take seconds: whole moves through the manager's own loop go on meanwhile."""
    registry = Registry(home / FILE_NAME)
    slow = SlowHome(home / FILE_NAME)
    registry.home = slow
    desk = Desk(home, registry=registry)
    try:
        slow.slow = True
        desk.until(lambda: bool(slow.threads))
        for name in NAMES[:3]:
            assert isinstance(desk.ask(name, name), int), "from disk into a slot"
        desk.router.end("ant", 1)
        assert isinstance(desk.ask("dog"), int), "with an eviction"
        assert "adapter-slots" not in slow.threads
        slow.go.set()
        publish(desk.home.file, bundle(home, "elk", 60))
        desk.until(lambda: "elk" in desk.manager.status()["known"])
    finally:
        slow.go.set()
        desk.manager.close()


def test_a_server_that_knows_its_base_refuses_a_registry_of_another(home: Path) -> None:
    """At the start, before anything is opened."""
    change(FileHome(home / FILE_NAME), "base", lambda doc: {**doc, "base_model": "meta/llama@abc"})
    with pytest.raises(RegistryError, match="it is for meta/llama@abc, this server has other/base"):
        Registry(home / FILE_NAME, base_model="other/base")
