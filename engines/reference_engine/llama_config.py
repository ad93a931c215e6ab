"""What the decoder must know of a Hugging Face `config.json`, and which models it refuses, by name.

Rule: a model is taken only if every field that changes the mathematics is one this engine computes exactly as
transformers does. Anything else is refused with all reasons in one message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_engine.errors import UnsupportedModel
from trtllm_lora.architectures import REFERENCE as ARCHITECTURES

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one Llama-family decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    tied: bool
    max_positions: int
    """`max_position_embeddings`."""
    rope: Mapping[str, Any]
    """`rope_parameters` / `rope_scaling` with `rope_type` and `rope_theta` always set."""

    @classmethod
    def read(cls, base: Path, *, max_seq_len: int) -> LlamaConfig:
        """Read `config.json` of a Hugging Face directory for contexts up to `max_seq_len` tokens.

        Raises:
            UnsupportedModel: no readable config, or a model outside of the Llama family; all reasons named.
        """
        try:
            raw = json.loads((base / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{base}: no readable config.json: {error}") from None
        problems = _problems(raw, max_seq_len)
        if problems:
            raise UnsupportedModel(f"{base}: " + "; ".join(problems))
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_size=raw.get("head_dim") or hidden // heads,
            norm_epsilon=raw.get("rms_norm_eps", 1e-6),
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_positions=raw["max_position_embeddings"],
            rope=_rope(raw),
        )


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) spelling as one table."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return rope


def _problems(raw: Any, max_seq_len: int) -> list[str]:
    if not isinstance(raw, dict):
        return ["config.json is not an object"]
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        return [f"architecture {architecture} is not computed by the reference engine ({', '.join(ARCHITECTURES)} are)"]
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    problems = [
        f"{key} is {raw.get(key)!r}, a positive whole number is needed"
        for key in sizes
        if not isinstance(raw.get(key), int) or raw[key] < 1
    ]
    if problems:
        return problems
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act {raw['hidden_act']} is not supported (silu is)")
    if raw.get("quantization_config"):
        problems.append("quantised checkpoints are not supported")
    if raw.get("pretraining_tp", 1) != 1:
        problems.append("pretraining_tp above 1 is not supported")
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    if heads % kv_heads:
        problems.append(f"{heads} attention heads cannot share {kv_heads} key/value heads")
    if max_seq_len > raw["max_position_embeddings"]:
        problems.append(f"max_seq_len {max_seq_len} exceeds max_position_embeddings {raw['max_position_embeddings']}")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", True) and window < max_seq_len:
        problems.append(f"sliding_window {window} below max_seq_len {max_seq_len} is not supported")
    return problems + _rope_problems(_rope(raw), raw["max_position_embeddings"], max_seq_len)


def _rope_problems(rope: Mapping[str, Any], max_positions: int, max_seq_len: int) -> list[str]:
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        return [f"RoPE scaling {kind!r} is not supported ({', '.join(ROPE_TYPES)} are)"]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return ["partial_rotary_factor other than 1 is not supported"]
    needed = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor",),
    }.get(kind, ())
    missing = [key for key in needed if not isinstance(rope.get(key), int | float)]
    if missing:
        return [f"RoPE scaling {kind} lacks {', '.join(missing)}"]
    if kind == "dynamic":
        limit = int(rope.get("original_max_position_embeddings") or max_positions)
        if max_seq_len > limit:
            # beyond it transformers rotates new keys by another base than the cached ones: no fixed table is exact
            return [f"RoPE scaling dynamic is exact up to {limit} positions, max_seq_len is {max_seq_len}"]
    return []
