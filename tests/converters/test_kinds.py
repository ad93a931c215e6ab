"""The kinds of adapters that convert, each made here by hand and held to PEFT's formula in float64, in every type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.peft_files import (
    LLAMA,
    LLAMA_DIMS,
    LLAMA_ROW_DIMS,
    PREFIX,
    Deltas,
    Tensors,
    assert_same,
    bfloat16,
    bundle_deltas,
    llama_deltas,
    llama_tensors,
    pair,
)

DTYPES = ("float32", "float16", "bfloat16")
ALL_SEVEN = dict.fromkeys(LLAMA_DIMS, 4)
MIXED_RANKS = {"self_attn.q_proj": 2, "self_attn.v_proj": 8, "mlp.down_proj": 4}
WIDE = {**LLAMA, "head_dim": 8, "num_key_value_heads": 1}

PLAIN: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "the commonest": (llama_tensors(), {}),
    "all seven": (llama_tensors(ALL_SEVEN), {}),
    "scale no power of two": (llama_tensors(), {"lora_alpha": 11.5}),
    "negative alpha": (llama_tensors(), {"lora_alpha": -3}),
    "rank above the width": (llama_tensors({"self_attn.k_proj": 40}), {"r": 40}),
    "rsLoRA": (llama_tensors(), {"use_rslora": True}),
    "rank and alpha patterns": (
        llama_tensors(MIXED_RANKS),
        {"rank_pattern": {"q_proj": 2, r"layers\.\d+\.self_attn\.v_proj": 8}, "alpha_pattern": {"down_proj": 3.5}},
    ),
    "first match in file order": (
        llama_tensors(),
        {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 32, "q_proj": 4}},
    ),
    "rsLoRA with patterns": (
        llama_tensors({"self_attn.q_proj": 2}),
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    ),
    "one layer only": ({k: v for k, v in llama_tensors().items() if ".1." in k}, {"layers_to_transform": [1]}),
    "float16 on disk": ({k: v.astype(np.float16) for k, v in llama_tensors().items()}, {}),
    "bfloat16 on disk": ({k: bfloat16(v) for k, v in llama_tensors().items()}, {"lora_alpha": 5}),
    "float64 on disk": ({k: v.astype(np.float64) for k, v in llama_tensors().items()}, {}),
    "A and B of different types": (
        {k: bfloat16(v) if "lora_B" in k else v for k, v in llama_tensors().items()},
        {"lora_alpha": 7},
    ),
    "file in another order": (dict(reversed(llama_tensors(ALL_SEVEN).items())), {}),
    "an init that leaves the base alone": (llama_tensors(), {"init_lora_weights": "gaussian"}),
    "VeLoRA's extra tensor": (
        {**llama_tensors(), f"{PREFIX}0.self_attn.q_proj.lora_velora_embed": np.ones(4, np.float32)},
        {"velora_config": {"x": 1}},
    ),
    "a lora_B.bias of zeros": (
        {
            **llama_tensors({"self_attn.q_proj": 4}, layers=1),
            f"{PREFIX}0.self_attn.q_proj.lora_B.bias": np.zeros(16, np.float32),
        },
        {"lora_bias": True},
    ),
    "a lora_B.bias of negative zeros in bfloat16": (
        {
            **llama_tensors({"self_attn.q_proj": 4}, layers=1),
            f"{PREFIX}0.self_attn.q_proj.lora_B.bias": np.full(16, 0x8000, np.uint16),
        },
        {"lora_bias": True},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_kinds(converted: Any, kind: str, dtype: str) -> None:
    """ΔW rebuilt from the rows is PEFT's, within one rounding of each factor."""
    tensors, config = PLAIN[kind]
    bundle = converted(tensors, config, dtype=dtype)
    assert_same(bundle_deltas(bundle, LLAMA_ROW_DIMS), llama_deltas(tensors, config), dtype)


@pytest.mark.parametrize(
    ("spelled", "prefix"),
    [
        ("base_model.model.base_model.model.model.layers.", None),
        ("model.layers.", None),
        ("base_model.model._orig_mod.model.layers.", None),
        ("base_model.model.model._fsdp_wrapped_module.layers.", None),
        ("module.base_model.model.model.layers.", None),
        ("base_model.model.model.language_model.layers.", None),
        ("base_model.model.language_model.model.layers.", None),
        ("base_model.model.model.language_model.model.layers.", None),
        ("base_model.model.llm.model.layers.", None),
        ("base_model.model.thinker.model.layers.", None),
    ],
)
def test_prefixes(converted: Any, spelled: str, prefix: None) -> None:
    """The same matrices under every known spelling of the prefix are the same adapter."""
    tensors = llama_tensors(prefix=spelled)
    assert_same(bundle_deltas(converted(tensors), LLAMA_ROW_DIMS), llama_deltas(llama_tensors()), "float32")


@pytest.mark.parametrize("infix", ["default", "pirate", "weight", "lora", "default.default"])
def test_adapter_name_inside_the_key(converted: Any, infix: str) -> None:
    """A key that carries the adapter's name (`lora_A.default.weight`) means the same."""
    tensors = {key.replace(".weight", f".{infix}.weight"): value for key, value in llama_tensors().items()}
    assert_same(bundle_deltas(converted(tensors), LLAMA_ROW_DIMS), llama_deltas(llama_tensors()), "float32")


def test_heads_wider_than_the_hidden_size(converted: Any) -> None:
    """q is hidden -> heads x head_dim and o the way back, whatever their ratio."""
    rng = np.random.default_rng(1)
    dims = {"q_proj": (16, 32), "k_proj": (16, 8), "o_proj": (32, 16)}
    tensors = {}
    for leaf, (d_in, d_out) in dims.items():
        a, b = pair(rng, 4, d_in, d_out)
        tensors[f"{PREFIX}0.self_attn.{leaf}.lora_A.weight"] = a
        tensors[f"{PREFIX}0.self_attn.{leaf}.lora_B.weight"] = b
    row_dims = {"attn_q": (16, 32), "attn_k": (16, 8), "attn_dense": (32, 16)}
    bundle = converted(tensors, base_config=WIDE)
    assert_same(bundle_deltas(bundle, row_dims), llama_deltas(tensors), "float32")


def _fused(kind: str, order: list[int], base: dict[str, Any], key: str) -> tuple[Tensors, dict[str, Any], Deltas]:
    """A fused leaf whose row i belongs to row order[i] of the matrices stacked [q; k; v] (or [gate; up])."""
    rng = np.random.default_rng(3)
    a, b = pair(rng, 4, 16, len(order))
    stacked = np.empty_like(b)
    stacked[order] = b
    delta = 2.0 * stacked.astype(np.float64) @ a.astype(np.float64)
    parts = {"qkv": ("attn_q", "attn_k", "attn_v"), "gate_up": ("mlp_h_to_4h", "mlp_gate")}[kind]
    sizes = [16, 8, 8] if base.get("num_key_value_heads", 4) == 2 else [16, 16, 16]
    sizes = sizes if kind == "qkv" else [24, 24]
    cuts = np.split(delta, np.cumsum(sizes)[:-1])
    path = f"base_model.model.{key}"
    return (
        {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b},
        base,
        {(0, part): cut for part, cut in zip(parts, cuts, strict=True)},
    )


def _per_head(heads: int = 4, size: int = 4) -> list[int]:
    """q, k, v of each head in turn."""
    q, k, v = (np.arange(heads * size).reshape(heads, size) + i * heads * size for i in range(3))
    return [int(row) for row in np.stack([q, k, v], axis=1).reshape(-1)]


def _per_group() -> list[int]:
    """Two queries, key, value of each of two kv heads in turn."""
    q, k, v = np.arange(16).reshape(2, 8), 16 + np.arange(8).reshape(2, 4), 24 + np.arange(8).reshape(2, 4)
    return [int(row) for row in np.concatenate([q, k, v], axis=1).reshape(-1)]


_MHA = {**LLAMA, "num_key_value_heads": 4}
_FALCON = {
    "model_type": "falcon",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
}
FUSED = {
    "phi3 qkv": _fused("qkv", list(range(32)), {**LLAMA, "model_type": "phi3"}, "model.layers.0.self_attn.qkv_proj"),
    "phi3 gate_up": _fused(
        "gate_up", list(range(48)), {**LLAMA, "model_type": "phi3"}, "model.layers.0.mlp.gate_up_proj"
    ),
    "gpt2": _fused("qkv", list(range(48)), {**_MHA, "model_type": "gpt2"}, "transformer.h.0.attn.c_attn"),
    "neox": _fused(
        "qkv", _per_head(), {**_MHA, "model_type": "gpt_neox"}, "gpt_neox.layers.0.attention.query_key_value"
    ),
    "bloom": _fused(
        "qkv", _per_head(), {**_MHA, "model_type": "bloom"}, "transformer.h.0.self_attention.query_key_value"
    ),
    "falcon rw": _fused(
        "qkv", _per_head(), {**_FALCON, "multi_query": False}, "transformer.h.0.self_attention.query_key_value"
    ),
    "falcon 40b": _fused(
        "qkv",
        _per_group(),
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_key_value_heads": 2},
        "transformer.h.0.self_attention.query_key_value",
    ),
    "internlm2": _fused("qkv", _per_group(), {**LLAMA, "model_type": "internlm2"}, "model.layers.0.attention.wqkv"),
    "chatglm": _fused(
        "qkv",
        list(range(32)),
        {**LLAMA, "model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2},
        "transformer.encoder.layers.0.self_attention.query_key_value",
    ),
    "chatglm gate_up": _fused(
        "gate_up",
        list(range(48)),
        {**LLAMA, "model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2},
        "transformer.encoder.layers.0.mlp.dense_h_to_4h",
    ),
    "baichuan": _fused("qkv", list(range(48)), {**_MHA, "model_type": "baichuan"}, "model.layers.0.self_attn.W_pack"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FUSED)
def test_fused_leaves(converted: Any, kind: str, dtype: str) -> None:
    """A fused matrix is cut by the row order of its family, and every part keeps the one A."""
    tensors, base, wanted = FUSED[kind]
    sizes = {module: (16, delta.shape[0]) for (_, module), delta in wanted.items()}
    assert_same(bundle_deltas(converted(tensors, base_config=base, dtype=dtype), sizes), wanted, dtype)


def test_experts_one_by_one(converted: Any) -> None:
    """Per-expert keys become one row per layer with every expert stacked; an expert without LoRA changes nothing."""
    rng = np.random.default_rng(5)
    tensors: Tensors = {}
    wanted = {
        key: np.zeros(shape) for key, shape in (((0, "moe_h_to_4h"), (3, 24, 16)), ((0, "moe_4h_to_h"), (3, 16, 24)))
    }
    for expert in (0, 2):
        for leaf, module, d_in, d_out in (("w1", "moe_h_to_4h", 16, 24), ("w2", "moe_4h_to_h", 24, 16)):
            a, b = pair(rng, 4, d_in, d_out)
            path = f"{PREFIX}0.block_sparse_moe.experts.{expert}.{leaf}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
            wanted[0, module][expert] = 2.0 * b.astype(np.float64) @ a.astype(np.float64)
    base = {**LLAMA, "model_type": "mixtral", "num_local_experts": 3}
    dims = {"moe_h_to_4h": (16, 24), "moe_4h_to_h": (24, 16)}
    found = bundle_deltas(converted(tensors, base_config=base), dims, experts=3)
    assert_same(found, wanted, "float32")


def test_block_diagonal_lora(converted: Any) -> None:
    """BD-LoRA's stored row chunks are the blocks of a block-diagonal factor."""
    rng = np.random.default_rng(6)
    a_q, b_q = pair(rng, 4, 8, 16)  # A of q_proj: two blocks of [2, 8]
    a_o, b_o = pair(rng, 4, 16, 16)
    b_o = b_o[:, :2]  # B of o_proj: two blocks of [8, 2]
    path = f"{PREFIX}0.self_attn."
    tensors = {
        f"{path}q_proj.lora_A.weight": a_q,
        f"{path}q_proj.lora_B.weight": b_q,
        f"{path}o_proj.lora_A.weight": a_o,
        f"{path}o_proj.lora_B.weight": np.ascontiguousarray(b_o),
    }
    full_a = np.zeros((4, 16))
    full_a[:2, :8], full_a[2:, 8:] = a_q[:2], a_q[2:]
    full_b = np.zeros((16, 4))
    full_b[:8, :2], full_b[8:, 2:] = b_o[:8], b_o[8:]
    wanted = {(0, "attn_q"): 2.0 * b_q.astype(float) @ full_a, (0, "attn_dense"): 2.0 * full_b @ a_o.astype(float)}
    config = {"use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["o_proj"], "nblocks": 2}}
    assert_same(bundle_deltas(converted(tensors, config), LLAMA_ROW_DIMS), wanted, "float32")


def test_qalora_by_shape(converted: Any) -> None:
    """QALoRA's narrow A stands for groups of inputs where it is narrow, and for itself where it is not."""
    rng = np.random.default_rng(7)
    a, b = pair(rng, 4, 4, 16)
    tensors = llama_tensors({"self_attn.v_proj": 4}, layers=1)
    wanted = llama_deltas(tensors)
    tensors |= {f"{PREFIX}0.self_attn.q_proj.lora_A.weight": a, f"{PREFIX}0.self_attn.q_proj.lora_B.weight": b}
    # x averaged over groups of 4 and multiplied by in/g = 4: each input weighs A[:, i // 4] * 4 / 4
    wanted[0, "attn_q"] = 2.0 * b.astype(float) @ np.repeat(a.astype(float), 4, axis=1)
    config = {"use_qalora": True, "qalora_group_size": 4}
    assert_same(bundle_deltas(converted(tensors, config), LLAMA_ROW_DIMS), wanted, "float32")


def test_without_a_base(converted: Any, tmp_path: Any) -> None:
    """Llama's module names need no base, only a type."""
    from fakes.peft_files import write_adapter

    from peft_to_trtllm import convert

    tensors = llama_tensors(ALL_SEVEN)
    bundle = convert(write_adapter(tmp_path / "a", tensors), out=tmp_path / "o", dtype="float16")
    assert_same(bundle_deltas(bundle, LLAMA_ROW_DIMS), llama_deltas(tensors), "float16")


def test_sizes_that_differ_per_layer(converted: Any) -> None:
    """Nemotron-NAS: kv heads and intermediate size are each layer's own."""
    rng = np.random.default_rng(8)
    blocks = [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 16}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 48}},
    ]
    base = {**LLAMA, "model_type": "nemotron-nas", "intermediate_size": None, "num_key_value_heads": None}
    tensors: Tensors = {}
    for layer, (kv, inter) in enumerate(((8, 256), (4, 512))):
        for leaf, d_in, d_out in (("self_attn.k_proj", 16, kv), ("mlp.down_proj", inter, 16)):
            a, b = pair(rng, 4, d_in, d_out)
            tensors |= {f"{PREFIX}{layer}.{leaf}.lora_A.weight": a, f"{PREFIX}{layer}.{leaf}.lora_B.weight": b}
    bundle = converted(tensors, base_config={**base, "block_configs": blocks})
    wanted = llama_deltas(tensors)
    for number, (layer, kv, inter) in enumerate(((0, 8, 256), (1, 4, 512))):
        row = bundle.weights()[0, 2 * number]
        delta = row[64 : 64 + 4 * kv].reshape(kv, 4) @ row[:64].reshape(4, 16)
        np.testing.assert_allclose(delta, wanted[layer, "attn_k"], rtol=1e-4, atol=1e-6)
        row = bundle.weights()[0, 2 * number + 1]
        delta = row[4 * inter : 4 * inter + 64].reshape(16, 4) @ row[: 4 * inter].reshape(4, inter)
        np.testing.assert_allclose(delta, wanted[layer, "mlp_4h_to_h"], rtol=1e-4, atol=1e-6)
