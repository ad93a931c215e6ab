"""Facts of the base model: what row orders and dimensions need.

They come from the base's config.json (Hugging Face), whose families spell the same size in a dozen ways, or from an
engine's config.json. A size nobody states is None, and what depends on it is refused, never assumed.

Legend: H hidden, F intermediate, Q heads x head size, K kv heads x head size, E experts, M expert intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from peft_to_trtllm.errors import InputError
from peft_to_trtllm.strict_json import JsonProblem, parse_object

_CONFIG_LIMIT = 16 << 20

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "head_size": ("head_dim", "head_size", "kv_channels", "attention_head_size"),
    "inter": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "inner_hidden_size"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_inter": ("moe_intermediate_size", "expert_ffn_size"),
}

_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a vision-language config.json keeps the language model's own config."""

_FOUR_TIMES = frozenset(
    {"gpt2", "gpt_bigcode", "bloom", "falcon", "gptj", "codegen", "gpt_neo", "mpt", "RefinedWeb", "RefinedWebModel"}
)
"""Families whose intermediate size is 4 x hidden where the config does not state it."""

_NO_GROUPS = frozenset(
    {"gpt2", "gptj", "codegen", "gpt_neo", "gpt_neox", "bloom", "opt", "xglm", "persimmon", "mpt", "phi-msft", "qwen"}
)
"""Families with as many kv heads as heads, whatever else their config says."""


class Base(NamedTuple):
    """What is known of the base. Sizes are whole numbers, or None where nobody states them."""

    source: str
    """File the facts come from, for messages."""
    model_type: str
    raw: Mapping[str, Any] = MappingProxyType({})
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    inter: int | None = None
    inter_of_layer: tuple[int | None, ...] = ()
    """Intermediate size per layer, where they differ."""
    kv_heads_of_layer: tuple[int | None, ...] = ()
    """kv heads per layer, where they differ."""
    experts: int | None = None
    expert_inter: int | None = None
    dtype: str | None = None

    @property
    def q(self) -> int | None:
        """Output width of the queries."""
        return self.heads * self.head_size if self.heads and self.head_size else None

    @property
    def kv(self) -> int | None:
        """Output width of the keys, and of the values."""
        return self.kv_heads * self.head_size if self.kv_heads and self.head_size else None

    @property
    def layers_alike(self) -> bool:
        """Whether every layer has the same modules, as far as the config tells."""
        kinds = self.raw.get("layer_types")
        mixed = isinstance(kinds, list) and any(str(kind).startswith(("linear", "mamba", "conv")) for kind in kinds)
        return not (mixed or self.experts or self.kv_heads_of_layer)

    def kv_of(self, layer: int) -> int | None:
        """The same in one layer."""
        if layer >= len(self.kv_heads_of_layer):
            return self.kv
        kv_heads = self.kv_heads_of_layer[layer]
        return kv_heads * self.head_size if kv_heads and self.head_size else None

    def size(self, symbol: str, layer: int) -> int | None:
        """Size of one symbol of the legend in a layer; None where unknown."""
        match symbol:
            case "F":
                return self.inter_of_layer[layer] if layer < len(self.inter_of_layer) else self.inter
            case "K":
                return self.kv_of(layer)
            case "1":
                return 1
        return {"H": self.hidden, "Q": self.q, "E": self.experts, "M": self.expert_inter}[symbol]


def read_base(path: Path) -> Base:
    """Facts from a base's config.json, or from the directory that holds it.

    Raises:
        InputError: not there, or not a model's config.json (an adapter or an engine is named as such).
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as source:
            config = parse_object(source.read(_CONFIG_LIMIT + 1), limit=_CONFIG_LIMIT)
    except JsonProblem as problem:
        raise InputError(f"{file}: {problem}") from None
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}; --base wants the base model's config.json") from None
    if "peft_type" in config:
        raise InputError(f"{file}: this is an adapter's config; --base wants the base model's config.json")
    if "pretrained_config" in config:
        raise InputError(f"{file}: this is an engine's config.json; give it with --engine")
    base = base_from_config(config, source=str(file))
    if not base.model_type:
        raise InputError(f"{file}: no model_type: this is no model's config.json; --base wants the base model's")
    return base


def base_from_config(config: Mapping[str, Any], *, source: str) -> Base:
    """Facts from a parsed Hugging Face config (the language part of a vision-language one)."""
    outer = config
    for _ in range(3):
        part = next((config[name] for name in _LANGUAGE_PARTS if isinstance(config.get(name), dict)), None)
        if part is None:
            break
        config = part
    model_type = config.get("model_type") or outer.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    sizes = {name: _first(config, keys) for name, keys in _SPELLINGS.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    if sizes["head_size"] is None and hidden and heads and hidden % heads == 0:
        sizes["head_size"] = hidden // heads
    _complete_inter(config, model_type, sizes)
    per_layer = config.get("intermediate_size")
    blocks = _block_configs(config, hidden, heads)
    dtype = config.get("torch_dtype") or config.get("dtype") or outer.get("torch_dtype") or outer.get("dtype")
    return Base(
        source=source,
        model_type=model_type,
        raw=config,
        kv_heads=_kv_heads(config, model_type, heads),
        inter_of_layer=_sizes(per_layer) or tuple(inter for _, inter in blocks),
        kv_heads_of_layer=tuple(kv_heads for kv_heads, _ in blocks),
        dtype=dtype if isinstance(dtype, str) else None,
        **sizes,
    )


def _complete_inter(config: Mapping[str, Any], model_type: str, sizes: dict[str, int | None]) -> None:
    """Intermediate sizes where a family states them in a way of its own."""
    hidden, inter = sizes["hidden"], sizes["inter"]
    if inter is None and model_type in _FOUR_TIMES and hidden:
        inter = hidden * (_first(config, ("expansion_ratio",)) or 4)
    if sizes["experts"] and sizes["expert_inter"] is None:
        sizes["expert_inter"] = inter
    if model_type == "qwen" and inter:
        inter //= 2  # the first Qwen states gate and up together
    if model_type.startswith("llama4"):
        inter = _first(config, ("intermediate_size_mlp",)) or inter
    sizes["inter"] = inter


def _kv_heads(config: Mapping[str, Any], model_type: str, heads: int | None) -> int | None:
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        if config.get("new_decoder_architecture") or model_type == "RefinedWeb":
            return _first(config, ("num_kv_heads", "n_head_kv")) or heads
        return 1 if config.get("multi_query", True) else heads
    if model_type == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    if model_type == "chatglm":
        return _first(config, ("multi_query_group_num",)) if config.get("multi_query_attention") else heads
    for name in ("attn_config", "attention_config"):  # MPT, DBRX
        nested = config.get(name)
        if isinstance(nested, dict) and (found := _first(nested, ("kv_n_heads",))):
            return found
    if model_type in _NO_GROUPS:
        return heads
    return _first(config, ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")) or heads


def _block_configs(
    config: Mapping[str, Any], hidden: int | None, heads: int | None
) -> list[tuple[int | None, int | None]]:
    """(kv heads, intermediate size) of each layer of a Nemotron-NAS base; empty for all others.

    The sizes follow the model's own code: heads / n_heads_in_group, and 2/3 * ffn_mult * hidden rounded up to 256.
    """
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or not hidden or not heads:
        return []
    sizes: list[tuple[int | None, int | None]] = []
    for block in blocks:
        attention, ffn = (block.get("attention"), block.get("ffn")) if isinstance(block, dict) else (None, None)
        group = _first(attention, ("n_heads_in_group",)) if isinstance(attention, dict) else None
        factor = ffn.get("ffn_mult") if isinstance(ffn, dict) else None
        inter = None
        if isinstance(factor, int | float) and 0 < factor < 1000:
            inter = -(-int(2 * factor * hidden / 3) // 256) * 256
        sizes.append((heads // group if group else None, inter))
    return sizes


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value < 1 << 31:
            return value
    return None


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(item) is int and item > 0 for item in value):
        return tuple(value)
    return ()
