"""Separate rows -> the engine's fused ids, on request: attn_qkv (0) and mlp_gate_up (18).

    attn_qkv      B rows [q; k; v]
    mlp_gate_up   B rows [up; gate]: the halves of Hugging Face's gate_up_proj swapped

Parts that share one A (they were one fused matrix in the adapter) stay one A; parts with their own A are stacked, ranks
adding up, B block-diagonal: exact either way. Under tensor parallelism the engine cuts B into contiguous row blocks, so
every part is dealt out rank by rank: q0, k0, v0, q1, k1, v1, …
Source: TensorRT-LLM `tensorrt_llm/lora_manager.py` prepare_fused_lora_modules_for_tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from peft_to_trtllm.dims import SYMBOLS, Dimensions
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rows import Block, Index, Plan, Row

PARTS: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "mlp_gate_up": ("mlp_gate", "mlp_h_to_4h"),
}
"""Fused module -> its parts in the order of its rows."""


def fuse(plan: Plan, fused: Sequence[str], tp_size: int, dims: Dimensions, problems: Findings) -> Plan:
    """The plan with the parts of every module in `fused` joined; what cannot be joined goes into `problems`."""
    rows = list(plan.rows)
    for module in fused:
        parts = PARTS[module]
        layers = sorted({row.layer for row in rows if row.module in parts})
        for layer in layers:
            here = {row.module: row for row in rows if row.layer == layer and row.module in parts}
            joined = _join(module, here, tp_size, dims, problems)
            rows = [row for row in rows if row.layer != layer or row.module not in parts]
            if joined:
                rows.append(joined)
    return plan._replace(rows=tuple(sorted(rows, key=lambda row: (row.layer, row.module_id))))


def _join(module: str, parts: Mapping[str, Row], tp_size: int, dims: Dimensions, problems: Findings) -> Row | None:
    first = next(iter(parts.values()))
    where = f"{module} of layer {first.layer}"
    if any(row.magnitude for row in parts.values()):
        problems.add("fused", where, "DoRA on a fused id", "separate ids (no --fused) for a DoRA adapter")
        return None
    sizes = []
    for name in PARTS[module]:
        size = parts[name].d_out if name in parts else dims.known(SYMBOLS[name][1], first.layer)
        if size is None:
            problems.add(
                "base-needed", where, f"the width of the absent {name} is not known", "the base's config.json (--base)"
            )
            return None
        if size % tp_size:
            problems.add(
                "fused",
                where,
                f"{name} has {size} rows, which {tp_size} ranks cannot share",
                "separate ids (no --fused)",
            )
            return None
        sizes.append(size)
    outs = dict(zip(PARTS[module], _outs(sizes, tp_size), strict=True))
    blocks, rank = _blocks(parts, outs)
    return Row(module, first.layer, rank, first.d_in, sum(sizes), blocks, first.path)


def _outs(sizes: Sequence[int], tp_size: int) -> list[Index]:
    """Rows of the fused matrix that each part takes."""
    outs: list[list[Index]] = [[] for _ in sizes]
    at = 0
    for _ in range(tp_size):
        for part, size in zip(outs, sizes, strict=True):
            part.append(np.arange(at, at + size // tp_size))
            at += size // tp_size
    return [np.concatenate(part) for part in outs]


def _blocks(parts: Mapping[str, Row], outs: Mapping[str, Index]) -> tuple[tuple[Block, ...], int]:
    groups: dict[int, list[tuple[Block, Index]]] = {}
    for name, row in parts.items():
        (block,) = row.blocks
        groups.setdefault(id(block.factors), []).append((block, outs[name]))
    blocks, rank = [], 0
    for group in groups.values():
        factors = group[0][0].factors
        every = np.arange(factors.d_out)
        b_rows = np.concatenate([every[block.b_rows] for block, _ in group])
        blocks.append(Block(factors, b_rows, np.concatenate([out for _, out in group]), rank_at=rank))
        rank += factors.rank
    return tuple(blocks), rank
