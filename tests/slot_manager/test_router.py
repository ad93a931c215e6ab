"""What lora_router decides, without Triton: names, ids, weights, operations, and leases for callers that have left."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes.bundles import SHAPE, small_bundle
from fakes.engine import MemoryEngine

from adapter_slots.disk import DiskTier
from adapter_slots.errors import BadRequest, SlotError
from adapter_slots.machine import SlotMachine
from adapter_slots.manager import SlotManager
from adapter_slots.mover import Limits, Mover
from adapter_slots.operations import OPERATIONS
from adapter_slots.records import MachineConfig
from adapter_slots.registry import FILE_NAME, Registry, publish
from adapter_slots.router import GUESSED_TOKEN_S, Router
from adapter_slots.settings import FIRST_TOKEN_S
from adapter_slots.store import Stores
from trtllm_lora import CacheGeometry
from trtllm_lora.request_rules import RequestLimits

SOON = 20.0
LIMITS = RequestLimits(vocab_size=100, max_input_len=31, max_seq_len=32)


@dataclass
class Request:
    """An Incoming that remembers what became of it."""

    request_id: str = "r"
    adapter: str | None = None
    task_id: int | None = None
    has_weights: bool = False
    asks: Mapping[str, float] = field(default_factory=dict)
    prompt: int = 3
    parameters: Mapping[str, Any] = field(default_factory=dict)
    told: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    def numbers(self) -> Mapping[str, float]:
        """What it asks of the engine."""
        return {"request_output_len": 4, **self.asks}

    def prompt_len(self) -> int:
        """Tokens."""
        return self.prompt

    def forward(self, task_id: int | None) -> None:
        """Went on."""
        self.told.put(task_id)

    def fail(self, error: SlotError) -> None:
        """Was refused."""
        self.told.put(error)


@dataclass
class Clock:
    """The real time, and what a test lets pass besides."""

    passed_s: float = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return time.monotonic() + self.passed_s


@dataclass
class Desk:
    """A router over one small adapter."""

    router: Router
    manager: SlotManager
    task_id: int
    clock: Clock

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
    clock = Clock()
    manager = SlotManager(machine, Registry(tmp_path / FILE_NAME), mover, clock=clock)
    manager.start()
    yield Desk(Router(manager, LIMITS, wait_s=SOON, clock=clock), manager, bundle.task_id, clock)
    manager.close()


def leases(desk: Desk) -> int:
    """Leases that run."""
    return sum(a["leases"] for a in desk.manager.status()["adapters"])


def test_how_long_the_engine_may_take_to_begin_is_the_operators_to_say(desk: Desk) -> None:
    """A lease whose end nobody reports ends by that, and by what its answer takes."""
    router = Router(desk.manager, LIMITS, wait_s=SOON, first_token_s=5.0, clock=desk.clock)
    asked = Request("gone", adapter="ant")
    router.route(asked)
    assert asked.told.get(timeout=SOON) == desk.task_id
    generation_s = 4 * 4 * GUESSED_TOKEN_S
    desk.clock.passed_s += 4.0 + generation_s
    assert leases(desk) == 1
    desk.clock.passed_s += 2.0
    until = threading.Event()
    while leases(desk):
        assert not until.wait(0.01)


def test_a_request_without_an_adapter_goes_to_the_base(desk: Desk) -> None:
    """No task id, and no lease that an engine's error could leave behind."""
    assert desk.route(Request()) is None
    refused = desk.route(Request(asks={"temperature": -1}))
    assert isinstance(refused, BadRequest), "the engine would say so too, but a stream carries no code of its error"
    assert "temperature -1" in str(refused)


def test_a_name_or_a_known_task_id_gets_the_task_id(desk: Desk) -> None:
    """With a request id its end is to be reported, without one a deadline ends the lease."""
    assert desk.route(Request("one", adapter="ant")) == desk.task_id
    assert desk.route(Request("", adapter="ant")) == desk.task_id
    assert desk.route(Request("two", task_id=desk.task_id)) == desk.task_id
    assert leases(desk) == 3
    assert desk.router.end("one", tokens=4)
    assert not desk.router.end("one", tokens=4), "reported twice: no harm"
    assert leases(desk) == 2


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Request(adapter="bee"), "NOT_FOUND", "no adapter 'bee'"),
        (Request(adapter=""), "INVALID_ARGUMENT", "leave it out to ask the base model"),
        (Request(parameters={"adaptor": "ant"}), "INVALID_ARGUMENT", "no input 'adaptor'; did you mean 'adapter'?"),
        (Request(parameters={"lora_name": "ant"}), "INVALID_ARGUMENT", "did you mean 'adapter'?"),
        (Request(task_id=0), "NOT_FOUND", "no adapter has task id 0"),
        (Request(adapter="ant", task_id=1), "INVALID_ARGUMENT", "not both"),
        (Request(adapter="ant", has_weights=True), "INVALID_ARGUMENT", "publish the adapter"),
        (Request(adapter="ant", parameters={"cold": "base"}), "INVALID_ARGUMENT", "can 'wait' or 'fail'"),
        (Request(adapter="ant", parameters={"cold": "fail"}), "UNAVAILABLE", "ready in about"),
        (Request(adapter="ant", prompt=0), "INVALID_ARGUMENT", "!mInputTokenIds.empty()"),
        (Request(adapter="ant", prompt=32), "INVALID_ARGUMENT", "Prompt length (32) exceeds maximum input length (31)"),
        (Request(adapter="ant", asks={"request_output_len": 0}), "INVALID_ARGUMENT", "mMaxNewTokens > 0"),
        (Request(adapter="ant", asks={"num_return_sequences": 0}), "INVALID_ARGUMENT", "numReturnSequences > 0"),
        (Request(adapter="ant", asks={"beam_width": 2}), "INVALID_ARGUMENT", "beam_width 2 is outside of [1, 1]"),
        (Request(adapter="ant", asks={"runtime_top_p": 1.5}), "INVALID_ARGUMENT", "runtime_top_p 1.5 is outside"),
        (
            Request(adapter="ant", asks={"end_id": 100}),
            "INVALID_ARGUMENT",
            "end_id 100 is not in the vocabulary of 100",
        ),
        (Request(adapter="ant", asks={"runtime_top_k": -1, "min_tokens": -2}), "INVALID_ARGUMENT", "min_tokens -2"),
    ],
)
def test_what_is_refused_and_how(desk: Desk, request_: Request, code: str, words: str) -> None:
    """Code and words; the text on the wire begins with the code."""
    error = desk.route(request_)
    assert isinstance(error, SlotError)
    assert error.grpc_code == code
    assert words in str(error)
    assert error.wire_text.startswith(f"[{code}] ")
    assert leases(desk) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/cache/bundles/5f0c/bundle.json: broken", "…/bundle.json: broken"),
        ("adapter 'x': /a/b.npy is 3 bytes, /c is 4", "adapter 'x': …/b.npy is 3 bytes, /c is 4"),
        ("s3://bucket/fleet/ant: 503", "s3://bucket/fleet/ant: 503"),
        ("1/2 of it", "1/2 of it"),
    ],
)
def test_no_folder_of_the_server_reaches_a_client(text: str, told: str) -> None:
    """Errors name files; whoever asks over the wire sees their last part."""
    assert SlotError(text).wire_text == f"[INTERNAL] {told}"


def test_a_request_of_several_answers_ends_with_the_last(desk: Desk) -> None:
    """num_return_sequences: each answer's end is reported, in any order."""
    assert desk.route(Request("many", adapter="ant", asks={"num_return_sequences": 3})) == desk.task_id
    for still_running in (1, 1, 0):
        assert desk.router.end("many", tokens=4)
        assert leases(desk) == still_running


def test_an_id_that_runs_cannot_be_used_again_until_its_end_or_its_deadline(desk: Desk) -> None:
    """Held no longer than the longest answer could take, whatever max_tokens says."""
    assert desk.route(Request("again", adapter="ant", asks={"request_output_len": 2**31 - 1})) == desk.task_id
    error = desk.route(Request("again", adapter="ant"))
    assert (error.grpc_code, str(error)[:32]) == ("ALREADY_EXISTS", "request:again is still running: ")
    desk.clock.passed_s += FIRST_TOKEN_S + 4 * LIMITS.max_seq_len * GUESSED_TOKEN_S
    until = time.monotonic() + SOON
    while leases(desk) and time.monotonic() < until:  # the next tick reaps it
        time.sleep(0.01)
    assert desk.route(Request("again", adapter="ant")) == desk.task_id


def test_no_client_can_take_the_name_of_a_lease_of_the_routers_own(desk: Desk) -> None:
    """`warm` and requests without an id have leases that no request id collides with."""
    for own in ("warm:1", "anonymous:1", "warm-1", "anonymous-1"):
        assert desk.route(Request(own, adapter="ant")) == desk.task_id
    assert desk.operate("warm", adapter="ant")["adapter"] == "ant"
    assert desk.route(Request("", adapter="ant")) == desk.task_id


@pytest.mark.parametrize(
    ("op", "arguments", "words"),
    [
        ("lease", {"max_tokens": "x"}, "'max_tokens' is a number, 0 or more, found 'x'"),
        ("lease", {"max_tokens": 1.5}, "'max_tokens' is a whole number, found 1.5"),
        ("lease", {"wait_s": "x"}, "'wait_s' is a number"),
        ("lease", {"wait_s": -1}, "'wait_s' is a number, 0 or more, found -1"),
        ("lease", {"wait_s": float("nan")}, "'wait_s' is a number"),
        ("lease", {"wait_s": 10**400}, "'wait_s' is a number"),
        ("lease", {"cold": "maybe"}, "'cold' is one of wait, fail, base, found 'maybe'"),
        ("end", {"tokens": "q"}, "'tokens' is a number"),
        ("end", {"tokens": True}, "'tokens' is a number"),
        ("drain", {"on": "false"}, "'on' is true or false, found 'false'"),
        ("warm", {"adapter": 3}, "op_args needs 'adapter', a text, found 3"),
    ],
)
def test_operations_say_which_argument_is_wrong(desk: Desk, op: str, arguments: dict[str, Any], words: str) -> None:
    """Nothing is guessed: `"on": "false"` drained once."""
    error = desk.operate(op, **{"adapter": "ant", "request_id": "r", **arguments})
    assert isinstance(error, BadRequest)
    assert words in str(error)
    assert not desk.manager.status()["draining"]


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
            assert answer.grpc_code in ("INVALID_ARGUMENT", "NOT_FOUND")
        if op == "drain" and isinstance(answer, dict):
            desk.manager.drain(False)
