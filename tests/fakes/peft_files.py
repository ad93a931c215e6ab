"""PEFT adapter directories made by hand, and what they mean: ΔW by the formula of PEFT, in float64.

Written without anything of peft_to_trtllm, so that a mistake there is not repeated here:

    ΔW = alpha / r * B @ A        (use_rslora: alpha / sqrt(r)), alpha and r by the patterns, first match in file order
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Tensors = dict[str, npt.NDArray[Any]]
Deltas = dict[tuple[int, str], Floats]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}

LLAMA_DIMS = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (16, 8),
    "self_attn.v_proj": (16, 8),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (16, 24),
    "mlp.up_proj": (16, 24),
    "mlp.down_proj": (24, 16),
}
LLAMA_MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
}
IDS = {
    0: "attn_qkv",
    1: "attn_q",
    2: "attn_k",
    3: "attn_v",
    4: "attn_dense",
    5: "mlp_h_to_4h",
    6: "mlp_4h_to_h",
    7: "mlp_gate",
    13: "moe_h_to_4h",
    14: "moe_4h_to_h",
    15: "moe_gate",
    16: "moe_router",
    18: "mlp_gate_up",
}
PREFIX = "base_model.model.model.layers."

_DTYPES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<u2": "BF16", "|u1": "U8", "|i1": "I8", "<i4": "I32"}


def pair(rng: np.random.Generator, rank: int, d_in: int, d_out: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Random A [r, in] and B [out, r], float32."""
    return (
        rng.standard_normal((rank, d_in)).astype(np.float32) * np.float32(0.3),
        rng.standard_normal((d_out, rank)).astype(np.float32) * np.float32(0.3),
    )


def llama_tensors(
    modules: Mapping[str, int] | None = None, *, layers: int = 2, seed: int = 0, prefix: str = PREFIX
) -> Tensors:
    """LoRA on some modules (leaf path -> rank) of every layer of the small Llama."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        for module, rank in (modules or {"self_attn.q_proj": 4, "self_attn.v_proj": 4}).items():
            a, b = pair(rng, rank, *LLAMA_DIMS[module])
            tensors[f"{prefix}{layer}.{module}.lora_A.weight"] = a
            tensors[f"{prefix}{layer}.{module}.lora_B.weight"] = b
    return tensors


def bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Values cut to bfloat16 bit patterns; written as BF16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def safetensors_bytes(tensors: Tensors) -> bytes:
    """A safetensors file."""
    header, blobs, at = {}, [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _DTYPES[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(blob)],
        }
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


def write_adapter(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None) -> Path:
    """An adapter directory; `config` is laid over a plain one, and a value of `...` takes the field away."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    full = {key: value for key, value in {**CONFIG, **(config or {})}.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(full))
    return folder


def write_base(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """A base directory with only a config.json, by default the small Llama's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or LLAMA))
    return folder


def scale_of(path: str, config: Mapping[str, Any]) -> float:
    """PEFT's scale of the module at `path` (without `base_model.model.`)."""

    def first(patterns: Mapping[str, Any], default: Any) -> Any:
        return next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", path)), default)

    full = {**CONFIG, **config}
    rank = first(full.get("rank_pattern") or {}, full["r"])
    alpha = first(full.get("alpha_pattern") or {}, full["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if full.get("use_rslora") else rank)


def values(array: npt.NDArray[Any]) -> Floats:
    """What a stored tensor means, float64; uint16 is bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def llama_deltas(tensors: Tensors, config: Mapping[str, Any] | None = None, *, prefix: str = PREFIX) -> Deltas:
    """ΔW of every (layer, TensorRT-LLM module) of an adapter with Llama's module names."""
    found = {}
    for key, a in tensors.items():
        if ".lora_A" not in key:
            continue
        path = key[: key.index(".lora_A")]
        b = tensors[key.replace("lora_A", "lora_B")]
        layer, _, leaf = path.removeprefix(prefix).partition(".")
        scale = scale_of(path.replace("base_model.model.", ""), config or {})
        found[int(layer), LLAMA_MODULES[leaf.rpartition(".")[2]]] = scale * (values(b) @ values(a))
    return found


def bundle_deltas(bundle: Any, dims: Mapping[str, tuple[int, int]], *, experts: int = 1) -> Deltas:
    """ΔW of every row of a bundle, rebuilt from its two arrays as the runtime reads them."""
    weights, config = values(np.array(bundle.weights()[0])), np.array(bundle.config()[0])
    found: Deltas = {}
    for row, (module_id, layer, rank, *_) in zip(weights, config.tolist(), strict=True):
        module = IDS[module_id]
        d_in, d_out = dims[module]
        n = experts if module.startswith("moe_") and module != "moe_router" else 1
        a = row[: n * rank * d_in].reshape(n, rank, d_in)
        b = row[n * rank * d_in : n * rank * (d_in + d_out)].reshape(n, d_out, rank)
        assert (layer, module) not in found
        assert not row[n * rank * (d_in + d_out) :].any() or len(config[0]) == 4
        found[layer, module] = b @ a if n > 1 else (b @ a)[0]
    return found


LLAMA_ROW_DIMS = {LLAMA_MODULES[leaf.rpartition(".")[2]]: size for leaf, size in LLAMA_DIMS.items()}
TOLERANCE = {"float32": 2e-7, "float16": 1e-3, "bfloat16": 8e-3}
"""Largest relative Frobenius error of one ΔW: two factors, each rounded once."""


def assert_same(found: Deltas, wanted: Deltas, dtype: str, sizes: Deltas | None = None) -> None:
    """Every ΔW is there, nothing else is, and each is within the type's rounding.

    `sizes` holds |s|·|B|·|A|, the measure for matrices so small that their terms may cancel.
    """
    assert found.keys() == wanted.keys()
    for key, delta in wanted.items():
        size = np.linalg.norm((sizes or wanted)[key])
        assert np.linalg.norm(found[key] - delta) <= TOLERANCE[dtype] * size, key
