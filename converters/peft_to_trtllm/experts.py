"""Experts adapted through target_parameters (PEFT 0.17 and later).

Such a base keeps the weights of all experts in one parameter, and PEFT wraps the module once per parameter:

    <mlp>.experts.lora_A.weight              the outer wrapper
    <mlp>.experts.base_layer.lora_A.weight   the next one inside

lora_A is [E*r, x], expert outermost; lora_B is [y, r*E], expert INNERMOST (`reshape(y, r, E)`). Names do not say which
parameter a wrapper holds, nor whether x is its inputs or its outputs; the widths do:

    gate_up_proj   H -> 2M        x, y = H, 2M        turned round: 2M, H
    down_proj      M -> H         x, y = M, H         turned round: H, M

PEFT 0.19.1 and later takes x for the inputs, but for a class that keeps [E, in, out] without saying so (Llama 4); PEFT
before that took x from the parameter's second side, so from the outputs of a class that keeps [E, out, in]. A pair
turned round is an adapter of the transposed weight: ΔWᵀ = s·B·A, so ΔW = s·Aᵀ·Bᵀ, exactly. Where the sides are equal
the rest of the file decides, then the rule of today's PEFT, if the adapter can be of no other.

Source: PEFT 0.21 `tuners/lora/layer.py`, ParamWrapper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from peft_to_trtllm.base import Base
from peft_to_trtllm.modules import Adapted
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rows import Block, Factors, Index
from peft_to_trtllm.scale import ScaleRules

_MODULES = frozenset({"mlp.experts", "block_sparse_moe.experts", "feed_forward.experts"})


class Layout(NamedTuple):
    """How a family keeps the experts' parameters."""

    interleaved: bool = False
    """The rows of gate_up_proj are gate, up, gate, up, … and not [gate; up]."""
    swapped: bool = False
    """Current PEFT takes the widths of this family's parameters turned round."""
    changed: bool = False
    """transformers 4 kept or declared them otherwise, so an adapter of any PEFT may have them either way."""


LAYOUTS: Mapping[str, Layout] = {
    **dict.fromkeys(
        (
            "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "minimax", "deepseek_v2", "deepseek_v3", "dots1",
            "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "qwen3_next",
        ),
        Layout(),
    ),
    "qwen3_vl_moe_text": Layout(changed=True),
    "llama4": Layout(swapped=True),
    "llama4_text": Layout(swapped=True),
    "gpt_oss": Layout(interleaved=True, changed=True),
}  # fmt: skip
"""model_type -> layout in transformers 5, with gate before up in all."""

_Kind = tuple[str, bool]
"""(parameter, turned round)."""

_TURNED_BACK = (0, 19, 1)
"""The version of PEFT since which the rule is today's."""


def experts_leaf(leaf: str) -> bool:
    """Whether a leaf path is a wrapper around a parameter of all experts."""
    parts = leaf.split(".")
    while parts and parts[-1] == "base_layer":
        parts.pop()
    return ".".join(parts) in _MODULES


class _Sizes(NamedTuple):
    """What of a base is needed."""

    experts: int
    hidden: int
    inter: int


class Experts:
    """Places the wrapped experts of one file."""

    def __init__(
        self, modules: Sequence[Adapted], base: Base | None, peft_version: str, scales: ScaleRules, problems: Findings
    ) -> None:
        """`modules`: every wrapper of the file; `peft_version`: what the config says, or empty."""
        self._family = base.model_type if base else ""
        self._sizes: _Sizes | None = None
        if base and base.experts and base.hidden and base.expert_inter:
            self._sizes = _Sizes(base.experts, base.hidden, base.expert_inter)
        self._of_current_peft = _version(peft_version) >= _TURNED_BACK
        self._scales = scales
        self._problems = problems
        certain = (kinds[0] for adapted in modules if self._sizes and len(kinds := _kinds(adapted, self._sizes)) == 1)
        self._seen = {turned for _, turned in certain}

    def place(self, adapted: Adapted) -> list[tuple[str, int, int, Block]]:
        """(target module, in, out, block) of every expert in the pair; empty with the reason in the problems."""
        sizes, layout = self._sizes, LAYOUTS.get(self._family)
        if sizes is None:
            found = "experts adapted through target_parameters: only the base's sizes say which parameter this is"
            wanted = "the base's config.json with hidden size, expert size and number of experts (--base)"
            self._problems.add("base-needed", adapted.a.name, found, wanted)
            return []
        if layout is None:
            found = f"how {self._family!r} keeps the weights of its experts (gate before up?) is not known here"
            self._problems.add("experts", adapted.a.name, found, "a rule in experts.py")
            return []
        kind = self._kind(adapted, sizes, layout)
        factors = self._factors(adapted, *kind, sizes.experts) if kind else None
        if kind is None or factors is None:
            return []
        return [
            (module, factors.d_in, num_out, Block(factors, rows, source_expert=expert, expert=expert))
            for module, rows, num_out in _parts(kind[0], sizes, layout)
            for expert in range(sizes.experts)
        ]

    def _kind(self, adapted: Adapted, sizes: _Sizes, layout: Layout) -> _Kind | None:
        kinds = _kinds(adapted, sizes)
        if not kinds:
            hidden, inter = sizes.hidden, sizes.inter
            self._problems.add(
                "shape",
                adapted.a.name,
                f"shape mismatch: {adapted.a.shape[1]} -> {adapted.b.shape[0]} is neither gate_up_proj "
                f"({hidden} -> {2 * inter}) nor down_proj ({inter} -> {hidden}), nor one of them turned round",
                "an adapter trained on this base; give the config.json of the base it was trained on",
            )
            return None
        if len(kinds) == 1:
            return kinds[0]
        parameter = kinds[0][0]
        if len(self._seen) == 1:
            return parameter, next(iter(self._seen))
        if not self._seen and not layout.changed and self._of_current_peft:
            return parameter, layout.swapped
        self._problems.add(
            "experts",
            adapted.a.name,
            f"{parameter} is {adapted.a.shape[1]} -> {adapted.b.shape[0]}: the shapes do not say whether lora_A "
            "belongs to its inputs or its outputs, which differs between versions of PEFT and transformers",
            "an adapter that also has the experts' other parameter, or merge it into the base",
        )
        return None

    def _factors(self, adapted: Adapted, parameter: str, turned: bool, experts: int) -> Factors | None:
        a, b = adapted.a, adapted.b
        rule = self._scales.of(f"{adapted.path.replace('.base_layer', '')}.{parameter}")
        if a.shape[0] != b.shape[1] or a.shape[0] != experts * rule.rank:
            self._problems.add(
                "rank",
                a.name,
                f"A has {a.shape[0]} rows and B {b.shape[1]} columns; "
                f"{experts} experts of rank {rule.rank} have {experts * rule.rank}",
                "r and rank_pattern as they were in training, and the base's own number of experts",
            )
            return None
        if turned:
            return Factors(b, a, rule.rank, rule.scale, num_experts=experts, swapped=True)
        return Factors(a, b, rule.rank, rule.scale, num_experts=experts)


def _kinds(adapted: Adapted, sizes: _Sizes) -> list[_Kind]:
    """What a wrapper can be by its widths."""
    sides = {"gate_up_proj": (sizes.hidden, 2 * sizes.inter), "down_proj": (sizes.inter, sizes.hidden)}
    found = adapted.a.shape[1], adapted.b.shape[0]
    return [
        (name, turned)
        for name, (d_in, d_out) in sides.items()
        for turned, wanted in ((False, (d_in, d_out)), (True, (d_out, d_in)))
        if found == wanted
    ]


def _version(text: str) -> tuple[int, ...]:
    """(major, minor, micro) of a version such as `0.21.2.dev0@1a2b3c`; empty for none."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", text)
    return tuple(map(int, found.groups())) if found else ()


def _parts(parameter: str, sizes: _Sizes, layout: Layout) -> list[tuple[str, slice | Index, int]]:
    """(target module, its rows, how many) of a parameter."""
    inter = sizes.inter
    if parameter == "down_proj":
        return [("moe_4h_to_h", slice(None), sizes.hidden)]
    if layout.interleaved:
        return [("moe_h_to_4h", slice(0, None, 2), inter), ("moe_gate", slice(1, None, 2), inter)]
    return [("moe_h_to_4h", slice(0, inter), inter), ("moe_gate", slice(inter, 2 * inter), inter)]
