"""What of experts is refused by name: DoRA on them, and layouts whose shapes would pass by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import LLAMA, PREFIX, Tensors, pair, safetensors_bytes, write_adapter, write_base

from peft_to_trtllm import inspect


def _base(family: str, inter: int) -> dict[str, Any]:
    return {**LLAMA, "model_type": family, "num_local_experts": 3, "intermediate_size": inter}


def _wrapped(inter: int) -> Tensors:
    """A down_proj of three experts, adapted through target_parameters with rank 4."""
    a, b = pair(np.random.default_rng(0), 12, inter, 16)
    path = f"{PREFIX}0.mlp.experts"
    return {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}


@pytest.mark.parametrize("family", ["llama4_text", "gpt_oss"])
@pytest.mark.parametrize("inter", [16, 24])
def test_transposed_experts(tmp_path: Path, family: str, inter: int) -> None:
    """A family that keeps its experts [E, in, out] is refused for that reason, square or not."""
    adapter = write_adapter(tmp_path / "a", _wrapped(inter))
    report = inspect(adapter, base=write_base(tmp_path / "b", _base(family, inter)), dtype="float32")
    assert set(report.problems.counts) == {"experts"}
    assert "[E, in, out]" in report.problems.kept[0].found


def test_a_layout_nobody_knows(refused: Any, converted: Any) -> None:
    """Neither parameter of an unknown family converts; of a known one it does."""
    assert refused(_wrapped(24), base_config=_base("of-the-future", 24)) == {"experts"}
    assert converted(_wrapped(24), base_config=_base("mixtral", 24)).config().tolist() == [[[14, 0, 4]]]


def test_a_layout_that_changed(refused: Any, converted: Any) -> None:
    """Where transformers turned a family round, shapes that would fit both ways are refused."""
    base = {**_base("qwen3_vl_moe_text", 24), "moe_intermediate_size": 16}
    assert refused(_wrapped(16), base_config=base) == {"experts"}
    assert converted(_wrapped(24), base_config=_base("qwen3_vl_moe_text", 24)).config().shape == (1, 1, 3)


@pytest.mark.parametrize("experts", [(0,), (0, 1)])
def test_dora_on_experts(tmp_path: Path, experts: tuple[int, ...]) -> None:
    """A magnitude of an expert is refused by name, whether one expert has it or all."""
    tensors: Tensors = {}
    weights = {}
    for expert in experts:
        path = f"{PREFIX}0.block_sparse_moe.experts.{expert}.w1"
        a, b = pair(np.random.default_rng(0), 4, 16, 24)
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        tensors |= {f"{path}.lora_magnitude_vector": np.ones(24, np.float32)}
        weights[f"{path.removeprefix('base_model.model.')}.weight"] = np.ones((24, 16), np.float32)
    base = write_base(tmp_path / "b", {**_base("mixtral", 24), "num_local_experts": 2})
    (base / "model.safetensors").write_bytes(safetensors_bytes(weights))
    adapter = write_adapter(tmp_path / "a", tensors, {"use_dora": True})
    report = inspect(adapter, base=base, base_weights=base, dtype="float32")
    assert set(report.problems.counts) == {"dora"}
    assert report.problems.kept[0].found == "DoRA on an expert"
