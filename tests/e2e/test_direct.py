"""The direct door: lease, stream from the engine itself, give back; cancel, cold policies, a miss nobody sees."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from lora_slots.client import Client
from lora_slots.direct import DirectClient
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer

pytestmark = pytest.mark.triton


@pytest.fixture
def direct(server: TritonServer, tokenizer: Tokenizer) -> Iterator[DirectClient]:
    """A client of the direct door."""
    with DirectClient(server.grpc_url, tokenizer) as client:
        yield client


def state(server: TritonServer, name: str) -> dict[str, Any]:
    """One adapter's line of the status."""
    with Client(server.grpc_url) as client:
        return next(a for a in client.operate("status")["adapters"] if a["name"] == name)


def test_the_answers_are_those_of_transformers_and_peft(direct: DirectClient, golden: list[dict[str, Any]]) -> None:
    """Base and every adapter, streamed from the engine itself."""
    for answer in golden[:4]:
        assert "".join(direct.stream(answer["text_input"], adapter=answer["adapter"])) == answer["text"]


def test_the_lease_is_given_back_and_a_cancel_reaches_the_engine(
    server: TritonServer, direct: DirectClient, golden: list[dict[str, Any]]
) -> None:
    """Leaving a long answer after two pieces: no lease is left, and the engine is free long before its end."""
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    pieces = direct.stream(answer["text_input"], adapter="pirate", max_tokens=1500, sampling={"min_tokens": 1400})
    next(pieces)
    next(pieces)
    began = time.monotonic()
    pieces.close()
    assert state(server, "pirate")["leases"] == 0
    again = "".join(direct.stream(answer["text_input"], adapter="pirate"))
    assert again == answer["text"]
    assert time.monotonic() - began < 60, "1,400 tokens would take longer"


def test_an_engine_miss_is_healed_unseen(
    server: TritonServer, direct: DirectClient, golden: list[dict[str, Any]]
) -> None:
    """The engine forgets the adapter behind the manager's back; the client gets its answer all the same."""
    answer = next(entry for entry in golden if entry["adapter"] == "robot")
    assert "".join(direct.stream(answer["text_input"], adapter="robot")) == answer["text"]
    before = state(server, "robot")
    forget_everything(server)
    assert "".join(direct.stream(answer["text_input"], adapter="robot")) == answer["text"]
    story = [line["what"] for line in state(server, "robot")["story"]]
    assert "left SLOT: miss" in story, (before, story)


def forget_everything(server: TritonServer) -> None:
    """Load the engine's model anew, as an operator might: it holds no adapter afterwards."""
    server.reload("tensorrt_llm")


def test_cold_policies(server: TritonServer, direct: DirectClient, golden: list[dict[str, Any]]) -> None:
    """fail: refused with the time it will take, and warmed meanwhile; base: answered by the base, marked."""
    base = golden[0]
    answer = next(entry for entry in golden if entry["adapter"] == "json" and entry["prompt"] == base["prompt"])
    with Client(server.grpc_url) as client:
        until_evicted(client, "json")
        with pytest.raises(ServerError, match="ready in about") as refused:
            list(direct.stream(answer["text_input"], adapter="json", cold="fail"))
        assert refused.value.code == "UNAVAILABLE"
        until_evicted(client, "json")
    assert "".join(direct.stream(base["text_input"], adapter="json", cold="base")) == base["text"]
    assert direct.lease is not None
    assert direct.lease.task_id is None, "the caller can see that the base answered"
    assert "".join(direct.stream(answer["text_input"], adapter="json", cold="wait")) == answer["text"]


def until_evicted(client: Client, name: str) -> None:
    """Warm an adapter, then take it out of its slot, whatever it was doing."""
    client.operate("warm", adapter=name)
    for _ in range(200):
        try:
            client.operate("evict", adapter=name)
        except ServerError as error:
            if "not in a slot" in str(error):
                return
    raise AssertionError(f"{name} stays held")


def test_drain_refuses_new_leases_and_lets_running_ones_end(
    server: TritonServer, direct: DirectClient, golden: list[dict[str, Any]]
) -> None:
    """Draining: a running answer is whole, a new request is told so, and after it all is as before."""
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    with Client(server.grpc_url) as client:
        running = direct.stream(answer["text_input"], adapter="pirate")
        first = next(running)
        client.operate("drain")
        try:
            with pytest.raises(ServerError, match="draining"):
                client.generate(answer["text_input"], adapter="pirate", max_tokens=4)
            assert first + "".join(running) == answer["text"]
        finally:
            client.operate("drain", on=False)
        assert client.generate(answer["text_input"], adapter="pirate") == answer["text"]


def test_explain_tells_source_verdict_and_story(server: TritonServer) -> None:
    """What an operator asks at night."""
    with Client(server.grpc_url) as client:
        client.operate("warm", adapter="robot")
        told = client.operate("explain", adapter="robot")
    assert told["verdict"] == "fits the engine"
    assert told["tier"] == "SLOT"
    assert told["digest"] in told["source"]
    assert {"HOST", "SLOT"} <= set(told["last_load_s"])
    assert any(line["what"].startswith("in SLOT") for line in told["story"])
