"""docs/gateway.md: its commands and its Python run, against a gateway that listens where the page says it does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.gateways import RunningGateway

from lora_slots.gateway.tenants import read_tenants

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    """The page's code in a language."""
    return [found[2] for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8")) if found[1] == language]


@pytest.mark.triton
def test_the_python_runs(door: RunningGateway) -> None:
    """OpenAI's client as the page shows it."""
    (code,) = blocks("python")
    ran = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8080", door.url)],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "'pirate'" in ran.stdout
    assert "Arrr" in ran.stdout
    assert "model_not_found" in ran.stdout


@pytest.mark.triton
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_commands_run(door: RunningGateway) -> None:
    """curl, whole and streamed."""
    whole, streamed = (
        subprocess.run(
            ["bash", "-c", code.replace("http://127.0.0.1:8080", door.url)],  # noqa: S607
            check=True, capture_output=True, text=True, timeout=120,
        ).stdout
        for code in blocks("bash")
    )  # fmt: skip
    assert '"finish_reason":"stop"' in whole
    assert streamed.endswith("data: [DONE]\n\n")


def test_the_tenants_file_is_a_good_one(tmp_path: Path) -> None:
    """The page's example, with whole hashes."""
    (text,) = blocks("yaml")
    file = tmp_path / "tenants.yaml"
    file.write_text(re.sub(r"sha256: \w+…", f"sha256: {'a' * 64}", text))
    assert read_tenants(file).tenants["acme"].adapters == ["acme-*", "pirate"]
