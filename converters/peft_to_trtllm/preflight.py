"""Against one engine: everything its runtime would refuse, and everything it would silently get wrong.

What the runtime checks at the first request (loraUtils.cpp loraValidateRequestTensors) is checked here before a file is
written; so is what it does not check: the attn_dense input width, row order of fused ids under tensor parallelism, a
lora_plugin of another type, quantisation that drops LoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft_to_trtllm.base import Base
from peft_to_trtllm.dims import SYMBOLS
from peft_to_trtllm.families import FAMILIES
from peft_to_trtllm.fuse import PARTS
from peft_to_trtllm.report import Findings, Report
from peft_to_trtllm.rows import Plan, Row
from trtllm_lora import MODULES, EngineShape

_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GPTJForCausalLM": "gptj",
    "BloomForCausalLM": "bloom",
    "BaichuanForCausalLM": "baichuan",
    "MPTForCausalLM": "mpt",
    "OPTForCausalLM": "opt",
    "ExaoneForCausalLM": "exaone",
    "NemotronForCausalLM": "nemotron",
    "DbrxForCausalLM": "dbrx",
    "CohereForCausalLM": "cohere",
    "ArceeForCausalLM": "arcee",
    "ApertusForCausalLM": "apertus",
    "Jais2ForCausalLM": "jais2",
    "DeciLMForCausalLM": "nemotron-nas",
}
"""`pretrained_config.architecture` -> model_type, where the one names the other. Families of several layouts under one
architecture (Qwen, GPT, Falcon, ChatGLM) are not here: their fused rows need the base's own config.json."""


def base_of_engine(shape: EngineShape, config: Mapping[str, Any], source: str) -> Base:
    """What an engine says of its base: sizes, and the family where its architecture names one."""
    pretrained = config.get("pretrained_config") or {}
    named = pretrained.get("qwen_type") if pretrained.get("qwen_type") in ("qwen2", "qwen3") else None
    return Base(
        source=source,
        model_type=named or _ARCHITECTURES.get(str(pretrained.get("architecture")), ""),
        hidden=shape.hidden_size,
        layers=shape.num_layers,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        inter=shape.intermediate_size,
        experts=shape.num_experts or None,
        expert_inter=shape.intermediate_size if shape.num_experts else None,
        dtype=shape.dtype,
    )


def check_base(base: Base, shape: EngineShape, config: Mapping[str, Any], source: str, problems: Findings) -> None:
    """Whether an engine was built from this base: the sizes that cut fused rows, and the family where both name one."""
    pairs = [
        ("hidden size", base.hidden, shape.hidden_size),
        ("layers", base.layers, shape.num_layers),
        ("heads", base.heads, shape.num_heads),
        ("head size", base.head_size, shape.head_size),
    ]
    if not base.kv_heads_of_layer:
        pairs.append(("kv heads", base.kv_heads, shape.num_kv_heads))
    differ = [f"{name} {stated} and {built}" for name, stated, built in pairs if stated not in (None, built)]
    family = base_of_engine(shape, config, source).model_type
    if family and base.model_type in FAMILIES and FAMILIES[family] is not FAMILIES[base.model_type]:
        differ.append(f"family {base.model_type} and {family}")
    if differ:
        problems.add(
            "engine-base",
            base.source,
            f"the base and the engine ({source}) are not the same model: {', '.join(differ)}",
            "the config.json of the base the engine was built from, and an adapter trained on it",
        )


def check_without_engine(plan: Plan, report: Report) -> None:
    """What can be said of any engine of the 1.2 line."""
    dense = next((row for row in plan.rows if row.module == "attn_dense" and row.d_in != row.d_out), None)
    if dense:
        report.warnings.add(
            "attn-dense",
            dense.path,
            f"attn_dense is {dense.d_in} -> {dense.d_out}; every runtime read so far assumes hidden -> hidden "
            "and would cut its rows in the wrong place",
            "check the engine with --engine; train without o_proj for it",
        )
    _warn_experts(plan, report)


def check_engine(plan: Plan, shape: EngineShape, dtype: str, tp_size: int, source: str, report: Report) -> None:
    """Judge a plan against one engine; problems and warnings go into the report."""
    problems = report.problems
    _check_whole_engine(shape, dtype, source, report)
    for row in plan.rows:
        _check_row(row, shape, source, problems)
    _check_tensor_parallel(plan, shape, source, problems)
    if any(row.module in PARTS for row in plan.rows) and tp_size != shape.tp_size:
        problems.add(
            "fused",
            "tp_size",
            f"fused rows dealt out for {tp_size} ranks, the engine has {shape.tp_size}",
            f"--tp {shape.tp_size}, or separate ids (no --fused), which fit every size",
        )
    _check_pipeline(plan, shape, source, problems)
    _warn_experts(plan, report)


def _check_whole_engine(shape: EngineShape, dtype: str, source: str, report: Report) -> None:
    problems = report.problems
    if not shape.lora_enabled:
        problems.add(
            "engine-lora-off",
            source,
            f"the engine was built without LoRA (lora_plugin {shape.lora_plugin}, modules {list(shape.lora_modules)}, "
            f"max_lora_rank {shape.max_lora_rank}); every request would be answered by the base",
            "build it with --lora_plugin auto --lora_target_modules … --max_lora_rank …",
        )
    if dtype != shape.dtype:
        problems.add(
            "engine-dtype",
            "dtype",
            f"{dtype} asked for, the engine's type is {shape.dtype} (from {source})",
            f"--dtype {shape.dtype}",
        )
    if shape.plugin_differs:
        report.warnings.add(
            "engine-dtype",
            source,
            f"lora_plugin is {shape.lora_plugin}, the engine's type {shape.dtype}: "
            "such a pair was seen to answer with the base, silently",
            f"an engine built with --lora_plugin {shape.dtype}",
        )
    if shape.quantised_without_lora:
        problems.add(
            "engine-quantisation",
            source,
            f"quantisation {shape.quant_algo} does not run LoRA",
            "an engine with another quantisation",
        )


def _check_row(row: Row, shape: EngineShape, source: str, problems: Findings) -> None:
    if row.module not in shape.lora_modules:
        fused = next(
            (name for name, parts in PARTS.items() if row.module in parts and name in shape.lora_modules), None
        )
        advice = f"--fused {fused}" if fused else f"an engine built with {row.module}, or an adapter without it"
        found = (
            f"{row.module} is not enabled in the engine (it has {', '.join(shape.lora_modules) or 'none'}; {source})"
        )
        problems.add("engine-modules", row.path, found, advice)
    if row.rank > shape.max_lora_rank:
        problems.add(
            "engine-rank",
            row.path,
            f"rank {row.rank}, the engine's max_lora_rank is {shape.max_lora_rank} ({source})",
            f"an engine built with --max_lora_rank {row.rank} or more, or an adapter of a lower rank",
        )
    if row.layer >= shape.num_layers:
        problems.add(
            "layer-range",
            row.path,
            f"layer {row.layer}, the engine has {shape.num_layers} ({source})",
            "an engine of this adapter's base",
        )
    if row.module == "attn_dense" and not shape.dense_is_square:
        problems.add(
            "attn-dense",
            row.path,
            f"the engine's heads x head size is {shape.num_heads * shape.head_size}, its hidden size "
            f"{shape.hidden_size}: its runtime assumes they are equal and would cut attn_dense in the wrong place",
            "an adapter without o_proj for this engine",
        )
        return
    wanted = _engine_dims(row, shape)
    if (row.d_in, row.d_out) != wanted:
        problems.add(
            "engine-dims",
            row.path,
            f"{row.module} is {row.d_in} -> {row.d_out}, in the engine {wanted[0]} -> {wanted[1]} ({source})",
            "an engine of this adapter's base",
        )


def _engine_dims(row: Row, shape: EngineShape) -> tuple[int, int]:
    """(in, out) as the runtime computes them, of one expert for the expert modules."""
    sizes = {
        "H": shape.hidden_size,
        "F": shape.intermediate_size,
        "Q": shape.num_heads * shape.head_size,
        "K": shape.num_kv_heads * shape.head_size,
        "E": shape.num_experts,
        "M": shape.intermediate_size,
    }
    parts = PARTS.get(row.module, (row.module,))
    return sizes[SYMBOLS[parts[0]][0]], sum(sizes[SYMBOLS[part][1]] for part in parts)


def _check_tensor_parallel(plan: Plan, shape: EngineShape, source: str, problems: Findings) -> None:
    """Each rank takes an equal share of a row's side, and of whole heads."""
    for row in plan.rows:
        split = MODULES[row.module].tp_split
        side = {"out": row.d_out, "in": row.d_in}.get(split, 0)
        units = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads, "attn_v": shape.num_kv_heads}
        count = units.get(row.module, side)
        if count % shape.tp_size or side % shape.tp_size:
            what = "heads" if row.module in units else "rows" if split == "out" else "columns"
            problems.add(
                "engine-tp",
                row.path,
                f"{row.module} has {count} {what}, which the {shape.tp_size} tensor-parallel ranks of the engine "
                f"cannot share evenly ({source})",
                "an engine of another tp_size, or an adapter without this module",
            )


def _check_pipeline(plan: Plan, shape: EngineShape, source: str, problems: Findings) -> None:
    if shape.pp_size == 1:
        return
    per_rank = -(-shape.num_layers // shape.pp_size)
    bare = [rank for rank in range(shape.pp_size) if not any(row.layer // per_rank == rank for row in plan.rows)]
    if bare:
        problems.add(
            "engine-pipeline",
            source,
            f"no row falls on pipeline rank {', '.join(map(str, bare))} of {shape.pp_size}, "
            "where the runtime asserts that one does",
            "an adapter that touches layers of every rank, or an engine with pp_size 1",
        )


def _warn_experts(plan: Plan, report: Report) -> None:
    expert = next((row for row in plan.rows if row.num_experts > 1), None)
    if expert:
        report.warnings.add(
            "experts",
            expert.path,
            "LoRA on experts is marked unfinished in the engines of the 1.2 line",
            "compare the engine's answers with PEFT before you rely on them",
        )
