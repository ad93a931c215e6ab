"""The little model's golden answers belong to what fakes.little makes, and transformers with peft still gives them."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from fakes import little

from trtllm_lora.files import sha256_of

GOLDEN = little.golden()


def test_they_were_made_from_these_weights(tmp_path: Path) -> None:
    """Base and every adapter have the bytes they had then."""
    found = {
        name: sha256_of(path / "adapter_model.safetensors")
        for name, path in little.make_adapters(tmp_path, GOLDEN["seeds"]).items()
    }
    assert {"base": sha256_of(little.make_base(tmp_path) / "model.safetensors"), **found} == GOLDEN["sha256"]


@pytest.mark.parametrize("entries", ["answers", "variants"])
def test_no_two_begin_alike(entries: str) -> None:
    """Answers of base and adapters to one prompt differ within twelve tokens: a mixed-up adapter cannot pass."""
    begun = [(entry["prompt"], tuple(entry["tokens"][:12])) for entry in GOLDEN[entries]]
    assert len(set(begun)) == len(begun)


def make_little() -> Any:
    """The script beside this file, as a module."""
    spec = importlib.util.spec_from_file_location("make_little", Path(__file__).with_name("make_little.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_transformers_and_peft_still_say_so(tmp_path: Path) -> None:
    """The script writes the same file again."""
    assert make_little().answers(tmp_path) == GOLDEN
