"""The engine's own weight file: the base's tensors, fused and in the engine's dtype, as the decoder wants them.

`rank0.safetensors` is to the reference engine what `rank0.engine` is to the compiled one. It is written once by the
build, and mapped at start: no fusing, no conversion, and the untouched original costs no memory.

Legend: V vocabulary, H hidden, F intermediate, Q heads x head_size, K kv_heads x head_size.

    embed [V,H]   head [V,H] (absent if tied)   norm [H]
    <layer>.norm1 [H]  <layer>.qkv [Q+2K,H]  <layer>.qkv_bias [Q+2K]?  <layer>.o [H,Q]  <layer>.o_bias [H]?
    <layer>.norm2 [H]  <layer>.gate_up [2F,H]  <layer>.gate_up_bias [2F]?  <layer>.down [H,F]  <layer>.down_bias [H]?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reference_engine.errors import UnsupportedModel
from reference_engine.llama_config import LlamaConfig
from reference_engine.safetensors_map import TYPES, Array, MappedTensors, base_files, write_tensors

WEIGHTS_FILE = "rank0.safetensors"
KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Engine dtype -> safetensors type of the weight file."""

# our name -> the Hugging Face tensors it is stacked from, within a layer
_FUSED = {
    "norm1": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "norm2": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}


def as_float32(array: Array) -> npt.NDArray[np.float32]:
    """Any stored array as float32; bfloat16 comes as `uint16` bit patterns."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float32)


def write_float32(target: npt.NDArray[np.float32], array: Array) -> None:
    """Write any stored array as float32 into one of its shape, in one pass."""
    if array.dtype == np.uint16:
        np.left_shift(array, 16, out=target.view(np.uint32), dtype=np.uint32)
    else:
        target[...] = array


def as_kind(array: Array, kind: str) -> Array:
    """A stored array in another safetensors type; float32 to bfloat16 rounds to nearest, ties to even."""
    if array.dtype == TYPES[kind]:
        return array
    values = as_float32(array)
    if kind == "F32":
        return values
    if kind == "F16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_engine_weights(
    base: Path, config: LlamaConfig, dtype: str, file: Path, wrote: Callable[[int, int], object] | None = None
) -> None:
    """Fuse and convert the base's tensors into `file`; `wrote(done, total)` counts tensors.

    Raises:
        UnsupportedModel: the base lacks tensors (all named).
        EngineDirectoryError: the base cannot be read, or a tensor is not of the config's shape.
    """
    source = MappedTensors(base_files(base))
    plan = _plan(source, config)
    missing = [name for parts in plan.values() for name in parts if name not in source]
    if missing:
        raise UnsupportedModel(f"{base}: weights lack {', '.join(missing[:8])}" + (" …" if len(missing) > 8 else ""))
    widths = _row_lengths(config)
    shapes = {
        name: (sum(source[part].shape[0] for part in parts), *((widths[name.split(".")[-1]],) if _matrix(name) else ()))
        for name, parts in plan.items()
    }

    def tensors() -> Iterator[Array]:
        for done, parts in enumerate(plan.values(), start=1):
            stored = [as_kind(source[part], KINDS[dtype]) for part in parts]
            yield stored[0] if len(stored) == 1 else np.concatenate(stored)
            source.release()
            if wrote is not None:
                wrote(done, len(plan))

    write_tensors(file, shapes, KINDS[dtype], tensors())


def _matrix(name: str) -> bool:
    return not name.endswith(("norm", "norm1", "norm2", "_bias"))


def _row_lengths(config: LlamaConfig) -> dict[str, int]:
    H = config.hidden_size
    q = config.num_heads * config.head_size
    return {"embed": H, "head": H, "qkv": H, "o": q, "gate_up": H, "down": config.intermediate_size}


def _plan(source: MappedTensors, config: LlamaConfig) -> dict[str, tuple[str, ...]]:
    """Our tensor names, in file order, with the Hugging Face tensors each is stacked from."""
    plan: dict[str, tuple[str, ...]] = {"embed": ("model.embed_tokens.weight",), "norm": ("model.norm.weight",)}
    if not config.tied:
        plan["head"] = ("lm_head.weight",)
    for layer in range(config.num_layers):
        for ours, theirs in _FUSED.items():
            names = tuple(f"model.layers.{layer}.{name}" for name in theirs)
            if not ours.endswith("_bias") or any(name in source for name in names):
                plan[f"{layer}.{ours}"] = names
    return plan
