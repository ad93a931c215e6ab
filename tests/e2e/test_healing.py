"""Python models of a real Triton are killed: the supervisor notices, loads them again, and the warm set comes back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.processes import parent_of
from fakes.stacks import running
from fakes.steady import ask, explain, is_right, until

from adapter_slots.host import PREFIX, SHM
from lora_slots.client import Client
from lora_slots.direct import DirectClient
from lora_slots.embedded import Prepared
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from lora_slots.supervisor import supervise
from lora_slots.text import Tokenizer

pytestmark = pytest.mark.triton


@pytest.fixture
def supervised(prepared: Prepared, tmp_path: Path) -> Iterator[tuple[TritonServer, list[str]]]:
    """A stack with a supervisor beside it, and what the supervisor said."""
    said: list[str] = []
    stop = threading.Event()
    router = {"tick_s": "0.1", "verify_s": "1", "bind_timeout_s": "5", "state_file": str(tmp_path / "warm.json")}
    with running(prepared, router=router) as server:
        watcher = threading.Thread(target=supervise, args=(server, said.append), kwargs={"stop": stop})
        watcher.start()
        try:
            yield server, said
        finally:
            stop.set()
            watcher.join()


def reloaded(said: list[str], times: int) -> bool:
    """Whether a model is loaded for the `times`-th time. An engine's death may show in the supervisor's own request."""
    return sum(line.endswith("; loading it again") for line in said) >= times


def stub_of(server: TritonServer, model: str) -> int:
    """The Python process of a model."""
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace") if folder.name.isdigit() else ""
        except OSError:
            continue
        if f"/{model}/1/model.py" in command and parent_of(int(folder.name)) == server.pid:
            return int(folder.name)
    raise AssertionError(f"no stub of {model}")


def in_slots(server: TritonServer) -> set[str]:
    """Names of the adapters in slots; empty while lora_router is down."""
    try:
        with Client(server.grpc_url) as client:
            return {a["name"] for a in client.operate("status")["adapters"] if a["tier"] == "SLOT"}
    except ServerError:
        return set()


def test_a_killed_router_comes_back_with_its_warm_set(
    supervised: tuple[TritonServer, list[str]], golden: list[dict[str, Any]], tmp_path: Path
) -> None:
    """lora_router dies: it is loaded again, the adapters that were in slots are bound again, answers are right."""
    server, said = supervised
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    with Client(server.grpc_url) as client:
        client.operate("pin", adapter="robot")
        client.operate("warm", adapter="pirate")
    until(lambda: in_slots(server) == {"pirate", "robot"})
    until(lambda: set(json.loads((tmp_path / "warm.json").read_text())["recent"]) == {"pirate", "robot"})
    os.kill(stub_of(server, "lora_router"), signal.SIGKILL)
    until(lambda: "lora_router died; loading it again" in said)
    until(lambda: in_slots(server) == {"pirate", "robot"})
    with Client(server.grpc_url) as client:
        assert next(a for a in client.operate("status")["adapters"] if a["name"] == "robot")["pinned"]
        assert client.generate(answer["text_input"], adapter="pirate") == answer["text"]


def test_a_killed_engine_comes_back_and_its_slots_are_bound_again(
    supervised: tuple[TritonServer, list[str]], golden: list[dict[str, Any]]
) -> None:
    """tensorrt_llm dies, and dies again: loaded each time, every slot is looked at, lost adapters are bound again."""
    server, said = supervised
    answer = next(entry for entry in golden if entry["adapter"] == "json")
    with Client(server.grpc_url) as client:
        client.operate("warm", adapter="json")

    for times in (1, 2):
        os.kill(stub_of(server, "tensorrt_llm"), signal.SIGKILL)
        until(partial(reloaded, said, times))
        until(lambda: in_slots(server) == {"json"})
        until(lambda: is_right(server, answer))
        story = [line["what"] for line in explain(server, "json")["story"]]
        assert story.count("left SLOT: miss") >= times


def test_an_engine_killed_in_the_middle_of_a_bind_loses_nobody(
    supervised: tuple[TritonServer, list[str]], golden: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    """The engine is stopped, a bind is sent to it, and it is killed: once it is back, who waited is answered.

    In an ensemble Triton hands the request on to the dead engine it began with, which is told: asking again is enough.
    """
    server, said = supervised
    pirate, json_ = (next(entry for entry in golden if entry["adapter"] == name) for name in ("pirate", "json"))
    assert is_right(server, json_)
    answers: dict[str, str] = {}

    def directly() -> None:
        with DirectClient(server.grpc_url, tokenizer) as client:
            answers["direct"] = "".join(client.stream(pirate["text_input"], adapter="pirate"))

    def by_ensemble() -> None:
        try:
            answers["ensemble"] = ask(server, pirate)
        except ServerError as error:
            answers["ensemble"] = str(error)

    engine = stub_of(server, "tensorrt_llm")
    os.kill(engine, signal.SIGSTOP)
    waiting = [threading.Thread(target=directly), threading.Thread(target=by_ensemble)]
    for thread in waiting:
        thread.start()
    until(lambda: (told := explain(server, "pirate"))["moving_to"] == "SLOT" and told["waiting"] == len(waiting))
    os.kill(engine, signal.SIGKILL)
    until(partial(reloaded, said, 1))
    for thread in waiting:
        thread.join()
    assert answers["direct"] == pirate["text"]
    assert answers["ensemble"] in (pirate["text"], "Stub process 'tensorrt_llm_0_0' is not healthy.")
    assert any(line["what"].startswith("SLOT failed: ") for line in explain(server, "pirate")["story"])
    assert is_right(server, pirate)
    until(lambda: is_right(server, json_))


def test_a_server_killed_in_the_middle_of_a_bind_starts_again_as_it_was(
    prepared: Prepared, golden: list[dict[str, Any]], tmp_path: Path
) -> None:
    """tritonserver dies under a bind; nothing of it stays in shared memory, and the next one has its warm set."""
    pirate, json_ = (next(entry for entry in golden if entry["adapter"] == name) for name in ("pirate", "json"))
    router = {"tick_s": "0.1", "state_file": str(tmp_path / "warm.json")}
    refused: list[ServerError] = []
    with running(prepared, router=router) as server:
        assert is_right(server, json_)
        until(lambda: (tmp_path / "warm.json").exists() and "json" in (tmp_path / "warm.json").read_text())
        owner = stub_of(server, "lora_router")
        os.kill(stub_of(server, "tensorrt_llm"), signal.SIGSTOP)

        def wait() -> None:
            try:
                ask(server, pirate)
            except ServerError as error:
                refused.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: explain(server, "pirate")["moving_to"] == "SLOT")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        waiting.join()
    assert [error.code for error in refused] == ["UNAVAILABLE"]
    until(lambda: not command_of(owner))
    with running(prepared, router=router) as server:
        until(lambda: in_slots(server) == {"json"})
        assert is_right(server, pirate)
    assert not list(SHM.glob(f"{PREFIX}{owner}-*"))


def test_a_server_killed_with_its_keeper_leaves_no_process(prepared: Prepared) -> None:
    """`pkill -9 -f tritonserver` takes the keeper too; the Python models end by themselves, lora_router included."""
    with running(prepared) as server:
        with Client(server.grpc_url) as client:
            client.operate("warm", adapter="pirate")
        pid = server.pid
        assert pid is not None
        stubs = [child for child in descendants(pid) if "stub" in command_of(child)]
        assert len(stubs) == 4
        os.kill(parent_of(pid), signal.SIGKILL)
        until(lambda: not any("stub" in command_of(stub) for stub in stubs))


def descendants(pid: int) -> list[int]:
    """Processes below one."""
    numbers = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    children = [number for number in numbers if parent_of(number) == pid]
    return children + [deeper for child in children for deeper in descendants(child)]


def command_of(pid: int) -> str:
    """Command line of a process; empty if it is gone."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
