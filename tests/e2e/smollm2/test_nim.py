"""A NIM 1.x deployment that changes its image: the folder of adapters and the variables stay as they are."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import seaweed
from fakes.stacks import running
from fakes.up import Running, nothing_left

from lora_slots import Client, ServerError, examples
from lora_slots.embedded import Prepared
from lora_slots.peft_source import PeftSource
from lora_slots.stack import ModelsFailed

pytestmark = pytest.mark.triton


@pytest.fixture
def loras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """NIM's folder with two adapters, its variables, and nothing left of whatever runs meanwhile."""
    folder, temporary = tmp_path / "loras", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in ("pirate", "robot"):
        shutil.copytree(examples.adapters()[name], folder / name)
    for name, value in {
        "NIM_PEFT_SOURCE": str(folder),
        "NIM_PEFT_REFRESH_INTERVAL": "0.2",
        "NIM_MAX_GPU_LORAS": "2",
        "NIM_MAX_CPU_LORAS": "4",
        "NIM_MAX_LORA_RANK": "32",
    }.items():
        monkeypatch.setenv(name, value)
    with nothing_left(temporary):
        yield folder
    shutil.rmtree(PeftSource(str(folder)).home, ignore_errors=True)


def first(golden: list[dict[str, Any]], adapter: str) -> dict[str, Any]:
    """A golden answer of an adapter."""
    return next(answer for answer in golden if answer["adapter"] == adapter)


def until_known(client: Client, name: str) -> None:
    """Until the server has seen a new adapter."""
    clock = threading.Event()
    for _ in range(300):
        try:
            client.explain(name)
        except ServerError as error:
            assert error.code == "NOT_FOUND"
            clock.wait(0.1)
        else:
            return
    raise AssertionError(f"{name} is not seen")


def test_up_serves_nims_folder_by_its_environment_alone(loras: Path, golden: list[dict[str, Any]]) -> None:
    """The answers are PEFT's; an adapter put there while it serves answers too, one that is taken away is gone."""
    up = Running()
    up.until("serving until Ctrl-C")
    line = next(line for line in up.lines if "examples/client.py --url" in line)
    url = line.split("--url ")[1].split()[0]
    with Client(url) as client:
        for name in ("pirate", "robot"):
            assert client.generate(first(golden, name)["text_input"], adapter=name) == first(golden, name)["text"]
        status = client.status()
        assert (status["num_slots"], status["known"]) == (2, ["pirate", "robot"])
        shutil.copytree(examples.adapters()["json"], loras / "json")
        until_known(client, "json")
        assert client.generate(first(golden, "json")["text_input"], adapter="json") == first(golden, "json")["text"]
        shutil.rmtree(loras / "robot")
        up.until("adapters: gone: robot")
        clock = threading.Event()
        while "robot" in client.status()["known"]:
            clock.wait(0.1)
        with pytest.raises(ServerError) as gone:
            client.generate("x", adapter="robot", max_tokens=1)
        assert gone.value.code == "NOT_FOUND"
    up.interrupt()
    code, said = up.end()
    assert code == 130, said
    assert "new: pirate, robot" in said
    assert "adapters: new: json" in said


def test_the_router_alone_takes_the_environment_too(
    loras: Path, prepared: Prepared, golden: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model repository that names no registry, as an image of one's own has it."""
    monkeypatch.setenv("LORA_SLOTS_CACHE", str(tmp_path / "cache"))
    with running(prepared, router={"registry": "", "tick_s": "0.2"}) as server, Client(server.grpc_url) as client:
        answer = first(golden, "pirate")
        assert client.generate(answer["text_input"], adapter="pirate") == answer["text"]
        assert client.status()["num_slots"] == 2
        shutil.copytree(examples.adapters()["json"], loras / "json")
        until_known(client, "json")
        assert client.generate(first(golden, "json")["text_input"], adapter="json") == first(golden, "json")["text"]


def test_the_folder_may_be_in_an_object_store(
    loras: Path, prepared: Prepared, golden: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NIM_PEFT_SOURCE=s3://…: adapters are served from there, and one that is put there while it serves is too."""
    with seaweed.for_tests(tmp_path / "store", "adapters") as store:

        def put(name: str) -> None:
            for file in examples.adapters()[name].iterdir():
                store.client().put_object(Bucket="adapters", Key=f"loras/{name}/{file.name}", Body=file.read_bytes())

        put("pirate")
        for name, value in {**seaweed.environment(), "AWS_ENDPOINT_URL": store.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NIM_PEFT_SOURCE", "s3://adapters/loras")
        monkeypatch.setenv("LORA_SLOTS_CACHE", str(tmp_path / "cache"))
        with running(prepared, router={"registry": "", "tick_s": "0.2"}) as server, Client(server.grpc_url) as client:
            for name in ("pirate", "robot"):
                put(name)
                until_known(client, name)
                answer = first(golden, name)
                assert client.generate(answer["text_input"], adapter=name) == answer["text"]


def test_a_wrong_variable_is_named_by_the_router(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, loras: Path
) -> None:
    """The model does not load, and Triton's log says which variable it was."""
    monkeypatch.setenv("NIM_MAX_LORA_RANK", "128")
    with (
        pytest.raises(ModelsFailed, match="NIM_MAX_LORA_RANK=128: the engine was built for ranks up to 64"),
        running(prepared),
    ):
        raise AssertionError("it must not start")


def test_an_adapter_above_the_rank_is_told_and_the_others_are_served(
    loras: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIM_MAX_LORA_RANK is a limit: the one above it is named with both ranks."""
    rank = json.loads((loras / "pirate" / "adapter_config.json").read_text())["r"]
    file = loras / "robot" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "r": rank + 1}))
    monkeypatch.setenv("NIM_MAX_LORA_RANK", str(rank))
    up = Running("--check", "--max-tokens", "4")
    code, said = up.end()
    assert code == 0, said
    assert f"robot: rank {rank + 1} is above the {rank} that are allowed" in said
    assert "[pirate" in said
    assert "[robot" not in said
