"""An up_proj is mlp_gate (7) in a gated MLP and mlp_h_to_4h (5) in an ungated one: known, or refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.peft_files import LLAMA, llama_tensors, write_adapter

from peft_to_trtllm import inspect
from trtllm_lora import EngineShape

UP = {"mlp.up_proj": 4, "mlp.down_proj": 4}
UNGATED = ("nemotron", "arcee", "apertus", "apertus1p5_text", "jais2")


@pytest.mark.parametrize("family", UNGATED)
def test_ungated_families(converted: Any, family: str) -> None:
    """The first matrix of an ungated MLP is mlp_h_to_4h."""
    bundle = converted(llama_tensors(UP, layers=1), base_config={**LLAMA, "model_type": family})
    assert bundle.config()[0, :, 0].tolist() == [5, 6]


@pytest.mark.parametrize("family", ["llama", "qwen2", "ministral3", "seed_oss", "llama4_text"])
def test_gated_families(converted: Any, family: str) -> None:
    """A family known to be gated needs no gate_proj in the file."""
    bundle = converted(llama_tensors(UP, layers=1), base_config={**LLAMA, "model_type": family})
    assert bundle.config()[0, :, 0].tolist() == [6, 7]


def test_a_gate_in_the_file_decides(converted: Any) -> None:
    """A gate_proj beside it says what up_proj is, whatever the family."""
    tensors = llama_tensors({"mlp.gate_proj": 4, **UP}, layers=1)
    bundle = converted(tensors, base_config={**LLAMA, "model_type": "of-the-future"})
    assert bundle.config()[0, :, 0].tolist() == [5, 6, 7]


def test_unknown_families_are_refused(refused: Any) -> None:
    """Without a gate_proj and without a known family nothing says which one it is."""
    tensors = llama_tensors(UP)
    assert refused(tensors, base_config={**LLAMA, "model_type": "of-the-future"}) == {"base-needed"}
    assert refused(tensors, base=None) == {"base-needed"}


@pytest.mark.parametrize(
    ("architecture", "module"),
    [("ArceeForCausalLM", 5), ("ApertusForCausalLM", 5), ("LlamaForCausalLM", 7), ("New", 0)],
)
def test_an_engine_alone(tmp_path: Path, architecture: str, module: int) -> None:
    """The engine's architecture decides where no base is given."""
    shape = EngineShape.from_hf_config(LLAMA, dtype="float32")
    config = dataclasses.replace(shape, max_lora_rank=8).to_engine_config()
    config["pretrained_config"]["architecture"] = architecture
    engine = tmp_path / "config.json"
    engine.write_text(json.dumps(config))
    report = inspect(write_adapter(tmp_path / "a", llama_tensors({"mlp.up_proj": 4}, layers=1)), engine=engine)
    if not module:
        assert set(report.problems.counts) == {"base-needed"}
    else:
        assert report.ok
        assert report.matches[0].rows == ({5: "mlp_h_to_4h", 7: "mlp_gate"}[module],)
