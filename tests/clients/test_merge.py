"""`lora-slots merge`: PEFT's own merge, written as a Hugging Face directory that answers like base plus adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lora_slots.base_model.tiny import make_tiny_llama
from lora_slots.cli import application
from lora_slots.merge import NOTE_FILE, merge_adapter
from lora_slots.refusals import Refused

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers and peft about each other


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base."""
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", seed=3)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter of it with weights that change answers."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(base))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter") / "mine"
    peft.get_peft_model(model, config).save_pretrained(str(folder))
    return folder


def logits(folder: Path, adapter: Path | None = None) -> Any:
    """Logits of a fixed prompt."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


@pytest.mark.oracle
def test_merged_equals_base_with_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    """The merged model's logits are those of base and adapter together, and not those of the base."""
    import torch

    out = merge_adapter(base, adapter, tmp_path / "merged")
    together = logits(base, adapter)
    assert torch.allclose(logits(out), together, atol=1e-5)
    assert not torch.allclose(logits(base), together, atol=1e-2)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (out / NOTE_FILE).is_file()


@pytest.mark.oracle
def test_the_command_prints_json(base: Path, adapter: Path, tmp_path: Path) -> None:
    """One document on stdout, whatever PEFT says beside it."""
    out = tmp_path / "merged"
    done = CliRunner().invoke(application(), ["merge", str(adapter), "--base", str(base), "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"path": str(out), "base": str(base), "adapter": str(adapter)}
    assert (out / NOTE_FILE).is_file()


@pytest.mark.oracle
def test_nothing_is_left_of_a_merge_that_failed(base: Path, adapter: Path, tmp_path: Path) -> None:
    """An adapter of another base is refused in one line, and no folder appears."""
    other = make_tiny_llama(tmp_path / "other", seed=4, hidden=32, heads=2, kv_heads=1)
    with pytest.raises(Refused, match="PEFT does not merge it"):
        merge_adapter(other, adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_every_reason_at_once(tmp_path: Path) -> None:
    """No base, no adapter, and a place that is taken: three lines, before torch is imported."""
    with pytest.raises(Refused) as caught:
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path)
    assert len(str(caught.value).splitlines()) == 3
