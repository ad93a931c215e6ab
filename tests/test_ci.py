"""CI as shipped: scripts that refuse politely, workflows made of commands that exist, jobs that do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import trtllm_tools
from fakes.peft_files import LLAMA, llama_tensors, write_adapter, write_base

from trtllm_lora import EngineShape

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def script(*words: str | Path, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of ci/ with our commands on PATH, or on a PATH of the test's own."""
    return subprocess.run(
        list(map(str, words)),
        cwd=ROOT,
        env={**os.environ, "PATH": path or f"{BIN}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
    )


def machine(folder: Path, programs: Mapping[str, str]) -> str:
    """PATH of a machine that has the usual tools and some programs that answer one thing."""
    folder.mkdir(exist_ok=True)
    for name in ("sh", "basename", "cat", "dirname", "grep", "tail"):
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "python3").symlink_to(Path(sys.executable).resolve())  # what `python3` is here may be a shim
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("name", ["build", "accept.sh"])
@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({}, "no nvidia-smi here"),
        ({"nvidia-smi": "exit 9"}, "nvidia-smi lists no GPU"),
        ({"nvidia-smi": "echo GPU 0: X"}, "no trtllm-build here: this is not the NGC image"),
        ({"nvidia-smi": "echo GPU 0: X", "trtllm-build": ""}, "no tritonserver here"),
        (
            {"nvidia-smi": "echo GPU 0: X", "trtllm-build": "", "tritonserver": ""},
            "TensorRT-LLM is missing; engines need 1.0 to 1.2",
        ),
    ],
)
def test_gpu_scripts_refuse_politely(tmp_path: Path, name: str, there: Mapping[str, str], says: str) -> None:
    """Without a GPU, or outside of the image: what is missing, what runs anywhere; exit code 69, nothing written."""
    before = set(ROOT.iterdir())
    done = script("/bin/sh", f"ci/gpu/{name}", path=machine(tmp_path / "tools", there))
    assert done.returncode == 69, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith(f"{name}: {says}")
    assert "--dry-run" in rest[-1]
    assert done.stdout == ""
    assert set(ROOT.iterdir()) == before


def test_gpu_scripts_refuse_a_version_without_engines(tmp_path: Path) -> None:
    """TensorRT-LLM 1.3 has no engine backend: refused with the version that was found."""
    environment = trtllm_tools.install(tmp_path)
    (tmp_path / "library" / "tensorrt_llm" / "__init__.py").write_text('__version__ = "1.3.0"\n')
    there = {"nvidia-smi": "echo GPU 0: X", "trtllm-build": "", "tritonserver": ""}
    path = machine(tmp_path / "tools", there)
    done = script("/bin/sh", "ci/gpu/build", path=path, PYTHONPATH=environment["PYTHONPATH"])
    assert (done.returncode, done.stderr.splitlines()[0]) == (69, "build: TensorRT-LLM 1.3.0; engines need 1.0 to 1.2")


def called() -> Iterator[tuple[str, ...]]:
    """Every `lora-slots …` of the workflows and shell scripts: its words as far as they could be names of commands."""
    scripts = [path for path in (ROOT / "ci").rglob("*") if path.is_file() and path.suffix in ("", ".sh")]
    for file in [*WORKFLOWS, *scripts]:
        code = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith(("#", "echo")))
        for found in re.findall(r"(?<![\w/-])lora-slots((?: [a-z][a-z-]*)+)", code):
            yield tuple(found.split())


def offered(*group: str) -> set[str]:
    """Names of commands in the help of the command line, or of a group."""
    told = script(BIN / "lora-slots", *group, "--help").stdout
    return set(re.findall(r"^│ ([a-z][a-z-]*) ", told, re.MULTILINE))


def test_workflows_and_scripts_call_commands_that_exist() -> None:
    """Each command is one of the command line, and each script is there and can be run."""
    asked = {words[:2] for words in called()}
    assert {words[0] for words in asked} <= offered()
    groups = {"adapters", "bundle", "engine", "repo", "slots"}
    for group in groups & {words[0] for words in asked}:
        assert {words[1] for words in asked if words[0] == group} <= offered(group), group
    assert len(asked) > 12
    for file in WORKFLOWS:
        for name in re.findall(r"(?<![\w/.])(ci/[\w/.-]+\w)(?=[\s\"])", file.read_text()):
            wanted = os.R_OK if f"bash {name}" in file.read_text() else os.X_OK
            assert os.access(ROOT / name, wanted), (file.name, name)


def test_every_job_has_a_limit_and_least_rights() -> None:
    """No job runs without a time limit, and no workflow may write to the repository."""
    jobs = 0
    for file in WORKFLOWS:
        data: dict[Any, Any] = yaml.safe_load(file.read_text())
        assert data["permissions"] == {"contents": "read"}, file.name
        for name, job in data["jobs"].items():
            jobs += 1
            assert job["timeout-minutes"] <= 360, (file.name, name)
    assert jobs == 6


def test_a_refused_adapter_publishes_nothing(tmp_path: Path) -> None:
    """One bad adapter among good ones: the reason, exit code 2, and no word to the store (which is not there)."""
    base, engine = write_base(tmp_path / "base"), tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(
        json.dumps(EngineShape.from_hf_config(LLAMA, dtype="float16").to_engine_config())
    )
    good = write_adapter(tmp_path / "good", llama_tensors())
    bad = write_adapter(tmp_path / "bad", llama_tensors(), {"peft_type": "LOHA"})
    done = script(
        "ci/publish-adapters", base, engine, "s3://nowhere/models", good, bad, AWS_ENDPOINT_URL="http://127.0.0.1:9"
    )
    assert done.returncode == 2, done.stderr
    assert "LOHA" in done.stderr
    assert "bundle publish" not in done.stderr
    assert done.stdout == ""


@pytest.mark.triton
def test_the_small_rehearsal() -> None:
    """`make ci-rehearsal` in its small form: a real S3, a real Triton, a canary promoted and one taken back."""
    done = script(sys.executable, "ci/rehearse.py", "--small")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("OK: ")] == [
        "OK: each adapter has a version 1",
        "OK: pirate@2 is current, and has all of the alias",
        "OK: the canary was taken back: pirate@2 is as it was",
        "OK: behind the alias still speaks a pirate",
    ]
