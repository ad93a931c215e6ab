"""What lora_router decides, without Triton: names, ids, weights, operations, and leases for callers that have left."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.bundles import SHAPE, small_bundle
from fakes.engine import MemoryEngine

from adapter_slots.disk import DiskTier
from adapter_slots.errors import SlotError
from adapter_slots.machine import SlotMachine
from adapter_slots.manager import SlotManager
from adapter_slots.mover import Limits, Mover
from adapter_slots.records import MachineConfig
from adapter_slots.registry import FILE_NAME, Registry, publish
from adapter_slots.router import OPERATIONS, Router
from adapter_slots.store import Stores
from trtllm_lora import CacheGeometry

SOON = 20.0


@dataclass
class Request:
    """An Incoming that remembers what became of it."""

    request_id: str = "r"
    adapter: str | None = None
    task_id: int | None = None
    has_weights: bool = False
    max_tokens: int = 4
    parameters: Mapping[str, Any] = field(default_factory=dict)
    told: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def forward(self, task_id: int | None, *, report_end: bool) -> None:
        """Went on."""
        self.told.put((task_id, report_end))

    def fail(self, error: SlotError) -> None:
        """Was refused."""
        self.told.put(error)


@dataclass
class Desk:
    """A router over one small adapter."""

    router: Router
    manager: SlotManager
    task_id: int

    def route(self, request: Request) -> Any:
        """What became of a request."""
        self.router.route(request)
        return request.told.get(timeout=SOON)

    def operate(self, op: str, gone: Callable[[], bool] = lambda: False, **arguments: Any) -> Any:
        """The answer to an operation, or its error."""
        told: queue.SimpleQueue[Mapping[str, Any] | SlotError] = queue.SimpleQueue()
        self.router.operate(op, json.dumps(arguments), told.put, told.put, gone)
        return told.get(timeout=SOON)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A running router."""
    bundle = small_bundle(tmp_path / "bundles", "ant")
    publish(tmp_path / FILE_NAME, bundle)
    machine = SlotMachine(MachineConfig(num_slots=2, cache_pages=8, host_bytes=2**20, tick_s=0.02))
    mover = Mover(DiskTier(CacheGeometry.of(SHAPE)), MemoryEngine(), Stores(), Limits())
    manager = SlotManager(machine, Registry(tmp_path / FILE_NAME), mover)
    manager.start()
    yield Desk(Router(manager, wait_s=SOON), manager, bundle.task_id)
    manager.close()


def leases(desk: Desk) -> int:
    """Leases that run."""
    return sum(a["leases"] for a in desk.manager.status()["adapters"])


def test_a_request_without_an_adapter_goes_to_the_base(desk: Desk) -> None:
    """No task id, nothing to report."""
    assert desk.route(Request()) == (None, False)


def test_a_name_or_a_known_task_id_gets_the_task_id(desk: Desk) -> None:
    """With a request id its end is to be reported, without one a deadline ends the lease."""
    assert desk.route(Request("one", adapter="ant")) == (desk.task_id, True)
    assert desk.route(Request("", adapter="ant")) == (desk.task_id, False)
    assert desk.route(Request("two", task_id=desk.task_id)) == (desk.task_id, True)
    assert leases(desk) == 3
    assert desk.router.end("one", tokens=4)
    assert not desk.router.end("one", tokens=4), "reported twice: no harm"
    assert leases(desk) == 2


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Request(adapter="bee"), "NOT_FOUND", "no adapter 'bee'"),
        (Request(adapter=""), "INVALID_ARG", "leave it out to ask the base model"),
        (Request(parameters={"adaptor": "ant"}), "INVALID_ARG", "no input 'adaptor'; did you mean 'adapter'?"),
        (Request(parameters={"lora_name": "ant"}), "INVALID_ARG", "did you mean 'adapter'?"),
        (Request(task_id=0), "NOT_FOUND", "no adapter has task id 0"),
        (Request(adapter="ant", task_id=1), "INVALID_ARG", "not both"),
        (Request(adapter="ant", has_weights=True), "INVALID_ARG", "publish the adapter"),
        (Request(adapter="ant", parameters={"cold": "base"}), "INVALID_ARG", "can 'wait' or 'fail'"),
        (Request(adapter="ant", parameters={"cold": "fail"}), "UNAVAILABLE", "ready in about"),
    ],
)
def test_what_is_refused_and_how(desk: Desk, request_: Request, code: str, words: str) -> None:
    """Code and words; the text on the wire begins with the code."""
    error = desk.route(request_)
    assert isinstance(error, SlotError)
    assert error.grpc_code == code
    assert words in str(error)
    assert error.wire_text.startswith(f"[{code}] ")


def test_the_direct_door_gives_a_lease_and_takes_it_back(desk: Desk) -> None:
    """task id and digest; the end is reported by the client itself."""
    answer = desk.operate("lease", adapter="ant", request_id="d", max_tokens=8)
    assert (answer["task_id"], answer["base"]) == (desk.task_id, False)
    assert desk.operate("end", request_id="d") == {"ended": True}
    assert leases(desk) == 0


def test_a_lease_is_not_given_to_a_caller_that_left(desk: Desk) -> None:
    """The client went away while it waited: nothing is left behind."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    arguments = json.dumps({"adapter": "ant", "request_id": "left"})
    desk.router.operate("lease", arguments, told.put, told.put, lambda: True)
    desk.operate("warm", adapter="ant")
    assert leases(desk) == 0
    assert told.empty()


def test_base_is_an_answer_only_where_it_can_be_marked(desk: Desk) -> None:
    """cold=base over the direct door: marked, and the adapter is warmed meanwhile."""
    answer = desk.operate("lease", adapter="ant", request_id="b", cold="base")
    assert (answer["base"], answer["task_id"]) == (True, None)
    assert desk.operate("warm", adapter="ant")["adapter"] == "ant"


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"adapter": 3}', "{}"])
def test_junk_arguments_are_told_what_is_wrong(desk: Desk, arguments: str) -> None:
    """A bad request, never a crash."""
    for op in OPERATIONS:
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        desk.router.operate(op, arguments, told.put, told.put)
        answer = told.get(timeout=SOON)
        assert isinstance(answer, SlotError | dict)
        if isinstance(answer, SlotError):
            assert answer.grpc_code in ("INVALID_ARG", "NOT_FOUND")
        if op == "drain" and isinstance(answer, dict):
            desk.manager.drain(False)
