"""README.md and the pages client, prewarm and migration: their code runs as it stands, against a real stack."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
import typer
import yaml
from fakes.front import front, identity, server_credentials
from fakes.gateways import RunningGateway, gateway
from fakes.pages import ROOT, blocks, run
from fakes.stacks import running
from fakes.up import COMMAND

from adapter_slots.registry import Registry
from lora_slots import cli, examples
from lora_slots.client import Client
from lora_slots.embedded import Prepared, publish_adapters
from lora_slots.peft_source import PeftSource
from lora_slots.repository import RepositoryConfig, render
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer
from peft_to_trtllm import convert

pytestmark = pytest.mark.triton
LANGUAGES = {
    "README.md": {"bash", "text"},
    "client.md": {"python"},
    "prewarm.md": {"bash", "json"},
    "migration.md": {"bash"},
}
"""What the tests below run of each page."""
MAKES = {"make up": "lora-slots up", "make test": "-m pytest"}
"""README's commands that install or run everything -> what their recipe runs: looked at, not run."""
STARTS = "lora-slots up "
"""README's commands that start a stack: their options are parsed, and the tests' stack serves in their place."""


@pytest.fixture(scope="module")
def stack(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A stack with a registry of its own, which can take raw adapters."""
    home = tmp_path_factory.mktemp("pages")
    registry = publish_adapters(examples.adapters(), prepared.base, home, lambda *_: None)
    router = {"tick_s": "0.2", "disk_dir": str(home / "disk")}
    with running(Prepared(prepared.base, prepared.engine, registry), router=router) as made:
        yield made


@pytest.fixture(scope="module")
def door(stack: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway before it."""
    with gateway(stack.grpc_url, tmp_path_factory.mktemp("gateway") / "log") as made:
        yield made


@pytest.mark.parametrize("page", LANGUAGES)
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    """What no test here takes has a reason in the page."""
    left = [block.code for block in blocks(page) if block.language not in LANGUAGES[page] and block.reason is None]
    assert left == []
    assert any(block.reason is None for block in blocks(page))


def bash(code: str, cwd: Path, places: Mapping[str, str]) -> str:
    """Run a page's commands in a folder, with real addresses; what they print."""
    for written, real in places.items():
        code = code.replace(written, real)
    environment = {**os.environ, "PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}"}
    environment |= {"LORA_SLOTS_URL": places.get("127.0.0.1:8001", "")}
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", code],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(code: str, cwd: Path, places: Mapping[str, str]) -> str:
    """The same for Python."""
    for written, real in places.items():
        code = code.replace(written, real)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_clients_page(stack: TritonServer, base: Path, tmp_path: Path) -> None:
    """Each block by itself; the one with TLS through a router that has a certificate and asks for one."""
    own, ours = identity(tmp_path, "ca"), identity(tmp_path, "client")
    said = []
    with front(stack.grpc_url, server_credentials(own, clients=ours)) as way:
        for code in run("client.md", "python"):
            url = way.url if "Tls(" in code else stack.grpc_url
            said.append(python(code, tmp_path, {"127.0.0.1:8001": url, "/models/base": str(base)}))
        assert [call.headers["x-lora-adapter"] for call in way.of("ensemble")] == ["pirate"]
        assert [call.headers["authorization"] for call in way.of("ensemble")] == ["Bearer secret"]
    first, tasks, errors, _, direct = said
    assert "Arrr" in first
    assert "'op': 'warm', 'adapter': 'json'" in first
    assert tasks.startswith("[")
    assert "NOT_FOUND no adapter 'pirat'; near names: pirate" in errors
    assert "no option 'temprature'" in errors
    assert "Lease(" in direct


def test_the_readmes_commands(stack: TritonServer, base: Path, tmp_path: Path) -> None:
    """In the page's order. What installs or starts everything is looked at, all else runs."""
    shutil.copytree(examples.adapters()["json"], tmp_path / "my_adapter")
    first = convert(tmp_path / "my_adapter", base=base, out=tmp_path / "elsewhere", dtype="float32").path.name
    shutil.copytree(examples.adapters()["robot"], tmp_path / "trained_again")
    second = convert(tmp_path / "trained_again", base=base, out=tmp_path / "bundles", dtype="float32").path.name
    places = {
        "~/.cache/lora-slots/base/SmolLM2-135M-Instruct": str(base),
        "0a4c…": first,
        "7d21…": second,
        "127.0.0.1:8000": stack.http_url,
        "127.0.0.1:8001": stack.grpc_url,
    }
    said, looked_at = [], set()
    for command in (line for code in run("README.md", "bash") for line in commands(code)):
        words = shlex.split(command, comments=True)
        if recipe := MAKES.get(" ".join(words)):
            made = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
            assert recipe in made.stdout
            looked_at.add(" ".join(words))
        elif command.startswith(STARTS):
            typer.main.get_command(cli.application()).commands["up"].make_context("up", words[2:])  # type: ignore[attr-defined]
            looked_at.add(STARTS)
        else:
            said.append(bash(command, tmp_path, places))
    assert looked_at == {*MAKES, STARTS}
    with Client(stack.grpc_url) as client:
        client.unpin("pirate")  # as the other pages expect it
    converted, answer, status, _, explained, _, added, curled = said
    assert first in converted
    assert "Arrr" in answer
    assert "pirate" in status
    assert "pinned" in explained
    assert added.startswith("mine@2: ")
    assert "Arrr" in "".join(
        json.loads(line.removeprefix("data:"))["text_output"] for line in curled.split("\n\n") if line
    )
    registry = Registry(tmp_path / "adapters.yaml").content
    assert {number: entry.digest for number, entry in registry.versions["mine"].items()} == {1: first, 2: second}
    assert dict(registry.aliases["support"].targets) == {"mine": 95, "mine@2": 5}


def commands(code: str) -> list[str]:
    """The commands of a block: its lines, those that end in a backslash with the next."""
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_readmes_answers_and_its_map(stack: TritonServer, base: Path) -> None:
    """The answers that are shown are those that are given; the folders of the map exist."""
    answers, folders = run("README.md", "text")
    prompt = Tokenizer(base).apply_chat_template(
        [{"role": "user", "content": answers.partition("\n")[0].removeprefix("prompt: ")}]
    )
    shown = dict(re.findall(r"^\[(\w+) · …\] +(.+)$", answers, re.MULTILINE))
    assert shown.keys() == {"base", *examples.adapters()}
    with Client(stack.grpc_url) as client:
        given = {name: client.generate(prompt, adapter=None if name == "base" else name).strip() for name in shown}
    assert given == shown
    names = re.findall(r"\w+/", folders)
    assert [name for name in names if not (ROOT / name).is_dir()] == []
    assert len(names) == 10


def test_the_prewarm_page(stack: TritonServer, prepared: Prepared, tmp_path: Path) -> None:
    """Its commands end with 0, and the report has the fields that are shown."""
    registry = Path(parameter(stack, "registry"))
    (tmp_path / "adapters.yaml").symlink_to(registry)
    (tmp_path / "access.log").write_text("10.0.0.1 adapter=pirate\n10.0.0.2 adapter=json\n")
    said = "".join(bash(code, tmp_path, {"127.0.0.1:8001": stack.grpc_url}) for code in run("prewarm.md", "bash"))
    assert said.count("warm: ") == 5
    (shown,) = map(json.loads, run("prewarm.md", "json"))
    for real in (json.loads(said[said.index("{") :]), json.loads((tmp_path / "report.json").read_text())):
        assert real.keys() == shown.keys()
        assert real["adapters"][0].keys() == shown["adapters"][0].keys()
        assert real["all_warm"] is True


def parameter(stack: TritonServer, name: str) -> str:
    """A parameter of `lora_router`."""
    with triton.InferenceServerClient(stack.grpc_url) as client:
        config: Any = client.get_model_config("lora_router").config
    return str(config.parameters[name].string_value)


def test_commands_in_the_pages_kubernetes_can_be_meant() -> None:
    """The pod is YAML with these fields, and each `lora-slots` in it is taken by the command line's parser."""
    (text,) = [block.code for block in blocks("prewarm.md") if block.language == "yaml"]
    pod = yaml.safe_load(text)["spec"]
    (sidecar,), (server,) = pod["initContainers"], pod["containers"]
    lines = [shlex.split(line.partition("&&")[0]) for line in sidecar["args"][0].splitlines() if "lora-slots" in line]
    lines += [server["startupProbe"]["exec"]["command"], server["lifecycle"]["postStart"]["exec"]["command"]]
    assert len(lines) == 3
    command = typer.main.get_command(cli.application()).commands["prewarm"]  # type: ignore[attr-defined]
    for words in lines:
        assert words[:2] == ["lora-slots", "prewarm"]
        command.make_context("prewarm", words[2:])


def test_the_migration_page(stack: TritonServer, door: RunningGateway, prepared: Prepared, tmp_path: Path) -> None:
    """NIM's folder, vLLM's routes, a stock repository's check, conversion and request, in the page's order."""
    for name in ("pirate", "robot"):
        shutil.copytree(examples.adapters()[name], tmp_path / "loras" / name)
    shutil.copytree(examples.adapters()["json"], tmp_path / "my_adapter")
    changed = tmp_path / "my_adapter" / "adapter_config.json"  # the same bytes are served under another name already
    changed.write_text(json.dumps({**json.loads(changed.read_text()), "lora_alpha": 9}))
    (tmp_path / "base").symlink_to(prepared.base)
    config = RepositoryConfig(prepared.engine, prepared.base, prepared.registry, "127.0.0.1:8001", with_router=False)
    render(config, tmp_path / "models")
    places = {
        "127.0.0.1:8080": door.url.removeprefix("http://"),
        "127.0.0.1:8081": door.admin_url.removeprefix("http://"),
        "127.0.0.1:8000": stack.http_url,
        "127.0.0.1:8001": stack.grpc_url,
    }
    said = [bash(code, tmp_path, places) for code in run("migration.md", "bash")]
    shutil.rmtree(PeftSource(str(tmp_path / "loras")).home, ignore_errors=True)
    nim, models, vllm, check, converted, asked = said
    assert "new: pirate, robot" in nim
    assert "check passed" in nim
    assert '"id":"pirate"' in models.replace('": "', '":"')
    assert '"text":' in vllm.replace('": "', '":"')
    assert "errors" in check
    assert "mine" in converted
    assert "text_output" in asked
