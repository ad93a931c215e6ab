"""Which rows of B belong to which target module.

    stacked   [q; k; v] or [gate; up], each part in one piece
    grouped   for each kv head: its queries, its key, its value
    codegen   four blocks, each [q; v; k]

One A serves every part: a fused matrix split by rows of B is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from peft_to_trtllm.base import Base
from peft_to_trtllm.dims import SYMBOLS, Dimensions
from peft_to_trtllm.families import Leaf
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rows import Index

_CODEGEN_BLOCKS = 4


class Piece(NamedTuple):
    """The part of a leaf that one target module takes."""

    module: str
    b_rows: slice | Index
    num_out: int


def split_leaf(
    leaf: Leaf, layer: int, d_out: int, where: str, base: Base | None, dims: Dimensions, problems: Findings
) -> list[Piece]:
    """The pieces of a leaf with `d_out` rows; empty with the reason in `problems`."""
    if not leaf.fused:
        return [Piece(leaf.modules[0], slice(None), d_out)]
    if leaf.modules == ("mlp_h_to_4h", "mlp_gate"):
        sizes: list[int | None] = [d_out // 2, d_out - d_out // 2]
    else:
        sizes = [dims.known(SYMBOLS[module][1], layer) for module in leaf.modules]
    known = [size for size in sizes if size is not None]
    kv_heads = base.kv_heads if base else None
    if len(known) < len(sizes) or (leaf.order == "grouped" and kv_heads is None):
        problems.add(
            "base-needed",
            where,
            "fused q/k/v rows cannot be cut without the numbers of heads, kv heads and their size",
            "the base's config.json with num_attention_heads, num_key_value_heads and head_dim (--base)",
        )
        return []
    parts = " + ".join(leaf.modules)
    if sum(known) != d_out:
        problems.add(
            "shape",
            where,
            f"shape mismatch: {d_out} output rows where {parts} have {' + '.join(map(str, known))}",
            "an adapter trained on this base; give the config.json of the base it was trained on",
        )
        return []
    groups = {"stacked": 1, "grouped": kv_heads or 1, "codegen": _CODEGEN_BLOCKS}[leaf.order]
    if any(size % groups for size in known):
        problems.add(
            "shape",
            where,
            f"{parts} have {' + '.join(map(str, known))} rows, which {groups} groups cannot share",
            "a base's config.json whose heads are a multiple of its kv heads",
        )
        return []
    rows = _row_sets(known, groups)
    return [Piece(module, b_rows, size) for module, b_rows, size in zip(leaf.modules, rows, known, strict=True)]


def _row_sets(sizes: list[int], groups: int) -> list[slice | Index]:
    """Rows of each part where `groups` groups follow each other, each with its share of every part."""
    shares = [size // groups for size in sizes]
    ends = np.cumsum(shares).tolist()
    if groups == 1:
        return [slice(end - share, end) for end, share in zip(ends, shares, strict=True)]
    every = np.arange(sum(sizes)).reshape(groups, -1)
    return [every[:, end - share : end].reshape(-1) for end, share in zip(ends, shares, strict=True)]
