"""Rules of an engine profile that tie several values together; each with its reason and what to write instead.

A rule names the values it needs. It is held to whatever is right by itself, so that a profile with one misspelt field
still hears everything else. Sources stand with the rules (issue numbers are TensorRT-LLM's where no other is named).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trtllm_lora.errors import ContractError
from trtllm_lora.geometry import CacheGeometry, ceil_div
from trtllm_lora.modules import LLAMA_MODULES, MODULES, local_dims
from trtllm_lora.profile import Engine, Lora, Model, shape_of
from trtllm_lora.releases import container_problem, version_problem
from trtllm_lora.shape import EngineShape
from trtllm_lora.yaml_lines import Document, Problem

Values = Mapping[str, Any]
Found = tuple[str, str, str]
"""(dotted place, what is wrong, what to write); a place that starts with `?` makes a warning."""
Rule = Callable[[Values], Iterator[Found]]

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
_RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule_problems(document: Document, values: Values) -> list[Problem]:
    """What the rules say of a profile's values; a rule whose values are missing or wrong is passed over."""
    problems = []
    for needs, rule in _RULES:
        if all(name in values for name in needs):
            for place, what, write in rule(values):
                where = tuple(int(step) if step.isdigit() else step for step in place.lstrip("?").split("."))
                problems.append(document.problem(where, what, write, warning=place.startswith("?")))
    return problems


def _needs(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.append((names, rule))
        return rule

    return register


def _on_gpu(v: Values) -> bool:
    return bool(v["runtime"] == "tensorrt_llm")


@_needs("lora.modules")
def _known_modules(v: Values) -> Iterator[Found]:
    for i, name in enumerate(v["lora.modules"]):
        if name in MODULES:
            if name in v["lora.modules"][:i]:
                yield f"lora.modules.{i}", f"{name} is listed twice", "leave one"
            continue
        near = difflib.get_close_matches(name, MODULES, n=1)
        if name in HF_NAMES:
            what, write = f"{name} is Hugging Face's name", f"write {HF_NAMES[name]}"
        elif name in _LATER_MODULES:
            what, write = f"{name} exists only in runtimes without engines (after 1.2)", "leave it out"
        else:
            what, write = f"no LoRA module {name}", f"write {near[0] if near else 'one of ' + ', '.join(LLAMA_MODULES)}"
        yield f"lora.modules.{i}", what, write


@_needs("lora.modules")
def _attention_together(v: Values) -> Iterator[Found]:
    """layers/attention.py: q, k and v are all enabled or all disabled in an engine."""
    missing = [name for name in ("attn_q", "attn_k", "attn_v") if name not in v["lora.modules"]]
    if 0 < len(missing) < 3:
        yield (
            "lora.modules",
            "attn_q, attn_k and attn_v must be all enabled or all disabled in an engine (layers/attention.py)",
            f"add {', '.join(missing)}; adapters need not have rows for them",
        )


@_needs("lora.modules", "model.num_heads", "model.head_size", "model.hidden_size")
def _dense_input(v: Values) -> Iterator[Found]:
    """loraModule.cpp: attn_dense is H x H in every version read, although its true input is heads x head_size."""
    hidden, heads = v["model.hidden_size"], v["model.num_heads"]
    head_size = v["model.head_size"] or hidden // heads
    if "attn_dense" in v["lora.modules"] and heads * head_size != hidden:
        yield (
            f"lora.modules.{v['lora.modules'].index('attn_dense')}",
            f"attn_dense takes {heads} heads x {head_size} = {heads * head_size} values here, the runtime cuts its "
            f"rows for hidden_size {hidden}, in the wrong place and without an error (loraModule.cpp)",
            "leave attn_dense out, and train adapters without o_proj",
        )


@_needs("lora.modules", "engine.tensor_parallel")
def _fused_with_tp(v: Values) -> Iterator[Found]:
    """The runtime takes a contiguous block of output rows per rank, so fused rows need their own order (#8063)."""
    for i, name in enumerate(v["lora.modules"]):
        if name in _FUSED and v["engine.tensor_parallel"] > 1:
            yield (
                f"lora.modules.{i}",
                f"{name} with tensor_parallel {v['engine.tensor_parallel']}: each rank takes a contiguous block of the "
                "fused rows, which mixes the parts (#8063)",
                f"write {_FUSED[name]}",
            )
        elif name in _FUSED and set(_FUSED[name].split(", ")) & set(v["lora.modules"]):
            yield f"lora.modules.{i}", f"{name} beside its own parts: a row would count twice", f"leave {name} out"


@_needs("lora.modules", "model.num_experts")
def _experts(v: Values) -> Iterator[Found]:
    """TRTLLM-379: MoE LoRA weights are marked unfinished on the engine path."""
    for i, name in enumerate(v["lora.modules"]):
        if name.startswith("moe_") and not v["model.num_experts"]:
            yield f"lora.modules.{i}", f"{name} in a model without experts (num_experts 0)", "leave it out"
        elif name.startswith("moe_"):
            yield f"?lora.modules.{i}", f"{name}: MoE LoRA is marked unfinished in the engine runtime (TRTLLM-379)", ""
        elif name.startswith("cross_"):
            yield (
                f"lora.modules.{i}",
                f"{name} is for encoder-decoder models; the profiles are of decoders",
                "leave it out",
            )


@_needs("engine.dtype", "lora.plugin_dtype")
def _plugin_dtype(v: Values) -> Iterator[Found]:
    """tensorrtllm_backend#791: an adapter in another dtype than the plugin's is not applied, without a warning."""
    if v["lora.plugin_dtype"] not in ("auto", v["engine.dtype"]):
        yield (
            "lora.plugin_dtype",
            f"plugin {v['lora.plugin_dtype']} on a {v['engine.dtype']} engine: adapters in the engine's dtype, which "
            "the request check demands, are then not applied and answers are the base's (tensorrtllm_backend#791)",
            "write auto",
        )


@_needs("engine.quantization", "engine.dtype", "engine.kv_cache_dtype")
def _quantisation(v: Values) -> Iterator[Found]:
    refused = {
        "fp8_rowwise": "LoRA is not supported on fp8_rowwise (#2603, #10320)",
        "smoothquant": "`lora is not supported on SmoothQuantAttention now` (#2604, #12703)",
    }
    word = v["engine.quantization"]
    if word in refused:
        yield "engine.quantization", refused[word], "write fp8, int4_awq or none"
    if word != "none" and v["engine.dtype"] == "float32":
        yield "engine.dtype", f"{word} with float32 activations has no kernels", "write float16 or bfloat16"
    if v["runtime"] == "reference" and (word != "none" or v["engine.kv_cache_dtype"] != "auto"):
        yield "engine.quantization", "the reference engine does not quantise", "write none, and kv_cache_dtype auto"


@_needs("engine.kv_cache_type")
def _kv_cache(v: Values) -> Iterator[Found]:
    if v["engine.kv_cache_type"] == "disabled":
        yield "engine.kv_cache_type", "LoRA without a KV cache crashes the engine (#2543)", "write paged"
    elif v["engine.kv_cache_type"] == "continuous":
        yield (
            "engine.kv_cache_type",
            "in-flight batching, without which LoRA tensors are not fed (tensorrtllm_backend#511), needs a paged cache",
            "write paged",
        )


@_needs("engine.tensorrt_llm", "engine.container")
def _release(v: Values) -> Iterator[Found]:
    version, container = v["engine.tensorrt_llm"], v["engine.container"]
    problem = version_problem(version)
    if problem:
        yield "engine.tensorrt_llm", *problem
    if container is not None:
        problem = container_problem(container, version)
        if problem:
            yield "engine.container", *problem
    elif _on_gpu(v):
        yield "engine", "container is missing: an engine loads only in the image that built it", "write container: …"


@_needs("model.revision")
def _revision(v: Values) -> Iterator[Found]:
    if _on_gpu(v) and not re.fullmatch(r"[0-9a-f]{40}", v["model.revision"]):
        yield (
            "model.revision",
            f"{v['model.revision']!r} is not a commit: branches and tags move, and adapters silently stop fitting",
            "write the commit's 40 hexadecimal digits",
        )


@_needs("model.num_heads", "model.num_kv_heads", "model.hidden_size", "model.head_size")
def _heads(v: Values) -> Iterator[Found]:
    heads, kv_heads = v["model.num_heads"], v["model.num_kv_heads"]
    if heads % kv_heads:
        yield (
            "model.num_kv_heads",
            f"{heads} heads cannot share {kv_heads} key/value heads",
            f"write a divisor of {heads}",
        )
    if v["model.head_size"] is None and v["model.hidden_size"] % heads:
        yield (
            "model.head_size",
            f"hidden_size {v['model.hidden_size']} is no multiple of {heads} heads",
            "write head_size",
        )


@_needs("engine.tensor_parallel", "model.num_heads", "model.num_kv_heads", "model.intermediate_size")
def _tensor_parallel(v: Values) -> Iterator[Found]:
    tp = v["engine.tensor_parallel"]
    for name in ("num_heads", "intermediate_size"):
        if v[f"model.{name}"] % tp:
            yield "engine.tensor_parallel", f"{tp} does not divide {name} {v[f'model.{name}']}", "write a divisor"
    kv_heads = v["model.num_kv_heads"]
    if kv_heads % tp and kv_heads < tp:
        yield (
            "engine.tensor_parallel",
            f"{tp} ranks for {kv_heads} key/value heads: heads are doubled, and the LoRA rows of attn_k and attn_v are "
            "cut by the undoubled size",
            f"write at most {kv_heads}",
        )
    elif kv_heads % tp:
        yield "engine.tensor_parallel", f"{tp} does not divide num_kv_heads {kv_heads}", "write a divisor"


@_needs("engine.pipeline_parallel", "model.num_layers")
def _pipeline_parallel(v: Values) -> Iterator[Found]:
    layers, pp = v["model.num_layers"], v["engine.pipeline_parallel"]
    if layers % pp:
        yield (
            "engine.pipeline_parallel",
            f"{pp} does not divide num_layers {layers}; the LoRA cache counts a rank's first layer as rank x layers, "
            "which is then wrong (peftCacheManager.cpp)",
            "write a divisor",
        )


@_needs(
    "engine.max_seq_len",
    "engine.max_input_len",
    "engine.max_num_tokens",
    "engine.max_batch_size",
    "model.max_positions",
)
def _lengths(v: Values) -> Iterator[Found]:
    seq, positions, batch = v["engine.max_seq_len"], v["model.max_positions"], v["engine.max_batch_size"]
    if seq > positions:
        yield "engine.max_seq_len", f"{seq} exceeds the model's max_positions {positions}", f"write at most {positions}"
    if v["engine.max_input_len"] and v["engine.max_input_len"] >= seq:
        yield "engine.max_input_len", f"{v['engine.max_input_len']} leaves no token of {seq} to answer", "write less"
    if v["engine.max_num_tokens"] < batch:
        yield (
            "engine.max_num_tokens",
            f"{v['engine.max_num_tokens']} is less than one token for each of {batch} requests",
            f"write at least {batch}",
        )


@_needs("lora.max_rank")
def _rank_multiple(v: Values) -> Iterator[Found]:
    """#3684: a rank-5 and a rank-8 adapter in one batch broke a kernel's assertion."""
    if v["lora.max_rank"] % 8:
        up = ceil_div(v["lora.max_rank"], 8) * 8
        yield "?lora.max_rank", "ranks that are no multiple of 8 broke a kernel in mixed batches (#3684)", f"write {up}"


@_needs("lora.max_rank", "serving.lora_max_rank", "serving.lora_optimal_rank", "serving.lora_host_memory")
def _lora_cache(v: Values) -> Iterator[Found]:
    """peftCacheManager.cpp sizes pages by lora_cache_max_adapter_size, while requests are checked against max_rank."""
    shape = _shape(v)
    if shape is None:
        return
    rank = v["lora.max_rank"]
    largest = rank if v["serving.lora_max_rank"] is None else v["serving.lora_max_rank"]
    geometry = CacheGeometry.of(shape, optimal_rank=v["serving.lora_optimal_rank"], max_rank=largest)
    widest = max(shape.lora_modules, key=lambda name: sum(local_dims(name, shape)))
    slots = ceil_div(rank * sum(local_dims(widest, shape)), geometry.page_width)
    if largest < rank:
        over = slots > geometry.slots_per_page
        yield (
            "serving.lora_max_rank",
            f"{largest} is below lora.max_rank {rank}: the engine accepts rank {rank}, whose row of {widest} takes "
            f"{slots} slots of {geometry.page_width} values while a page has {geometry.slots_per_page}"
            + (", and is written past its page" if over else ""),
            f"write {rank}",
        )
    try:
        geometry.num_pages(v["serving.lora_host_memory"])
    except ContractError as error:
        need = ceil_div(geometry.min_slots * geometry.slot_bytes, 2**20)
        yield "serving.lora_host_memory", f"the engine would not start: {error}", f"write at least {need}MiB"


@_needs("engine.tensor_parallel", "engine.pipeline_parallel", "model.architecture", "engine.dtype")
def _reference(v: Values) -> Iterator[Found]:
    if _on_gpu(v):
        return
    for name in ("tensor_parallel", "pipeline_parallel"):
        if v[f"engine.{name}"] != 1:
            yield f"engine.{name}", "the reference engine is one rank", "write 1"


def _shape(v: Values) -> EngineShape | None:
    """The engine shape, if everything it needs is right."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "engine": {}, "lora": {}}
    for place, value in v.items():
        section, _, name = place.partition(".")
        if section in sections:
            sections[section][name] = value
    try:
        shape = shape_of(Model(**sections["model"]), Engine(**sections["engine"]), Lora(**sections["lora"]))
    except ValueError:  # pydantic's: something is missing
        return None
    except ContractError:  # unknown modules: told by their own rule
        return None
    return shape if shape.lora_enabled else None
