"""Where LoRA enters the decoder: per layer up to four sites, each in front of one fused weight.

A site takes one input and adds to the output of its weight. Its parts are the blocks of that output which have a
matrix B of their own; the matrices A of the parts stand side by side in one.

    site      weight            parts (LoRA module)
    qkv       [Q+2K, H]         attn_q, attn_k, attn_v        attn_qkv gives one A and a B for all three
    o         [H, Q]            attn_dense
    gate_up   [2F, H]           mlp_h_to_4h (gate), mlp_gate (up)    mlp_gate_up likewise, its B being [up; gate]
    down      [H, F]            mlp_4h_to_h

Naming trap: Hugging Face's gate_proj is `mlp_h_to_4h`, its up_proj is `mlp_gate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_lora import EngineShape


@dataclass(frozen=True, slots=True)
class Site:
    """One place in every layer where adapters add to a fused weight's output."""

    name: str
    d_in: int
    parts: tuple[str, ...]
    """LoRA modules, in the order of the output's blocks."""
    widths: tuple[int, ...]
    """Width of each part's block of the output."""
    fused: str | None
    """The LoRA module that covers all parts with one A."""
    fused_order: tuple[int, ...]
    """Parts in the order in which the fused module's B stacks them."""

    @property
    def d_out(self) -> int:
        """Width of the whole output."""
        return sum(self.widths)


def lora_sites(shape: EngineShape) -> tuple[Site, ...]:
    """The sites of an engine: only those with at least one enabled module, only if LoRA is on at all."""
    if not shape.lora_enabled:
        return ()
    H, F = shape.hidden_size, shape.intermediate_size
    Q, K = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    sites = (
        Site("qkv", H, ("attn_q", "attn_k", "attn_v"), (Q, K, K), "attn_qkv", (0, 1, 2)),
        Site("o", Q, ("attn_dense",), (H,), None, (0,)),
        Site("gate_up", H, ("mlp_h_to_4h", "mlp_gate"), (F, F), "mlp_gate_up", (1, 0)),
        Site("down", F, ("mlp_4h_to_h",), (H,), None, (0,)),
    )
    return tuple(s for s in sites if {*s.parts, s.fused} & set(shape.lora_modules))
