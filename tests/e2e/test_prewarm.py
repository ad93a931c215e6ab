"""`lora-slots prewarm` against a real Triton: what it warms, what it says, how it ends."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.front import Fault, front
from fakes.gateways import ask, gateway
from fakes.stacks import running
from fakes.up import COMMAND, lora_slots

from adapter_slots.registry import publish
from adapter_slots.registry_changes import set_rules
from adapter_slots.registry_home import home_of
from adapter_slots.registry_writing import change, publish_at
from lora_slots import Client
from lora_slots.embedded import Prepared, publish_adapters
from lora_slots.stack import TritonServer
from lora_slots.stack.ports import choose_ports
from peft_to_trtllm import convert

pytestmark = pytest.mark.triton
SLOTS = 2


def quiet(stage: str, done: int, total: int) -> None:
    """No progress bar in tests."""


@pytest.fixture(scope="module")
def registry(base: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters, the last of them pinned, and a ghost."""
    file = publish_adapters(adapters, base, tmp_path_factory.mktemp("registry"), quiet)
    change(home_of(file), "pin robot", lambda doc: set_rules(doc, "robot", {"pinned": True}))
    return file


@pytest.fixture(scope="module")
def narrow(base: Path, engine: Path, registry: Path) -> Iterator[TritonServer]:
    """Two slots."""
    router = {"tick_s": "0.2", "num_slots": str(SLOTS), "registry_refresh_s": "1.5"}
    with running(Prepared(base, engine, registry), router=router) as made:
        yield made


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What --json printed."""
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def tiers(server: TritonServer) -> dict[str, str]:
    """Adapter -> tier."""
    with Client(server.grpc_url) as client:
        return {a["name"]: a["tier"] for a in client.status()["adapters"]}


def test_a_registry_is_warmed_as_far_as_slots_reach(narrow: TritonServer, registry: Path) -> None:
    """The pinned one first; what finds no slot is left out and named; the report has exact versions."""
    done = lora_slots("prewarm", "--from", str(registry), "--url", narrow.grpc_url, "--json")
    assert done.returncode == 0, done.stderr
    told = report(done)
    assert [a["adapter"] for a in told["adapters"]] == ["robot@1", "json@1"]
    assert all(a["found_in"] and a["waited_s"] is not None and a["error"] is None for a in told["adapters"])
    assert (told["all_warm"], told["slots"], told["left_out"]) == (True, SLOTS, ["pirate@1"])
    assert "3 adapters, room for 2 in 2 slots: 1 are left out; --all warms them too: pirate@1" in done.stderr
    assert {name for name, tier in tiers(narrow).items() if tier == "SLOT"} == {"robot", "json"}


def test_all_of_them_leaves_the_important_ones_in_slots(narrow: TritonServer, registry: Path) -> None:
    """--all: the rest went through a slot too, and stays beside it in host memory."""
    done = lora_slots("prewarm", "--from", str(registry), "--url", narrow.grpc_url, "--all")
    assert done.returncode == 0, done.stderr
    assert "1 will not stay in slots: pirate@1" in done.stderr
    assert done.stdout.count("warm: ") == 3
    assert tiers(narrow) == {"robot": "SLOT", "json": "SLOT", "pirate": "HOST"}


def test_each_adapter_is_asked_for_a_token_through_the_ensemble(narrow: TritonServer) -> None:
    """Not only moved: preprocessing, router, engine and postprocessing have answered for it."""
    with front(narrow.grpc_url) as way:
        done = lora_slots("prewarm", "json", "robot", "--url", way.url)
        assert done.returncode == 0, done.stderr
        assert sorted(call.headers["x-gateway-model-name"] for call in way.of("ensemble")) == ["json", "robot"]
        assert all(call.responses > 0 for call in way.of("ensemble"))


def test_a_terminal_has_a_bar(narrow: TritonServer) -> None:
    """It grows to 100 %, and then says what is warm."""
    ours, theirs = pty.openpty()
    command = [COMMAND, "prewarm", "json", "robot", "--url", narrow.grpc_url]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as running_command:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # the other end is closed
            while data := os.read(ours, 65536):
                said += data
    os.close(ours)
    assert running_command.returncode == 0
    bar, _, after = said.decode().rpartition("100%")
    assert "warming adapters" in bar
    assert after.count("warm: ") == 2


def test_refused_ones_are_named_with_why(narrow: TritonServer, registry: Path, tmp_path: Path) -> None:
    """An unknown one and one whose bundle is not there: exit code 2; the others are warm."""
    publish_at(registry, "ghost", "0" * 64, str(tmp_path / "nothing"))
    done = lora_slots("prewarm", "robot", "robott", "ghost", "--url", narrow.grpc_url, "--json")
    assert done.returncode == 2, done.stderr
    assert "lora-slots: robott: no adapter 'robott'; near names: robot [NOT_FOUND]" in done.stderr
    told = {a["adapter"]: a for a in report(done)["adapters"]}
    assert told["robot"]["error"] is None
    assert told["robott"]["code"] == "NOT_FOUND"
    assert report(done)["left_out"] == ["ghost"]
    done = lora_slots("prewarm", "ghost", "--url", narrow.grpc_url, "--timeout", "20")
    assert done.returncode == 2
    assert "lora-slots: ghost: " in done.stderr
    assert "Traceback" not in done.stderr
    change(home_of(registry), "no ghost", lambda doc: {**doc, "adapters": _without(doc["adapters"], "ghost")})


def _without(adapters: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in adapters.items() if key != name}


def test_a_version_that_was_published_a_moment_ago_is_waited_for(
    narrow: TritonServer, registry: Path, base: Path, adapters: dict[str, Path]
) -> None:
    """The server looks at its registry now and then: the new version is warmed, not the one before."""
    other = adapters["json"]
    publish(
        registry, convert(other, base=base, out=registry.parent / "other", dtype="float32", name="pirate"), "pirate"
    )
    change(home_of(registry), "pin pirate", lambda doc: set_rules(doc, "pirate", {"pinned": True}))
    done = lora_slots("prewarm", "--from", str(registry), "--url", narrow.grpc_url, "--json")
    assert done.returncode == 0, done.stderr
    assert [a["adapter"] for a in report(done)["adapters"]] == ["pirate@2", "robot@1"]
    assert tiers(narrow)["pirate"] == "SLOT"


def test_the_most_asked_for_in_an_access_log_are_warmed(server: TritonServer, tmp_path: Path) -> None:
    """The log is one that our gateway wrote a moment ago."""
    log = tmp_path / "gateway.log"
    with gateway(server.grpc_url, log) as door:
        for model in ("json", "robot", "robot", "pirate", "pirate", "pirate", "nobody"):
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            ask(door.url, "/v1/chat/completions", body)
    done = lora_slots("prewarm", "--top", "2", "--log", str(log), "--url", server.grpc_url, "--json")
    assert done.returncode == 0, done.stderr
    assert [a["adapter"] for a in report(done)["adapters"]] == ["pirate", "robot"]


def test_a_hanging_adapter_costs_its_time_and_no_more(narrow: TritonServer) -> None:
    """--timeout: exit code 2, the adapter and the time are named."""
    with front(narrow.grpc_url) as way:
        way.faults.append(Fault("hang", model="ensemble"))
        done = lora_slots("prewarm", "robot", "--url", way.url, "--timeout", "0.5")
    assert (done.returncode, done.stderr) == (
        2,
        "lora-slots: robot: not warm within 0.5 s [DEADLINE_EXCEEDED]\n",
    )


def test_a_server_that_goes_meanwhile_is_no_refusal(narrow: TritonServer) -> None:
    """Exit code 1: the pipeline may try again."""
    with front(narrow.grpc_url) as way:
        way.faults.append(Fault("refuse", model="ensemble"))
        done = lora_slots("prewarm", "robot", "--url", way.url)
    assert done.returncode == 1
    assert "lora-slots: robot: no server answers at" in done.stderr


def test_no_server_is_exit_code_1() -> None:
    """At once, or after --wait-ready."""
    port = choose_ports(0, 0, 0).grpc
    done = lora_slots("prewarm", "pirate", "--url", f"127.0.0.1:{port}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"lora-slots: no server answers at 127.0.0.1:{port}")
    done = lora_slots("prewarm", "pirate", "--url", f"127.0.0.1:{port}", "--wait-ready", "0.5")
    assert done.returncode == 1
    assert done.stderr.startswith(f"lora-slots: no server was ready at 127.0.0.1:{port} within 0.5 s")


def test_it_waits_until_the_server_is_ready(prepared: Prepared) -> None:
    """Started before the server is, as in a pipeline: it ends with 0 once all are warm."""
    ports = choose_ports(0, 0, 0)
    command = [COMMAND, "prewarm", "json", "pirate", "--url", f"127.0.0.1:{ports.grpc}", "--wait-ready", "300"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting,
        running(prepared, ports=ports) as server,
    ):
        said, _ = waiting.communicate(timeout=300)
        assert (waiting.returncode, said.count("warm: ")) == (0, 2)
        assert {tier for name, tier in tiers(server).items() if name in ("json", "pirate")} == {"SLOT"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "say what to warm"),
        (("x", "--from", "y"), "one of them"),
        (("--top", "3"), "--top N and --log FILE go together"),
        (("--log", "x"), "--top N and --log FILE go together"),
        (("--from", "/no/adapters.yaml"), "/no/adapters.yaml"),
        (("x", "--timeout", "nan"), "--timeout"),
        (("x", "--jobs", "0"), "--jobs"),
    ],
)
def test_what_cannot_be_meant_is_named(arguments: tuple[str, ...], words: str) -> None:
    """Exit code 1, one line, nobody is asked."""
    done = lora_slots("prewarm", *arguments, LORA_SLOTS_URL="127.0.0.1:1")
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
