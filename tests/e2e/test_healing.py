"""Python models of a real Triton are killed: the supervisor notices, loads them again, and the warm set comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.processes import parent_of

from lora_slots.client import Client
from lora_slots.embedded import Prepared, running
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from lora_slots.supervisor import supervise

pytestmark = pytest.mark.triton


@pytest.fixture
def supervised(prepared: Prepared, tmp_path: Path) -> Iterator[tuple[TritonServer, list[str]]]:
    """A stack with a supervisor beside it, and what the supervisor said."""
    said: list[str] = []
    stop = threading.Event()
    router = {"tick_s": "0.1", "verify_s": "1", "state_file": str(tmp_path / "warm.json")}
    with running(prepared, router=router) as server:
        watcher = threading.Thread(target=supervise, args=(server, said.append), kwargs={"stop": stop})
        watcher.start()
        try:
            yield server, said
        finally:
            stop.set()
            watcher.join()


def kill_stub(server: TritonServer, model: str) -> None:
    """SIGKILL the Python process of a model."""
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace") if folder.name.isdigit() else ""
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1] if command else ""
        except OSError:
            continue
        if f"/{model}/1/model.py" in command and parent == str(server.pid):
            os.kill(int(folder.name), signal.SIGKILL)
            return
    raise AssertionError(f"no stub of {model}")


def until(true: Callable[[], bool]) -> None:
    """Wait for what the supervisor brings about."""
    clock = threading.Event()
    for _ in range(600):
        if true():
            return
        clock.wait(0.1)
    raise AssertionError("it did not come about")


def in_slots(server: TritonServer) -> set[str]:
    """Names of the adapters in slots; empty while lora_router is down."""
    try:
        with Client(server.grpc_url) as client:
            return {a["name"] for a in client.operate("status")["adapters"] if a["tier"] == "SLOT"}
    except ServerError:
        return set()


def test_a_killed_router_comes_back_with_its_warm_set(
    supervised: tuple[TritonServer, list[str]], golden: list[dict[str, Any]]
) -> None:
    """lora_router dies: it is loaded again, the adapters that were in slots are bound again, answers are right."""
    server, said = supervised
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    with Client(server.grpc_url) as client:
        client.operate("pin", adapter="robot")
        client.operate("warm", adapter="pirate")
    until(lambda: in_slots(server) == {"pirate", "robot"})
    state_saved(server)
    kill_stub(server, "lora_router")
    until(lambda: "lora_router died; loading it again" in said)
    until(lambda: in_slots(server) == {"pirate", "robot"})
    with Client(server.grpc_url) as client:
        assert next(a for a in client.operate("status")["adapters"] if a["name"] == "robot")["pinned"]
        assert client.generate(answer["text_input"], adapter="pirate") == answer["text"]


def state_saved(server: TritonServer) -> None:
    """The warm set is written by the timer; wait until it names both."""
    folder = next(path for path in Path("/proc").iterdir() if path.name == str(server.pid))
    assert folder.exists()
    until(lambda: bool(in_slots(server)))
    threading.Event().wait(0.3)


def test_a_killed_engine_comes_back_and_its_slots_are_bound_again(
    supervised: tuple[TritonServer, list[str]], golden: list[dict[str, Any]]
) -> None:
    """tensorrt_llm dies: loaded again, every slot is looked at, lost adapters are bound again, answers are right."""
    server, said = supervised
    answer = next(entry for entry in golden if entry["adapter"] == "json")
    with Client(server.grpc_url) as client:
        client.operate("warm", adapter="json")
    kill_stub(server, "tensorrt_llm")
    until(lambda: "tensorrt_llm died; loading it again" in said)
    until(lambda: in_slots(server) == {"json"})
    until(lambda: answers_right(server, answer))
    with Client(server.grpc_url) as client:
        story = [line["what"] for line in client.operate("explain", adapter="json")["story"]]
    assert "left SLOT: miss" in story


def answers_right(server: TritonServer, answer: dict[str, Any]) -> bool:
    """Whether the ensemble gives the golden answer now."""
    try:
        with Client(server.grpc_url) as client:
            return client.generate(answer["text_input"], adapter=answer["adapter"]) == str(answer["text"])
    except ServerError:
        return False


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
