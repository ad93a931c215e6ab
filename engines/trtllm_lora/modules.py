"""The LoRA modules of TensorRT-LLM 1.2: id, name, dimensions.

Source: `cpp/tensorrt_llm/runtime/loraModule.cpp`, `cpp/include/tensorrt_llm/runtime/loraModule.h`.

Naming trap: Hugging Face's *gate_proj* is `mlp_h_to_4h` (5) and *up_proj* is `mlp_gate` (7). The two have equal
dimensions, so a swap passes every check of the engine and answers with garbage.

Legend: H hidden, F intermediate, Q heads x head_size, K kv_heads x head_size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trtllm_lora.shape import EngineShape

TpSplit = Literal["out", "in", "none"]


@dataclass(frozen=True, slots=True)
class Module:
    """One LoRA module: its id in `lora_config`, its name, and which side tensor parallelism cuts."""

    id: int
    name: str
    tp_split: TpSplit


_NAMES: tuple[tuple[str, TpSplit], ...] = (
    ("attn_qkv", "out"),
    ("attn_q", "out"),
    ("attn_k", "out"),
    ("attn_v", "out"),
    ("attn_dense", "in"),
    ("mlp_h_to_4h", "out"),
    ("mlp_4h_to_h", "in"),
    ("mlp_gate", "out"),
    ("cross_attn_qkv", "out"),
    ("cross_attn_q", "out"),
    ("cross_attn_k", "out"),
    ("cross_attn_v", "out"),
    ("cross_attn_dense", "in"),
    ("moe_h_to_4h", "out"),
    ("moe_4h_to_h", "in"),
    ("moe_gate", "out"),
    ("moe_router", "none"),
    ("mlp_router", "none"),
    ("mlp_gate_up", "out"),
)

MODULES: dict[str, Module] = {name: Module(i, name, split) for i, (name, split) in enumerate(_NAMES)}
"""All modules of the 1.2 line by name (ids 0-18; 19-25 exist only in runtimes without engines)."""

MODULE_BY_ID: dict[int, Module] = {module.id: module for module in MODULES.values()}

LLAMA_MODULES: tuple[str, ...] = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_dense",
    "mlp_h_to_4h",
    "mlp_4h_to_h",
    "mlp_gate",
)
"""What `--lora_target_modules` lists for full coverage of a Llama-family engine."""


def module_name(module_id: int) -> str:
    """Name of a module id as the runtime's error texts print it (`INVALID` for an unknown id)."""
    module = MODULE_BY_ID.get(module_id)
    return module.name if module else "INVALID"


def dims(name: str, shape: EngineShape) -> tuple[int, int]:
    """(in, out) of a module in an engine, full (unsplit), as the C++ runtime computes them.

    `attn_dense` takes H, not Q, as its input in every version of the runtime that was read: with Q != H its
    rows would be cut in the wrong place, so a converter must refuse them.

    Raises:
        KeyError: no such module name.
    """
    H, F, E = shape.hidden_size, shape.intermediate_size, shape.num_experts
    Q, K = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    table: dict[str, tuple[int, int]] = {
        "attn_qkv": (H, Q + 2 * K),
        "attn_q": (H, Q),
        "attn_k": (H, K),
        "attn_v": (H, K),
        "attn_dense": (H, H),
        "mlp_h_to_4h": (H, F),
        "mlp_4h_to_h": (F, H),
        "mlp_gate": (H, F),
        "moe_h_to_4h": (H * E, F * E),
        "moe_4h_to_h": (F * E, H * E),
        "moe_gate": (H * E, F * E),
        "moe_router": (H, E),
        "mlp_router": (H, 1),
        "mlp_gate_up": (H, 2 * F),
    }
    return table[name.removeprefix("cross_")]


def local_dims(name: str, shape: EngineShape) -> tuple[int, int]:
    """(in, out) of a module on one tensor-parallel rank."""
    d_in, d_out = dims(name, shape)
    split = MODULES[name].tp_split
    if split == "out":
        return d_in, d_out // shape.tp_size
    if split == "in":
        return d_in // shape.tp_size, d_out
    return d_in, d_out
