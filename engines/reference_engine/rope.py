"""Rotary position tables, as transformers' `modeling_rope_utils` computes them (checked against it in the tests).

Tables are float32 `[positions, head_size]`; cosine and sine repeat for the two halves of a head.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from reference_engine.llama_config import LlamaConfig

Floats = npt.NDArray[np.float32]


def rotary_tables(config: LlamaConfig, positions: int) -> tuple[Floats, Floats]:
    """(cos, sin) for positions 0 .. `positions` - 1, attention scaling of yarn multiplied in."""
    frequencies, scaling = _frequencies(config)
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)
    angles = np.concatenate([angles, angles], axis=1)
    return (np.cos(angles) * scaling).astype(np.float32), (np.sin(angles) * scaling).astype(np.float32)


def _frequencies(config: LlamaConfig) -> tuple[Floats, np.float32]:
    rope, size = config.rope, config.head_size
    exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    base = (1.0 / np.float32(rope["rope_theta"]) ** exponent).astype(np.float32)
    kind = rope["rope_type"]
    if kind == "linear":
        return base / np.float32(rope["factor"]), np.float32(1)
    if kind == "llama3":
        return _llama3(config, base), np.float32(1)
    if kind == "yarn":
        return _yarn(config, base)
    return base, np.float32(1)  # dynamic is the default within its original length (llama_config refuses more)


def _llama3(config: LlamaConfig, base: Floats) -> Floats:
    rope = config.rope
    old_length = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelength = np.float32(2 * math.pi) / base
    smooth = (np.float32(old_length) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * base / np.float32(factor) + smooth * base
    scaled = np.where(wavelength > old_length / low, base / np.float32(factor), base)
    medium = (wavelength >= old_length / high) & (wavelength <= old_length / low)
    return np.where(medium, blended, scaled).astype(np.float32)


def _yarn(config: LlamaConfig, base: Floats) -> tuple[Floats, np.float32]:
    rope, size, theta = config.rope, config.head_size, config.rope["rope_theta"]
    old_length = rope.get("original_max_position_embeddings") or config.max_positions
    factor = rope["factor"]

    def dimension(rotations: float) -> float:
        return size * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-3))
    keep = 1 - np.clip(ramp, 0, 1)
    frequencies = base / np.float32(factor) * (1 - keep) + base * keep
    return frequencies.astype(np.float32), np.float32(_yarn_scaling(config, factor))


def _yarn_scaling(config: LlamaConfig, factor: float) -> float:
    rope = config.rope
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return mscale(1.0)
