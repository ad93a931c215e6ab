"""What the module names of each model family mean to TensorRT-LLM, as data.

A leaf (the path below the layer) becomes one target module, or several whose rows lie in one fused matrix:

    stacked   [q; k; v] or [gate; up], each part in one piece
    grouped   per kv head: its queries, its key, its value, head by head (with one kv head this is [q; k; v], with as
              many kv heads as heads it is q, k, v of each head in turn)
    codegen   four blocks (one per TPU core of the training run), each [q; v; k]

Naming trap: Hugging Face's gate_proj is `mlp_h_to_4h`, its up_proj is `mlp_gate`. A family that is not here converts by
the common names, if its leaves have them; a leaf without a rule is refused with what is missing. To add a family, add
its leaves to `FAMILIES` and a base to `tests/converters/test_families.py`, which holds the row order against
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from peft_to_trtllm.base import Base

Order = Literal["stacked", "grouped", "codegen"]


class Leaf(NamedTuple):
    """Target modules of one leaf, in the order their rows come."""

    modules: tuple[str, ...]
    order: Order = "stacked"

    @property
    def fused(self) -> bool:
        """Whether the rows of several modules lie in one matrix."""
        return len(self.modules) > 1


def _one(module: str) -> Leaf:
    return Leaf((module,))


Q, K, V, DENSE = _one("attn_q"), _one("attn_k"), _one("attn_v"), _one("attn_dense")
GATE, UP, DOWN = _one("mlp_h_to_4h"), _one("mlp_gate"), _one("mlp_4h_to_h")
FC = _one("mlp_h_to_4h")
QKV = Leaf(("attn_q", "attn_k", "attn_v"))
QKV_GROUPED = Leaf(("attn_q", "attn_k", "attn_v"), "grouped")
GATE_UP = Leaf(("mlp_h_to_4h", "mlp_gate"))
EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = _one("moe_h_to_4h"), _one("moe_gate"), _one("moe_4h_to_h")
ROUTER = _one("moe_router")

COMMON: Mapping[str, Leaf] = {
    **{f"{attn}.{leaf}": target
       for attn in ("self_attn", "attn", "attention", "self_attention")
       for leaf, target in (("q_proj", Q), ("k_proj", K), ("v_proj", V), ("o_proj", DENSE))},
    **{f"{mlp}.{leaf}": target
       for mlp in ("mlp", "feed_forward")
       for leaf, target in (("gate_proj", GATE), ("up_proj", UP), ("down_proj", DOWN))},
    **{f"{mlp}.experts.*.{leaf}": target
       for mlp in ("mlp", "feed_forward", "block_sparse_moe")
       for leaf, target in (("gate_proj", EXPERT_GATE), ("up_proj", EXPERT_UP), ("down_proj", EXPERT_DOWN),
                            ("w1", EXPERT_GATE), ("w3", EXPERT_UP), ("w2", EXPERT_DOWN))},
    "block_sparse_moe.gate": ROUTER,
    "mlp.gate": ROUTER,
}  # fmt: skip
"""Leaves that mean the same wherever they occur."""

_LLAMA: Mapping[str, Leaf] = {}
_PHI3: Mapping[str, Leaf] = {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}
_GLM: Mapping[str, Leaf] = {"mlp.gate_up_proj": GATE_UP}
_GPT2: Mapping[str, Leaf] = {"attn.c_attn": QKV, "attn.c_proj": DENSE, "mlp.c_fc": FC, "mlp.c_proj": DOWN}
_BIGCODE: Mapping[str, Leaf] = {**_GPT2, "attn.c_attn": QKV_GROUPED}
_NEOX: Mapping[str, Leaf] = {
    "attention.query_key_value": QKV_GROUPED, "attention.dense": DENSE,
    "mlp.dense_h_to_4h": FC, "mlp.dense_4h_to_h": DOWN,
}  # fmt: skip
_BLOOM: Mapping[str, Leaf] = {
    "self_attention.query_key_value": QKV_GROUPED, "self_attention.dense": DENSE,

    "mlp.dense_h_to_4h": FC, "mlp.dense_4h_to_h": DOWN,
}  # fmt: skip
_PERSIMMON: Mapping[str, Leaf] = {
    "self_attn.query_key_value": QKV_GROUPED, "self_attn.dense": DENSE,
    "mlp.dense_h_to_4h": FC, "mlp.dense_4h_to_h": DOWN,
}  # fmt: skip
_CHATGLM1: Mapping[str, Leaf] = {
    "attention.query_key_value": QKV_GROUPED, "attention.dense": DENSE,
    "mlp.dense_h_to_4h": FC, "mlp.dense_4h_to_h": DOWN,
}  # fmt: skip
_CHATGLM: Mapping[str, Leaf] = {
    "self_attention.query_key_value": QKV, "self_attention.dense": DENSE,
    "mlp.dense_h_to_4h": GATE_UP, "mlp.dense_4h_to_h": DOWN,
}  # fmt: skip
_CHATGLM_NO_GROUPS: Mapping[str, Leaf] = {**_CHATGLM, "self_attention.query_key_value": QKV_GROUPED}
_INTERNLM2: Mapping[str, Leaf] = {
    "attention.wqkv": QKV_GROUPED, "attention.wo": DENSE,
    "feed_forward.w1": GATE, "feed_forward.w3": UP, "feed_forward.w2": DOWN,
}  # fmt: skip
_QWEN: Mapping[str, Leaf] = {
    "attn.c_attn": QKV, "attn.c_proj": DENSE, "mlp.w2": GATE, "mlp.w1": UP, "mlp.c_proj": DOWN,
}  # fmt: skip
_BAICHUAN: Mapping[str, Leaf] = {"self_attn.W_pack": QKV}
_MPT: Mapping[str, Leaf] = {"attn.Wqkv": QKV, "attn.out_proj": DENSE, "ffn.up_proj": FC, "ffn.down_proj": DOWN}
_FC1_FC2: Mapping[str, Leaf] = {"self_attn.out_proj": DENSE, "fc1": FC, "fc2": DOWN}
_PHI: Mapping[str, Leaf] = {"self_attn.dense": DENSE, "mlp.fc1": FC, "mlp.fc2": DOWN}
_STARCODER2: Mapping[str, Leaf] = {"mlp.c_fc": FC, "mlp.c_proj": DOWN}
_GPTJ: Mapping[str, Leaf] = {"attn.out_proj": DENSE, "mlp.fc_in": FC, "mlp.fc_out": DOWN}
_CODEGEN: Mapping[str, Leaf] = {**_GPTJ, "attn.qkv_proj": Leaf(("attn_q", "attn_v", "attn_k"), "codegen")}
_GPT_NEO: Mapping[str, Leaf] = {
    "attn.attention.q_proj": Q, "attn.attention.k_proj": K,
    "attn.attention.v_proj": V, "attn.attention.out_proj": DENSE,
    "mlp.c_fc": FC, "mlp.c_proj": DOWN,
}  # fmt: skip
_EXAONE: Mapping[str, Leaf] = {
    "attn.attention.q_proj": Q, "attn.attention.k_proj": K,
    "attn.attention.v_proj": V, "attn.attention.out_proj": DENSE,
    "mlp.c_fc_0": GATE, "mlp.c_fc_1": UP, "mlp.c_proj": DOWN,
}  # fmt: skip
_UNGATED: Mapping[str, Leaf] = {"mlp.up_proj": FC, "mlp.down_proj": DOWN}
_DBRX: Mapping[str, Leaf] = {"norm_attn_norm.attn.Wqkv": QKV, "norm_attn_norm.attn.out_proj": DENSE}

FAMILIES: Mapping[str, Mapping[str, Leaf]] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
            "gemma3_text", "cohere", "cohere2", "olmo", "olmo2", "stablelm", "granite", "smollm3", "internlm",
            "xverse", "orion", "minicpm", "deepseek", "nemotron-nas", "exaone4", "qwen2_vl", "qwen2_5_vl",
            "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "mistral3", "llava",
        ),
        _LLAMA,
    ),
    "phi3": _PHI3,
    **dict.fromkeys(("glm", "glm4", "glm4v_text"), _GLM),
    "gpt2": _GPT2, "gpt_bigcode": _BIGCODE, "gpt_neox": _NEOX, "bloom": _BLOOM, "persimmon": _PERSIMMON,
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), _BLOOM),
    "internlm2": _INTERNLM2, "qwen": _QWEN, "baichuan": _BAICHUAN, "mpt": _MPT, "opt": _FC1_FC2, "xglm": _FC1_FC2,
    "phi": _PHI, "starcoder2": _STARCODER2, "gptj": _GPTJ, "codegen": _CODEGEN, "gpt_neo": _GPT_NEO,
    "exaone": _EXAONE, "dbrx": _DBRX,
    **dict.fromkeys(("nemotron", "arcee", "apertus", "apertus1p5", "apertus1p5_text", "jais2"), _UNGATED),
}  # fmt: skip
"""model_type of config.json -> leaves beside the common ones. ChatGLM has three layouts: `leaves_of`."""

_GATED = frozenset(
    {
        "afmoe", "bitnet", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5",
        "ernie4_5_moe", "exaone4_5", "exaone_moe", "falcon_h1", "flex_olmo", "gemma3n", "gemma3n_text", "gemma4",
        "gemma4_text", "glm4_moe", "glm4v_moe_text", "granite_swa", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
        "llama4", "llama4_text", "minicpm3", "ministral", "ministral3", "mistral4", "mllama", "mllama_text_model",
        "olmo3", "olmoe", "qwen2_5_omni_text", "qwen3_5", "qwen3_5_text", "qwen3_next", "qwen3_omni_moe_text",
        "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl", "recurrent_gemma", "seed_oss", "smollm3", "solar_open",
        "vaultgemma", "yi",
    }
)  # fmt: skip
"""model_types without leaves of their own whose MLP has a gate_proj beside its up_proj (transformers 5)."""

CONV1D = frozenset({"gpt2", "openai-gpt"})
"""Families that store their linear weights (in, out)."""

DECODER_PREFIX = frozenset({"opt", "xglm"})
"""Families whose text layers stand under `model.decoder`."""

_GATED_QUERIES = ("qwen3_next", "qwen3_5", "qwen4_exp")

NO_MODULE: Mapping[str, str] = {
    "q_a_proj": "multi-head latent attention",
    "q_b_proj": "multi-head latent attention",
    "kv_a_proj_with_mqa": "multi-head latent attention",
    "kv_b_proj": "multi-head latent attention",
    "in_proj": "a state-space (Mamba) layer, which only runtimes without engines adapt",
    "x_proj": "a state-space (Mamba) layer",
    "dt_proj": "a state-space (Mamba) layer",
    "encoder_attn": "cross attention of an encoder-decoder",
    "cross_attn": "cross attention",
    "crossattention": "cross attention",
    "EncDecAttention": "cross attention of an encoder-decoder",
    "shared_expert": "a shared expert (ids 19-21), which only runtimes without engines adapt",
    "shared_experts": "a shared expert (ids 19-21), which only runtimes without engines adapt",
    "shared_expert_gate": "the gate of a shared expert",
    "shared_mlp": "a shared expert",
}
"""Parts of a leaf that no module of the 1.2 line can carry, and what they are."""

_EXPERT = re.compile(r"(?<=experts\.)(?:0|[1-9]\d{0,5})(?=\.)")


def leaves_of(base: Base | None) -> Mapping[str, Leaf]:
    """Leaves that differ from, or come beside, the common ones for this base."""
    if base is None:
        return {}
    if base.model_type == "chatglm":
        if base.raw.get("inner_hidden_size"):
            return _CHATGLM1
        return _CHATGLM if base.raw.get("multi_query_attention") else _CHATGLM_NO_GROUPS
    return FAMILIES.get(base.model_type, {})


def no_module_of(leaf: str, base: Base | None) -> str | None:
    """Why a leaf of a usual name is another thing in this base, and one no module can carry; None where it is not."""
    if base is None or not leaf.startswith("self_attn."):
        return None
    if base.raw.get("kv_lora_rank"):
        return "multi-head latent attention"
    if leaf == "self_attn.q_proj" and base.model_type.startswith(_GATED_QUERIES):
        return "the queries and an output gate in one matrix"
    return None


def up_is_ambiguous(leaf: str, base: Base | None, *, has_gate: bool) -> bool:
    """Whether an up_proj may be the gated MLP's (id 7) or the first matrix of an ungated one (id 5).

    A gate_proj in the same file (`has_gate`) or a family known here decides.
    """
    if has_gate or leaf.rpartition(".")[2] != "up_proj":
        return False
    known = base is not None and (base.model_type in FAMILIES or base.model_type in _GATED)
    return not known


def leaf_name(leaf: str) -> str:
    """A leaf path as the tables spell it: `mlp.experts.*.up_proj` for every expert."""
    return _EXPERT.sub("*", leaf, count=1)


def find_leaf(leaf: str, base: Base | None) -> tuple[Leaf | None, int | None]:
    """(meaning, expert number) of a leaf path such as `mlp.experts.3.up_proj`; the meaning is None without a rule."""
    match = _EXPERT.search(leaf)
    expert = int(match.group()) if match else None
    name = leaf_name(leaf)
    return leaves_of(base).get(name) or COMMON.get(name), expert


def families_with(leaf: str) -> list[str]:
    """model_types that have a rule for this leaf: what a base's config.json would have to say."""
    name = leaf_name(leaf)
    known = [family for family, leaves in FAMILIES.items() if name in leaves]
    return known + ["chatglm"] * (name in _CHATGLM or name in _CHATGLM1)
