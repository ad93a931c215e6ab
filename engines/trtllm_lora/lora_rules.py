"""Rules of a profile about adapters: modules, ranks and types.

Issue numbers are TensorRT-LLM's where no other project is named.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from trtllm_lora.geometry import ceil_div
from trtllm_lora.modules import LLAMA_MODULES, MODULES
from trtllm_lora.profile_rule import Found, RuleTable, Values

HF_NAMES = {
    "qkv_proj": "attn_qkv",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
    "gate_up_proj": "mlp_gate_up",
}
_LATER_MODULES = (
    "shared_expert_h_to_4h",
    "shared_expert_4h_to_h",
    "shared_expert_gate",
    "mamba_in_proj",
    "mamba_out_proj",
    "moe_latent_fc1",
    "moe_latent_fc2",
)
_FUSED = {"attn_qkv": "attn_q, attn_k, attn_v", "mlp_gate_up": "mlp_h_to_4h, mlp_gate"}
TABLE = RuleTable()


def _listed(v: Values) -> Iterator[tuple[str, str]]:
    """(place, name) of each module."""
    for i, name in enumerate(v["lora.modules"]):
        yield f"lora.modules.{i}", name


@TABLE.rule(
    "module-name",
    "lora.modules",
    says="modules by TensorRT-LLM's names",
    why="Hugging Face's `gate_proj` is `mlp_h_to_4h`, its `up_proj` is `mlp_gate`: a guess would swap them unseen",
)
def _module_name(v: Values) -> Iterator[Found]:
    for place, name in _listed(v):
        if name in MODULES or name in _LATER_MODULES:
            continue
        near = difflib.get_close_matches(name, MODULES, n=1)
        if name in HF_NAMES:
            yield place, f"{name} is Hugging Face's name", f"write {HF_NAMES[name]}"
        else:
            yield place, f"no LoRA module {name}", f"write {near[0] if near else 'one of ' + ', '.join(LLAMA_MODULES)}"


@TABLE.rule(
    "module-later",
    "lora.modules",
    says="no module that came after the 1.2 line",
    why="runtimes with engines do not have it",
)
def _module_later(v: Values) -> Iterator[Found]:
    for place, name in _listed(v):
        if name in _LATER_MODULES:
            yield place, f"{name} exists only in runtimes without engines (after 1.2)", "leave it out"


@TABLE.rule("module-twice", "lora.modules", says="each module once", why="the second says nothing")
def _module_twice(v: Values) -> Iterator[Found]:
    for i, name in enumerate(v["lora.modules"]):
        if name in v["lora.modules"][:i]:
            yield f"lora.modules.{i}", f"{name} is listed twice", "leave one"


@TABLE.rule(
    "qkv-together",
    "lora.modules",
    says="q, k, v all or none",
    why="an engine enables them together (`layers/attention.py`)",
)
def _qkv_together(v: Values) -> Iterator[Found]:
    missing = [name for name in ("attn_q", "attn_k", "attn_v") if name not in v["lora.modules"]]
    if 0 < len(missing) < 3:
        yield (
            "lora.modules",
            "attn_q, attn_k and attn_v must be all enabled or all disabled in an engine (layers/attention.py)",
            f"add {', '.join(missing)}; adapters need not have rows for them",
        )


@TABLE.rule(
    "dense-input",
    "lora.modules",
    "model.num_heads",
    "model.head_size",
    "model.hidden_size",
    says="no `attn_dense` where heads × head_size ≠ hidden_size",
    why="the runtime takes it for hidden × hidden in every version (`loraModule.cpp`), "
    "cuts its rows in the wrong place, and says nothing",
)
def _dense_input(v: Values) -> Iterator[Found]:
    hidden, heads = v["model.hidden_size"], v["model.num_heads"]
    head_size = v["model.head_size"] or hidden // heads
    if "attn_dense" in v["lora.modules"] and heads * head_size != hidden:
        yield (
            f"lora.modules.{v['lora.modules'].index('attn_dense')}",
            f"attn_dense takes {heads} heads x {head_size} = {heads * head_size} values here, the runtime cuts its "
            f"rows for hidden_size {hidden}, in the wrong place and without an error (loraModule.cpp)",
            "leave attn_dense out, and train adapters without o_proj",
        )


@TABLE.rule(
    "fused-tp",
    "lora.modules",
    "engine.tensor_parallel",
    says="no fused id (`attn_qkv`, `mlp_gate_up`) with tensor parallelism",
    why="a rank takes a contiguous block of the fused rows, which mixes the parts (#8063)",
)
def _fused_tp(v: Values) -> Iterator[Found]:
    for place, name in _listed(v):
        if name in _FUSED and v["engine.tensor_parallel"] > 1:
            yield (
                place,
                f"{name} with tensor_parallel {v['engine.tensor_parallel']}: each rank takes a contiguous block of the "
                "fused rows, which mixes the parts (#8063)",
                f"write {_FUSED[name]}",
            )


@TABLE.rule(
    "fused-parts",
    "lora.modules",
    says="no fused id beside its own parts",
    why="a row would count twice",
)
def _fused_parts(v: Values) -> Iterator[Found]:
    for place, name in _listed(v):
        if name in _FUSED and set(_FUSED[name].split(", ")) & set(v["lora.modules"]):
            yield place, f"{name} beside its own parts: a row would count twice", f"leave {name} out"


@TABLE.rule(
    "moe-modules",
    "lora.modules",
    "model.num_experts",
    says="`moe_…` modules only in models with experts",
    why="there is nothing that they could change",
)
def _moe_modules(v: Values) -> Iterator[Found]:
    for place, name in _listed(v):
        if name.startswith("moe_") and name in MODULES and not v["model.num_experts"]:
            yield place, f"{name} in a model without experts (num_experts 0)", "leave it out"


@TABLE.rule(
    "moe-unfinished",
    "lora.modules",
    "model.num_experts",
    says="`moe_…` modules, in models with experts",
    why="LoRA of experts is marked unfinished in the engine's runtime (TRTLLM-379)",
    warning=True,
)
def _moe_unfinished(v: Values) -> Iterator[Found]:
    for place, name in _listed(v):
        if name.startswith("moe_") and name in MODULES and v["model.num_experts"]:
            yield place, f"{name}: MoE LoRA is marked unfinished in the engine runtime (TRTLLM-379)", "try it first"


@TABLE.rule(
    "cross-attention",
    "lora.modules",
    says="no `cross_attn_…` module",
    why="it belongs to encoder-decoder models, the profiles are of decoders",
)
def _cross_attention(v: Values) -> Iterator[Found]:
    for place, name in _listed(v):
        if name.startswith("cross_"):
            yield place, f"{name} is for encoder-decoder models; the profiles are of decoders", "leave it out"


@TABLE.rule(
    "plugin-dtype",
    "engine.dtype",
    "lora.plugin_dtype",
    says="`plugin_dtype` is the engine's dtype",
    why="adapters in another one are not applied, without a warning (tensorrtllm_backend#791)",
)
def _plugin_dtype(v: Values) -> Iterator[Found]:
    if v["lora.plugin_dtype"] not in ("auto", v["engine.dtype"]):
        yield (
            "lora.plugin_dtype",
            f"plugin {v['lora.plugin_dtype']} on a {v['engine.dtype']} engine: adapters in the engine's dtype, which "
            "the request check demands, are then not applied and answers are the base's (tensorrtllm_backend#791)",
            "write auto",
        )


@TABLE.rule(
    "rank-multiple",
    "lora.max_rank",
    says="`max_rank` no multiple of 8",
    why="ranks 5 and 8 in one batch broke a kernel's assertion (#3684)",
    warning=True,
)
def _rank_multiple(v: Values) -> Iterator[Found]:
    if v["lora.max_rank"] % 8:
        up = ceil_div(v["lora.max_rank"], 8) * 8
        yield "lora.max_rank", "ranks that are no multiple of 8 broke a kernel in mixed batches (#3684)", f"write {up}"
