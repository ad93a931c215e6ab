"""Combinations of families and config fields, each trained by PEFT itself: ΔW as PEFT has it in float64, or why not.

What PEFT's modules hold is taken apart here by rules of this file alone, so that a mistake of the converter is not
repeated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import Deltas, assert_same, bundle_deltas
from fakes.peft_trained import model_of, trained

from peft_to_trtllm import AdapterRefused, convert

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {"model_type": "llama", **BASE}
PHI3 = {"model_type": "phi3", **BASE}
NEOX = {"model_type": "gpt_neox", **BASE}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48}
MIXTRAL = {"model_type": "mixtral", **BASE, "num_local_experts": 3, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe", **BASE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LLAMA4 = {
    "model_type": "llama4_text", **BASE, "num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 40,
    "intermediate_size_mlp": 48, "head_dim": 8, "interleave_moe_layer_step": 1,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", **BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40,
    "head_dim": 8, "layer_types": ["full_attention"] * 3,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": 4,
          "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}  # fmt: skip

PLAIN = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_dense", "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate", "down_proj": "mlp_4h_to_h", "attn.c_proj": "attn_dense", "c_fc": "mlp_h_to_4h",
    "mlp.c_proj": "mlp_4h_to_h", "dense": "attn_dense", "dense_h_to_4h": "mlp_h_to_4h", "dense_4h_to_h": "mlp_4h_to_h",
    "gate": "moe_router",
}  # fmt: skip
QKV, MLP = ("attn_q", "attn_k", "attn_v"), ("mlp_h_to_4h", "mlp_gate")
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def block_diagonal(a: list[str], b: list[str], **more: Any) -> Any:
    """The config of BD-LoRA."""
    from peft.tuners.lora.config import BdLoraConfig

    return BdLoraConfig(target_modules_bd_a=a, target_modules_bd_b=b, nblocks=2, **more)


CONVERTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rsLoRA with patterns": (
        LLAMA,
        {"target_modules": SEVEN, "use_rslora": True, "rank_pattern": {"q_proj": 2, r"layers\.[02]\.mlp\.down_proj": 6},
         "alpha_pattern": {"q_proj": 3, r".*\.1\..*": 20}},
    ),
    "patterns with an anchor": (
        LLAMA,
        {"target_modules": SEVEN,
         "rank_pattern": {r"^model\.layers\.1\.self_attn\.q_proj": 3, r"self_attn\.(q|k)_proj": 5},
         "alpha_pattern": {"^model.layers.2": 99, "^layers.1.*": 7, "o_proj": 1.5}},
    ),
    "a dot that is a regex": (LLAMA, {"target_modules": SEVEN, "alpha_pattern": {"self.attn.q_proj": 32, "mlp": 77}}),
    "patterns in the order of the file": (
        LLAMA,
        {"target_modules": SEVEN[:2], "alpha_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 32, ".*_proj": 64}},
    ),
    "layers of a pattern": (
        LLAMA,
        {"target_modules": SEVEN, "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    ),
    "excluded by tail": (
        LLAMA, {"target_modules": SEVEN, "exclude_modules": ["layers.1.self_attn.q_proj", "down_proj"]}
    ),
    "excluded by regex": (LLAMA, {"target_modules": "all-linear", "exclude_modules": r".*\.1\.mlp\..*"}),
    "tied embeddings": ({**LLAMA, "tie_word_embeddings": True}, {"target_modules": "all-linear"}),
    "wide heads": ({**LLAMA, "model_type": "qwen3", "head_dim": 16}, {"target_modules": SEVEN, "lora_alpha": 3}),
    "MiCA": (LLAMA, {"target_modules": ["q_proj"], "init_lora_weights": "mica"}),
    "EVA without data": (LLAMA, {"target_modules": ["q_proj"], "init_lora_weights": "eva"}),
    "blocks by a part of the path": (
        LLAMA,
        {"target_modules": ["q_proj", "o_proj", "down_proj"],
         "use_bdlora": lambda: block_diagonal(["self_attn"], ["mlp"])},
    ),
    "blocks in one layer": (
        LLAMA,
        {"target_modules": ["q_proj"], "use_bdlora": lambda: block_diagonal(["layers.1."], [], match_strict=False)},
    ),
    "blocks of fused rows": (
        PHI3,
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"qkv_proj": 8},
         "use_bdlora": lambda: block_diagonal(["o_proj", "down_proj"], ["qkv_proj", "gate_up_proj"])},
    ),
    "fused rows with patterns": (
        PHI3,
        {"target_modules": "all-linear", "rank_pattern": {"qkv_proj": 6}, "alpha_pattern": {"gate_up_proj": 3}},
    ),
    "rows interleaved by head": (NEOX, {"target_modules": "all-linear", "use_rslora": True}),
    "Conv1D": (
        GPT2,
        {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True,
         "alpha_pattern": {"attn.c_proj": 5, "mlp.c_proj": 9}},
    ),
    "parameters of Conv1D, turned": (
        GPT2,
        {"target_modules": [], "target_parameters": ["c_attn.weight", "c_proj.weight", "c_fc.weight"],
         "alpha_pattern": {"c_fc.weight": 3}},
    ),
    "parameters of linear layers": (
        LLAMA,
        {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "mlp.down_proj.weight"],
         "rank_pattern": {"q_proj.weight": 2, "down_proj": 3}},
    ),
    "experts and their router": (
        MIXTRAL,
        {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"], "use_rslora": True},
    ),
    "a square down_proj": (
        {**MIXTRAL, "intermediate_size": 32}, {"target_modules": [], "target_parameters": EXPERTS[1:]}
    ),
    "a square gate_up_proj": (
        {**MIXTRAL, "intermediate_size": 16}, {"target_modules": [], "target_parameters": EXPERTS}
    ),
    "experts of their own size": (
        QWEN3_MOE,
        {"target_modules": ["o_proj"], "target_parameters": EXPERTS, "alpha_pattern": {r".*experts\.down_proj": 3}},
    ),
    "experts stored the other way": (
        LLAMA4, {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "alpha_pattern": {"gate_up_proj": 5}}
    ),
    "experts stored the other way, square": (
        {**LLAMA4, "intermediate_size": 32}, {"target_modules": [], "target_parameters": EXPERTS[1:]}
    ),
    "experts with gate and up in turn": (
        GPT_OSS, {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "rank_pattern": {"down_proj": 2}}
    ),
    "experts with gate and up in turn, square": (
        {**GPT_OSS, "intermediate_size": 32}, {"target_modules": [], "target_parameters": EXPERTS}
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "OLoRA": (LLAMA, {"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "mutated-base"),
    "PiSSA, quick": (LLAMA, {"target_modules": ["q_proj"], "init_lora_weights": "pissa_niter_2"}, "mutated-base"),
    "aLoRA": (LLAMA, {"target_modules": ["q_proj"], "alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}, "alora"),
    "repeated layers": (
        LLAMA, {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 3]]}, "layer-replication"
    ),
    "a trained norm": (LLAMA, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "modules-to-save"),
    "base biases": ({**LLAMA, "model_type": "qwen2"}, {"target_modules": ["q_proj"], "bias": "lora_only"}, "bias"),
    "a bias of B": (LLAMA, {"target_modules": ["q_proj"], "lora_bias": True}, "bias"),
    "a tied head": (
        {**LLAMA, "tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}, "embedding-lora"
    ),
    "tokens": (LLAMA, {"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "trainable-tokens"),
    "DoRA": (LLAMA, {"target_modules": ["q_proj"], "use_dora": True, "use_rslora": True}, "dora"),
    "a shared expert": (
        {**QWEN3_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 24},
        {"target_modules": ["shared_expert.gate_proj"]}, "no-module",
    ),
    "a bias of the experts": (GPT_OSS, {"target_modules": [], "target_parameters": ["down_proj_bias"]}, "shape"),
    "a square parameter of a family that changed": (
        {**GPT_OSS, "intermediate_size": 32}, {"target_modules": [], "target_parameters": EXPERTS[1:]}, "experts",
    ),
    "latent attention": (
        {"model_type": "deepseek_v3", **BASE, **LATENT, "q_lora_rank": 16, "first_k_dense_replace": 1},
        {"target_modules": ["o_proj"]}, "no-module",
    ),
    "latent attention without a query rank": (
        {"model_type": "deepseek_v2", **BASE, **LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
        {"target_modules": ["q_proj"]}, "no-module",
    ),
}  # fmt: skip


def _made(lora: dict[str, Any]) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 11, **{key: value() if callable(value) else value for key, value in lora.items()}}


def _weight_deltas(peft: Any) -> dict[str, Any]:
    """ΔW [out, in] (of experts [E, out, in]) by path of the module or parameter, as PEFT merges them in float64."""
    found = {}
    for name, module in peft.double().base_model.model.named_modules():
        if type(module).__name__ == "ParamWrapper":
            path = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
            delta = module.get_delta_weight("default").detach().numpy()
            inner = type(module.get_base_layer()).__name__
            turned = inner in ("Conv1D", "Llama4TextExperts", "GptOssExperts")
            found[path] = delta.swapaxes(-1, -2) if turned else delta
        elif hasattr(module, "merge") and hasattr(module, "base_layer"):
            before = module.base_layer.weight.detach().numpy().copy()
            module.merge()
            delta = module.base_layer.weight.detach().numpy() - before
            found[f"{name}.weight"] = delta.T if type(module.base_layer).__name__ == "Conv1D" else delta
    return found


def _rows(family: str, path: str, delta: Any) -> Deltas:
    """The rows that one parameter's ΔW is."""
    parts = path.split(".")
    layer = next(int(part) for part in parts if part.isdigit())
    if parts[-1] == "gate_up_proj":
        cut = (delta[:, ::2], delta[:, 1::2]) if family == "gpt_oss" else np.split(delta, 2, axis=1)
        return {(layer, "moe_h_to_4h"): cut[0], (layer, "moe_gate"): cut[1]}
    if parts[-1] == "down_proj":
        return {(layer, "moe_4h_to_h"): delta}
    leaf = parts[-2] if parts[-2] != "c_proj" else ".".join(parts[-3:-1])
    if leaf == "qkv_proj":  # four heads, two kv heads, of 8
        return {(layer, name): cut for name, cut in zip(QKV, np.split(delta, [32, 48]), strict=True)}
    if leaf == "c_attn":
        return {(layer, name): cut for name, cut in zip(QKV, np.split(delta, 3), strict=True)}
    if leaf == "query_key_value":
        by_head = delta.reshape(4, 3, 8, -1)
        return {(layer, name): by_head[:, i].reshape(32, -1) for i, name in enumerate(QKV)}
    if leaf == "gate_up_proj":
        return {(layer, name): cut for name, cut in zip(MLP, np.split(delta, 2), strict=True)}
    return {(layer, PLAIN[leaf]): delta}


@pytest.mark.parametrize("kind", CONVERTED)
def test_converted(tmp_path: Path, kind: str) -> None:
    """Every row is what PEFT, having loaded the same files, adds to the weight."""
    base, lora = CONVERTED[kind]
    wanted: Deltas = {}
    for path, delta in _weight_deltas(trained(tmp_path, base, **_made(lora))).items():
        wanted |= _rows(base["model_type"], path, delta)
    wanted = {key: delta for key, delta in wanted.items() if delta.any()}
    assert wanted
    bundle = convert(tmp_path / "adapter", base=tmp_path / "base", out=tmp_path / "o", dtype="float32")
    dims = {module: (delta.shape[-1], delta.shape[-2]) for (_, module), delta in wanted.items()}
    experts = next((len(delta) for delta in wanted.values() if delta.ndim == 3), 1)
    assert_same(bundle_deltas(bundle, dims, experts=experts), wanted, "float32")


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    """What rows cannot say is refused under its own name."""
    base, lora, rule = REFUSED[kind]
    trained(tmp_path, base, **_made(lora))
    with pytest.raises(AdapterRefused) as caught:
        convert(tmp_path / "adapter", base=tmp_path / "base", out=tmp_path / "o", dtype="float32")
    assert rule in caught.value.report.problems.counts


def test_two_variants_at_once(tmp_path: Path) -> None:
    """PEFT loads no config with two variants, so neither does the converter."""
    from peft import PeftModel
    from transformers import AutoConfig

    blocks = {"target_modules": ["q_proj"], "use_bdlora": lambda: block_diagonal(["q_proj"], [])}
    trained(tmp_path, LLAMA, **_made(blocks))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "velora_config": {"num_groups": 2}}))
    with pytest.raises(ValueError, match="variant combination"):
        PeftModel.from_pretrained(model_of(AutoConfig.for_model(**LLAMA)), str(tmp_path / "adapter"))
    with pytest.raises(AdapterRefused) as caught:
        convert(tmp_path / "adapter", base=tmp_path / "base", out=tmp_path / "o", dtype="float32")
    assert set(caught.value.report.problems.counts) == {"variants"}
