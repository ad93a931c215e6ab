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

GATE_FIRST = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "olmoe", "glm4_moe", "ernie4_5_moe"})
"""model_types that keep gate_up_proj as [E, 2M, H], its rows [gate; up] in one piece each, and down_proj as [E, H, M]
(transformers 5)."""

TRANSPOSED = frozenset({"llama4", "llama4_text", "gpt_oss"})
"""model_types that keep them as [E, H, 2M] and [E, M, H]: PEFT's A then belongs to the outputs, and its B to the
inputs."""

_WAS_TRANSPOSED = frozenset({"qwen3_vl_moe_text"})
"""model_types that transformers 4 kept transposed: an adapter does not say which one it was trained with."""


def experts_leaf(leaf: str) -> bool:
    """Whether a leaf path is a wrapper around a parameter of all experts."""
    parts = leaf.split(".")
    while parts and parts[-1] == "base_layer":
        parts.pop()
    return ".".join(parts) in _MODULES


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
    if not _layout_known(adapted, base, problems):
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


def _layout_known(adapted: Adapted, base: Base, problems: Findings) -> bool:
    """Whether the family keeps its experts [E, out, in]; by the shapes alone a square transposed one would pass."""
    kind, a = base.model_type, adapted.a
    if kind in TRANSPOSED:
        problems.add(
            "experts",
            a.name,
            f"{kind!r} keeps the weights of its experts as [E, in, out]: in PEFT's factors of such a parameter A "
            "belongs to the outputs and B to the inputs, which this converter does not turn round",
            "an adapter without target_parameters on the experts, or merge it into the base",
        )
        return False
    if kind not in GATE_FIRST:
        problems.add(
            "experts",
            a.name,
            f"how {kind!r} keeps the weights of its experts ([E, out, in], gate before up?) is not known here",
            "a rule in experts.py",
        )
        return False
    hidden, inter = base.hidden, base.expert_inter
    if kind in _WAS_TRANSPOSED and hidden is not None and inter is not None and hidden in (inter, 2 * inter):
        problems.add(
            "experts",
            a.name,
            f"{kind!r} kept its experts transposed in transformers 4, and with hidden size {hidden} and expert size "
            f"{inter} the shapes do not say which it was",
            "an adapter without target_parameters on the experts, or merge it into the base",
        )
        return False
    return True


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
