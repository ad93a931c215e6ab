"""DoRA with the base's weights: four columns, and the magnitude divided by the norm of W0 + s·B·A."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import LLAMA, PREFIX, Tensors, llama_tensors, safetensors_bytes, values, write_adapter, write_base

from peft_to_trtllm import AdapterRefused, InputError, convert

RNG = np.random.default_rng(9)
Q = f"{PREFIX}0.self_attn.q_proj"
W0 = RNG.standard_normal((16, 16)).astype(np.float32)
M = RNG.uniform(1, 2, 16).astype(np.float32)
TENSORS: Tensors = {**llama_tensors({"self_attn.q_proj": 4}, layers=1), f"{Q}.lora_magnitude_vector": M}
DORA = {"use_dora": True}


def base(folder: Path, tensors: Tensors | None = None, config: dict[str, Any] | None = None) -> Path:
    """A base directory with weights."""
    write_base(folder, config)
    weights = {"model.layers.0.self_attn.q_proj.weight": W0} if tensors is None else tensors
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    return folder


def test_the_magnitude_is_normalised(tmp_path: Path) -> None:
    """The row is A, s·B, m / ‖W0 + s·B·A‖, flagged in the fourth column."""
    there = base(tmp_path / "b")
    bundle = convert(
        write_adapter(tmp_path / "a", TENSORS, DORA),
        base=there,
        base_weights=there,
        out=tmp_path / "o",
        dtype="float32",
    )
    assert bundle.config().tolist() == [[[1, 0, 4, 1]]]
    row = values(np.array(bundle.weights()[0, 0]))
    delta = 2.0 * values(TENSORS[f"{Q}.lora_B.weight"]) @ values(TENSORS[f"{Q}.lora_A.weight"])
    assert row.size == 4 * 32 + 16
    np.testing.assert_allclose(row[-16:], M / np.linalg.norm(W0 + delta, axis=1), rtol=1e-6)
    np.testing.assert_allclose(row[64:128].reshape(16, 4) @ row[:64].reshape(4, 16), delta, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_same_on_every_machine(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a magnitude lies on the edge between two roundings, the last bits of a matrix product do not choose."""
    digits = {"float32": 24, "float16": 11, "bfloat16": 8}[dtype]
    delta = 2.0 * values(TENSORS[f"{Q}.lora_B.weight"]) @ values(TENSORS[f"{Q}.lora_A.weight"])
    edges = 1 + (2 * np.arange(16) + 1) * 2.0**-digits  # halfway between two neighbours of the type
    tensors = {**TENSORS, f"{Q}.lora_magnitude_vector": np.linalg.norm(W0 + delta, axis=1) * edges}
    there, adapter, norm = base(tmp_path / "b"), write_adapter(tmp_path / "a", tensors, DORA), np.linalg.norm
    digests = set()
    for wobble in (1 - 1e-14, 1.0, 1 + 1e-14):
        monkeypatch.setattr(np.linalg, "norm", lambda *a, w=wobble, **k: norm(*a, **k) * w)
        digests.add(convert(adapter, base=there, base_weights=there, out=tmp_path / "o", dtype=dtype).digest)
    assert len(digests) == 1


BAD: dict[str, tuple[Tensors, Tensors | None]] = {
    "a magnitude missing": ({k: v for k, v in TENSORS.items() if "magnitude" not in k}, None),
    "a magnitude of another length": ({**TENSORS, f"{Q}.lora_magnitude_vector": M[:8]}, None),
    "no such weight": (TENSORS, {"model.layers.0.self_attn.k_proj.weight": W0}),
    "a weight of another shape": (TENSORS, {"model.layers.0.self_attn.q_proj.weight": W0[:, :8]}),
    "a quantised weight": (TENSORS, {"model.layers.0.self_attn.q_proj.weight": W0.astype(np.int8)}),
    "two weights of that name": (
        TENSORS,
        {"model.layers.0.self_attn.q_proj.weight": W0, "language_model.model.layers.0.self_attn.q_proj.weight": W0},
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_refused(tmp_path: Path, kind: str) -> None:
    """Without the true base's weight and every magnitude there is no norm to divide by."""
    tensors, weights = BAD[kind]
    there = base(tmp_path / "b", weights)
    with pytest.raises(AdapterRefused) as caught:
        convert(
            write_adapter(tmp_path / "a", tensors, DORA),
            base=there,
            base_weights=there,
            out=tmp_path / "o",
            dtype="float32",
        )
    assert set(caught.value.report.problems.counts) == {"dora"}


def test_wrong_directory_is_an_input_error(tmp_path: Path) -> None:
    """A base directory without weights is the caller's mistake."""
    adapter = write_adapter(tmp_path / "a", TENSORS, DORA)
    for there in (write_base(tmp_path / "b"), tmp_path / "nowhere"):
        with pytest.raises(InputError, match="--base-weights"):
            convert(adapter, base_weights=there, out=tmp_path / "o", dtype="float32")


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")  # of peft and transformers about each other
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_it_is_pefts_dora(tmp_path: Path, model_type: str) -> None:
    """(W0 + s·B·A) scaled by our magnitude is the weight PEFT merges, fused Conv1D rows included."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**LLAMA, "num_key_value_heads": 4, "model_type": model_type, "n_embd": 16, "n_head": 4, "n_layer": 2}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "b")
    leaf = {"llama": "q_proj", "gpt2": "c_attn"}[model_type]
    lora = LoraConfig(
        r=4, target_modules=[leaf], use_dora=True, init_lora_weights=False, fan_in_fan_out=model_type == "gpt2"
    )
    peft: Any = get_peft_model(model, lora)
    for name, parameter in peft.named_parameters():
        if "magnitude" in name:
            parameter.data *= torch.rand_like(parameter) + 0.5
    peft.save_pretrained(tmp_path / "a")
    there = tmp_path / "b"
    bundle = convert(tmp_path / "a", base=there, base_weights=there, out=tmp_path / "o", dtype="float32")
    path = {"llama": "model.layers.1.self_attn.q_proj", "gpt2": "transformer.h.1.attn.c_attn"}[model_type]
    original = dict(peft.base_model.model.named_modules())[path].base_layer.weight.detach().numpy().copy()
    merged = dict(peft.merge_and_unload().named_modules())[path].weight.detach().numpy()
    if model_type == "gpt2":
        original, merged = original.T, merged.T
    table = bundle.config()[0].tolist()
    q = next(values(np.array(bundle.weights()[0, i])) for i, row in enumerate(table) if row[:2] == [1, 1])
    ours = (original[:16] + q[64:128].reshape(16, 4) @ q[:64].reshape(4, 16)) * q[128:144, None]
    np.testing.assert_allclose(ours, merged[:16], rtol=1e-4, atol=1e-6)
