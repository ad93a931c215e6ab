"""Experts adapted through target_parameters, by hand: either way round by their widths, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import (
    LLAMA,
    PREFIX,
    Deltas,
    Tensors,
    assert_same,
    bundle_deltas,
    pair,
    safetensors_bytes,
    write_adapter,
    write_base,
)

from peft_to_trtllm import inspect

E, R, H = 3, 4, 16
NOW = {"peft_version": "0.21.2"}
DTYPES = ("float32", "float16", "bfloat16")


def _base(family: str, inter: int) -> dict[str, Any]:
    return {**LLAMA, "model_type": family, "num_local_experts": E, "intermediate_size": inter}


def _wrapped(x: int, y: int, wrapper: str = "experts", seed: int = 0) -> Tensors:
    """lora_A [E*r, x] and lora_B [y, r*E] of one wrapper."""
    a, b = pair(np.random.default_rng(seed), E * R, x, y)
    path = f"{PREFIX}0.mlp.{wrapper}"
    return {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}


def _deltas(tensors: Tensors, *, turned: bool, wrapper: str = "experts") -> Any:
    """ΔW [E, out, in] by PEFT's einsum, of the weight or of its transpose."""
    a = tensors[f"{PREFIX}0.mlp.{wrapper}.lora_A.weight"].astype(np.float64).reshape(E, R, -1)
    b = tensors[f"{PREFIX}0.mlp.{wrapper}.lora_B.weight"].astype(np.float64)
    b = b.reshape(b.shape[0], R, E)
    return 2.0 * np.einsum("ore,eri->eio" if turned else "ore,eri->eoi", b, a)


def _rows_of(gate_up: Any, *, interleaved: bool) -> Deltas:
    if interleaved:
        return {(0, "moe_h_to_4h"): gate_up[:, ::2], (0, "moe_gate"): gate_up[:, 1::2]}
    return {
        (0, "moe_h_to_4h"): gate_up[:, : gate_up.shape[1] // 2],
        (0, "moe_gate"): gate_up[:, gate_up.shape[1] // 2 :],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gpt_oss", "qwen3_vl_moe_text"])
def test_either_way_round(converted: Any, family: str, turned: bool, dtype: str) -> None:
    """The widths say which parameter it is and which way round; the rows are ΔW of the weight itself."""
    inter = 24
    gate_up = _wrapped(*((2 * inter, H) if turned else (H, 2 * inter)), "experts.base_layer")
    down = _wrapped(*((H, inter) if turned else (inter, H)), seed=1)
    wanted = _rows_of(_deltas(gate_up, turned=turned, wrapper="experts.base_layer"), interleaved=family == "gpt_oss")
    wanted[0, "moe_4h_to_h"] = _deltas(down, turned=turned)
    bundle = converted({**gate_up, **down}, base_config=_base(family, inter), dtype=dtype)
    dims = {"moe_h_to_4h": (H, inter), "moe_gate": (H, inter), "moe_4h_to_h": (inter, H)}
    assert_same(bundle_deltas(bundle, dims, experts=E), wanted, dtype)


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_square_parameter_goes_with_the_other(converted: Any, family: str, turned: bool) -> None:
    """Where a parameter's sides are equal, the other parameter of the file says which way round it is."""
    gate_up = _wrapped(*((2 * H, H) if turned else (H, 2 * H)), "experts.base_layer")
    down = _wrapped(H, H, seed=1)
    bundle = converted({**gate_up, **down}, base_config=_base(family, H))
    found = bundle_deltas(bundle, dict.fromkeys(("moe_h_to_4h", "moe_gate", "moe_4h_to_h"), (H, H)), experts=E)
    wanted: Deltas = {(0, "moe_4h_to_h"): _deltas(down, turned=turned)}
    assert_same({key: found[key] for key in wanted}, wanted, "float32")


@pytest.mark.parametrize(
    ("family", "config", "turned"),
    [("mixtral", NOW, False), ("llama4_text", NOW, True), ("llama4_text", {"peft_version": "0.19.1"}, True)],
)
def test_a_square_parameter_alone(converted: Any, family: str, config: dict[str, Any], turned: bool) -> None:
    """Alone it is as today's PEFT has it, if it is of today's PEFT."""
    down = _wrapped(H, H)
    bundle = converted(down, config, base_config=_base(family, H))
    found = bundle_deltas(bundle, {"moe_4h_to_h": (H, H)}, experts=E)
    assert_same(found, {(0, "moe_4h_to_h"): _deltas(down, turned=turned)}, "float32")


@pytest.mark.parametrize(
    ("family", "version"),
    [
        ("mixtral", None),
        ("mixtral", "0.18.0"),
        ("mixtral", "0.19.0"),
        ("mixtral", "of the future"),
        ("gpt_oss", "0.21.2"),
        ("qwen3_vl_moe_text", "0.21.2"),
    ],
)
def test_a_square_parameter_of_unknown_age(refused: Any, family: str, version: str | None) -> None:
    """Where versions differ and nothing in the file decides, the shapes that would pass by chance are refused."""
    config = {"peft_version": version} if version else {}
    assert refused(_wrapped(H, H), config, base_config=_base(family, H)) == {"experts"}
    square = {**_base(family, H // 2)}
    assert refused(_wrapped(H, H), config, base_config=square) == {"experts"}


def test_two_ways_in_a_file(refused: Any) -> None:
    """A square parameter between two that disagree is refused."""
    tensors: Tensors = {}
    for layer, sides in enumerate(((H, 2 * H), (2 * H, H))):
        wrapped = _wrapped(*sides, "experts.base_layer")
        tensors |= {key.replace("layers.0", f"layers.{layer}"): value for key, value in wrapped.items()}
    assert refused({**tensors, **_wrapped(H, H)}, NOW, base_config=_base("mixtral", H)) == {"experts"}


def test_a_layout_nobody_knows(refused: Any) -> None:
    """No parameter of an unknown family converts, whatever its shape."""
    assert refused(_wrapped(24, H), NOW, base_config=_base("of-the-future", 24)) == {"experts"}


def test_another_width(refused: Any) -> None:
    """A wrapper that is neither parameter, either way round, belongs to another base (or to a bias)."""
    assert refused(_wrapped(24, 24), NOW, base_config=_base("gpt_oss", 20)) == {"shape"}


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
