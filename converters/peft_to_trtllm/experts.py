"""Experts adapted through target_parameters (PEFT 0.17 and later).

Such a base keeps the weights of all experts in one parameter, and PEFT wraps the module once per parameter:

    <mlp>.experts.lora_A.weight              the outer wrapper
    <mlp>.experts.base_layer.lora_A.weight   the next one inside

    A is [E*r, in], expert outermost; B is [out, r*E], expert INNERMOST (`reshape(out, r, E)`).

Names do not say which parameter a wrapper holds; the shapes do: gate_up is H -> 2M, down is M -> H.
Source: PEFT 0.21 `tuners/lora/layer.py`, ParamWrapper.
"""

from __future__ import annotations

from peft_to_trtllm.base import Base
from peft_to_trtllm.modules import Adapted
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rows import Block, Factors
from peft_to_trtllm.scale import ScaleRules

_MODULES = frozenset({"mlp.experts", "block_sparse_moe.experts", "feed_forward.experts"})

GATE_FIRST = frozenset(
    {"mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "olmoe", "llama4_text", "glm4_moe", "ernie4_5_moe"}
)
"""model_types whose gate_up_proj is [gate; up], each in one piece (transformers 5; GPT-OSS interleaves them)."""


def experts_leaf(leaf: str) -> bool:
    """Whether a leaf path is a wrapper around a parameter of all experts."""
    while leaf.endswith(".base_layer"):
        leaf = leaf.removesuffix(".base_layer")
    return leaf in _MODULES


def place_experts(
    adapted: Adapted,
    base: Base | None,
    scales: ScaleRules,
    problems: Findings,
) -> list[tuple[str, int, int, Block]]:
    """(target module, in, out, block) of every expert in the pair; empty with the reason in `problems`."""
    a, b = adapted.a, adapted.b
    if base is None or not base.experts or not base.hidden or not base.expert_inter:
        problems.add(
            "base-needed",
            a.name,
            "experts adapted through target_parameters: only the base's sizes say which parameter this is",
            "the base's config.json with hidden size, expert size and number of experts (--base)",
        )
        return []
    d_in, d_out = a.shape[1], b.shape[0]
    hidden, inter = base.hidden, base.expert_inter
    parameter = {(hidden, 2 * inter): "gate_up_proj", (inter, hidden): "down_proj"}.get((d_in, d_out))
    if parameter is None:
        problems.add(
            "shape",
            a.name,
            f"shape mismatch: {d_in} -> {d_out} is neither gate_up_proj ({hidden} -> {2 * inter}) "
            f"nor down_proj ({inter} -> {hidden})",
            "an adapter trained on this base; give the config.json of the base it was trained on",
        )
        return []
    if parameter == "gate_up_proj" and base.model_type not in GATE_FIRST:
        problems.add(
            "experts",
            a.name,
            f"the row order of the experts' gate_up_proj in {base.model_type!r} is not known here",
            "a rule in experts.py: whether gate and up lie in one piece each",
        )
        return []
    path = f"{adapted.path.replace('.base_layer', '')}.{parameter}"
    factors = _factors(adapted, path, base.experts, scales, problems)
    if factors is None:
        return []
    if parameter == "down_proj":
        parts = [("moe_4h_to_h", slice(None), hidden)]
    else:
        parts = [("moe_h_to_4h", slice(0, inter), inter), ("moe_gate", slice(inter, 2 * inter), inter)]
    return [
        (module, d_in, num_out, Block(factors, rows, source_expert=expert, expert=expert))
        for module, rows, num_out in parts
        for expert in range(base.experts)
    ]


def _factors(adapted: Adapted, path: str, experts: int, scales: ScaleRules, problems: Findings) -> Factors | None:
    a, b = adapted.a, adapted.b
    rule = scales.of(path)
    if a.shape[0] != b.shape[1] or a.shape[0] != experts * rule.rank:
        problems.add(
            "rank",
            a.name,
            f"A has {a.shape[0]} rows and B {b.shape[1]} columns; "
            f"{experts} experts of rank {rule.rank} have {experts * rule.rank}",
            "r and rank_pattern as they were in training, and the base's own number of experts",
        )
        return None
    return Factors(a, b, rule.rank, rule.scale, num_experts=experts)
