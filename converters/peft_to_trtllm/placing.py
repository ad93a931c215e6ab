"""Where a module of the file stands in the base, and what its leaf means there; or the reason why not.

`where` is a tensor's name, for messages.
"""

from __future__ import annotations

from peft_to_trtllm.base import Base
from peft_to_trtllm.families import (
    DECODER_PREFIX,
    NO_MODULE,
    ROUTER,
    Leaf,
    families_with,
    find_leaf,
    no_module_of,
    up_is_ambiguous,
)
from peft_to_trtllm.keys import PREFIX_WORDS, Place
from peft_to_trtllm.report import Findings


def place_fits(place: Place, where: str, base: Base | None, problems: Findings) -> bool:
    """Whether the base has that layer, and the layers are those of its language model."""
    layers = base.layers if base else None
    if layers is not None and place.layer >= layers:
        problems.add(
            "layer-range",
            where,
            f"layer {place.layer} of a base that has {layers} (from {base.source if base else ''})",
            "an adapter trained on this base; give the config.json of the base it was trained on",
        )
        return False
    model_type = base.model_type if base else ""
    if all(part in PREFIX_WORDS for part in place.prefix):
        return True
    rest = tuple(part for part in place.prefix if part not in PREFIX_WORDS)
    if (rest == ("decoder",) and model_type in DECODER_PREFIX) or (rest == ("encoder",) and model_type == "chatglm"):
        return True
    named = ".".join(place.prefix)
    what = "part of an encoder-decoder, or of a family whose config.json is needed (--base)"
    problems.add(
        "unknown-prefix",
        where,
        f"the layers stand under {named!r}" + (f": {what}" if rest in (("decoder",), ("encoder",)) else ""),
        f"a prefix of a language model: any of {', '.join(sorted(PREFIX_WORDS))}",
    )
    return False


def meaning_of(
    name: str, where: str, base: Base | None, problems: Findings, *, has_gate: bool
) -> tuple[Leaf, int | None] | None:
    """(meaning, expert number) of a leaf path; `has_gate` says whether the file has a gate_proj."""
    leaf, expert = find_leaf(name, base)
    kind = f"the base's model_type {base.model_type!r}" if base else "an unknown base"
    reason = no_module_of(name, base)
    if reason is None and leaf is None:
        reason = next((NO_MODULE[part] for part in name.split(".") if part in NO_MODULE), None)
    if reason:
        wanted = "TensorRT-LLM 1.2 has no LoRA module for it; train without it, or merge the adapter into the base"
        problems.add("no-module", where, f"{name!r} is {reason}", wanted)
        return None
    if leaf is None:
        _add_unknown(name, kind, where, problems)
        return None
    if leaf is ROUTER and not (base and base.experts):
        found = f"{name!r} is the router of the experts where a base has experts, and {kind} is not known to"
        problems.add("base-needed", where, found, "the base's config.json with its number of experts (--base)")
        return None
    if up_is_ambiguous(name, base, has_gate=has_gate):
        found = (
            f"{name!r} without a gate_proj in the file: in a gated MLP it is mlp_gate, in an ungated one mlp_h_to_4h, "
            f"and which one {kind} has is not known here"
        )
        problems.add("base-needed", where, found, "the base's config.json (--base) of a family in families.py")
        return None
    return leaf, expert


def _add_unknown(name: str, kind: str, where: str, problems: Findings) -> None:
    families = families_with(name)
    if families:
        found = f"what the rows of {name!r} mean is not defined for {kind}"
        wanted = f"the base's config.json (--base) with one of the families that define it: {', '.join(families[:12])}"
        problems.add("base-needed", where, found, wanted)
        return
    wanted = "a rule for this leaf in families.py: which module it is and, if fused, the order of its rows"
    problems.add("unknown-module", where, f"no rule says what {name!r} is in {kind}", wanted)
