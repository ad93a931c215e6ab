"""The key grammar: what the name of a tensor says.

    key     = path "." component
    path    = { "base_model.model." } , prefix , layers , "." , N , "." , leaf
    layers  = "layers" | "h" | "blocks"

A key is read from its end, for a module may be called anything ("a module named weight" broke others). Every key of a
file becomes one of three: *used* (a `Part`), *known and ignored* (`Ignored`), or *a reason to refuse* (`Refused`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Role = Literal["A", "B", "magnitude", "bias"]


class Part(NamedTuple):
    """A tensor that belongs to an adapted module."""

    role: Role
    path: str
    """Module path without `base_model.model.`: what PEFT's patterns are matched against."""
    adapter: str
    """Name of the adapter inside the key (`lora_A.default.weight`), or empty."""


class Ignored(NamedTuple):
    """A tensor that is known to have no effect on the result."""

    why: str


class Refused(NamedTuple):
    """A tensor that stands against the conversion."""

    rule: str
    found: str
    wanted: str


class Place(NamedTuple):
    """Where in the model a module path points: prefix, layer number, leaf path below the layer."""

    prefix: tuple[str, ...]
    layer: int
    leaf: tuple[str, ...]


_LONGEST_KEY, _LONGEST_PATH = 1024, 256
"""Characters; the longest known path has about 80."""

_ROLES: Mapping[str, Role] = {"lora_A": "A", "lora_B": "B", "lora_magnitude_vector": "magnitude"}

_IGNORED_COMPONENTS: Mapping[str, str] = {
    "lora_velora_embed": "VeLoRA: another backward pass only",
    "lora_monteclora_sampler": "MonteCLoRA: noise in training only",
}

_MERGE = "merge the adapter into the base, or train without it"

_EMBEDDING = Refused(
    "embedding-lora", "LoRA on an embedding (embed_tokens)", "TensorRT-LLM has no LoRA module for embeddings; " + _MERGE
)
_OTHER_METHOD = "this tensor belongs to another PEFT method, not LoRA"
_ONLY_LORA = "only peft_type LORA can be converted"

_REFUSED_COMPONENTS: Mapping[str, Refused] = {
    "lora_embedding_A": _EMBEDDING,
    "lora_embedding_B": _EMBEDDING,
    "weight_m_wdecomp": Refused("dora", "a DoRA magnitude in the spelling of another trainer", "save it with PEFT"),
    "trainable_tokens_delta": Refused("trainable-tokens", "trainable tokens: replaced embedding rows", _MERGE),
    "trainable_tokens_original": Refused("trainable-tokens", "trainable tokens: replaced embedding rows", _MERGE),
    "lora_diag": Refused("kasa", "KaSA: a diagonal between B and A, and a base without its smallest parts", _MERGE),
    "lora_E": Refused("peft-type", "AdaLoRA: " + _OTHER_METHOD, _ONLY_LORA),
    "ranknum": Refused("peft-type", "AdaLoRA: " + _OTHER_METHOD, _ONLY_LORA),
    "lora_a": Refused("mlx", "an MLX tensor: the factors are transposed", "convert the adapter to PEFT first"),
    "lora_b": Refused("mlx", "an MLX tensor: the factors are transposed", "convert the adapter to PEFT first"),
    "lora_down": Refused("other-format", "a kohya / diffusers tensor", "convert the adapter to PEFT first"),
    "lora_up": Refused("other-format", "a kohya / diffusers tensor", "convert the adapter to PEFT first"),
    "linear_in": Refused("nemo", "a NeMo tensor (lora_kqv_adapter)", "export the adapter to PEFT first"),
    "linear_out": Refused("nemo", "a NeMo tensor (lora_kqv_adapter)", "export the adapter to PEFT first"),
    "modules_to_save": Refused("modules-to-save", "a whole trained matrix (modules_to_save)", _MERGE),
}

_OTHER_METHOD_WORDS = (
    "hada_", "lokr_", "oft_", "boft_", "ia3_", "vera_", "poly_lora", "prompt_embeddings", "prompt_encoder",
    "fourierft_",
    "hra_", "randlora_", "vblora_", "bone_", "shira_", "miss_", "road_", "c3a_", "waveft_", "internal_xlora",
)  # fmt: skip

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_TOWERS = (
    "vision", "visual", "audio", "image", "multi_modal_projector", "mm_projector", "connector", "talker", "token2wav",
    "speech", "perceiver", "resampler", "qformer",
)  # fmt: skip
_LAYER_WORDS = frozenset({"layers", "h", "blocks", "block", "layer"})
PREFIX_WORDS = frozenset(
    {"model", "language_model", "llm", "transformer", "gpt_neox", "text_model", "thinker", "backbone"}
)
_WHOLE_OUTSIDE = (
    "embed",
    "wte",
    "wpe",
    "word_embeddings",
    "lm_head",
    "output_layer",
    "embed_out",
    "score",
    "classifier",
)


def parse_key(key: str) -> Part | Ignored | Refused:
    """Read one key from its end."""
    if len(key) > _LONGEST_KEY:
        return _unknown(f"a name of {len(key)} characters", f"at most {_LONGEST_KEY}: patterns are matched against it")
    parts = key.split(".")
    index = next((i for i in range(len(parts) - 1, -1, -1) if _is_component(parts[i])), None)
    if index is None:
        return _without_component(parts)
    component, tail = parts[index], parts[index + 1 :]
    if component in _IGNORED_COMPONENTS:
        return Ignored(_IGNORED_COMPONENTS[component])
    if component in _REFUSED_COMPONENTS:
        return _REFUSED_COMPONENTS[component]
    role = _ROLES[component]
    if role == "B" and tail[-1:] == ["bias"]:
        role, tail = "bias", tail[:-1]
    elif tail[-1:] == ["weight"]:
        tail = tail[:-1]
    elif role != "magnitude":
        return _unknown(
            f"the key ends in {'.'.join(parts[index:])[:80]!r}", f"{component}.weight, or {component}.<adapter>.weight"
        )
    if len(set(tail)) > 1 or len(tail) > 2:
        return _unknown(f"several names after {component}: {'.'.join(tail)[:80]!r}", "one adapter's name at most")
    path = ".".join(_unwrapped(parts[:index]))
    if not 0 < len(path) <= _LONGEST_PATH:
        found = f"a module path of {len(path)} characters before the component"
        return _unknown(found, f"base_model.model.<module path>.{component}, a path of at most {_LONGEST_PATH}")
    return Part(role, path, tail[0] if tail else "")


def parse_path(path: str) -> Place | Refused:
    """Find prefix, layer and leaf of a module path."""
    parts = tuple(path.split("."))
    for part in parts:
        if part.startswith(_TOWERS):
            return Refused(
                "tower",
                f"LoRA on {part!r}, which is not part of the language model",
                "the engine's LoRA covers the language model only; train without it (target_modules as a regex)",
            )
    at = next((i for i in range(len(parts) - 1) if parts[i] in _LAYER_WORDS and _is_number(parts[i + 1])), None)
    if at is None or at + 2 >= len(parts):
        return _outside(parts)
    return Place(parts[:at], int(parts[at + 1]), parts[at + 2 :])


def _is_component(part: str) -> bool:
    return part in _ROLES or part in _IGNORED_COMPONENTS or part in _REFUSED_COMPONENTS


def _unwrapped(parts: list[str]) -> list[str]:
    parts = [part for part in parts if part not in _WRAPPERS]
    at = 0
    while parts[at : at + 1] == ["module"]:
        at += 1
    while parts[at : at + 2] == ["base_model", "model"]:
        at += 2
    return parts[at:]


def _without_component(parts: list[str]) -> Refused:
    last = parts[-1]
    if any(part.startswith(_OTHER_METHOD_WORDS) for part in parts):
        return Refused("peft-type", _OTHER_METHOD, _ONLY_LORA)
    if last == "bias":
        return Refused(
            "bias", "a bias of the base was trained", "lora_weights has no place for a bias; train with bias='none'"
        )
    if last.endswith(("_scale", "_scale_inv", "absmax", "quant_map", "SCB", "qweight", "qzeros", "scales")):
        return Refused(
            "quantised-tensors", "a quantised tensor or its scale", "save the adapter in a floating-point type"
        )
    if last == "weight":
        found = f"not a LoRA factor but a whole trained weight ({'.'.join(_unwrapped(parts)[-3:])})"
        return Refused(
            "modules-to-save", found, "whole matrices (modules_to_save) cannot travel in lora_weights; " + _MERGE
        )
    return _unknown("a key this converter does not know", "only keys that PEFT writes for LoRA")


def _outside(parts: tuple[str, ...]) -> Refused:
    leaf = parts[-1]
    if any(part.startswith(_WHOLE_OUTSIDE) for part in parts):
        return Refused(
            "embedding-lora",
            f"LoRA on {leaf!r}",
            "TensorRT-LLM has no LoRA module for embeddings, lm_head or heads; " + _MERGE,
        )
    return Refused(
        "unknown-module",
        f"{'.'.join(parts)[:120]!r} names no layer",
        "<prefix>.layers.N.<module>, as the base's modules are called",
    )


def _unknown(found: str, wanted: str) -> Refused:
    return Refused("unknown-key", found, wanted)


def _is_number(text: str) -> bool:
    """A layer number as models spell it: no leading zero, which would be a second name for a layer."""
    return text.isascii() and text.isdigit() and len(text) <= 6 and (text == "0" or text[0] != "0")
