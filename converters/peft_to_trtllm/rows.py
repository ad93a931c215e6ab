"""The plan of a conversion: which pieces of which tensors become which rows.

A plan is made from the header and the config alone, before a byte of weights is read, so every problem of names, ranks
and shapes is known first. `Row`s come out sorted by (layer, module id): the same adapter gives the same bytes, however
its file is ordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peft_to_trtllm.tensor_file import Tensor
from trtllm_lora import MODULES

Index = npt.NDArray[np.intp]


class Factors(NamedTuple):
    """One A and one B of the file, and how they are stored.

    The factors meant are A [r, in] and B [out, r] with ΔW = scale * B @ A; the fields say what must be done to the
    stored tensors to get them. `a` and `b` are the tensors that give A and B, whatever the file calls them.
    """

    a: Tensor
    b: Tensor
    rank: int
    scale: float
    num_experts: int = 1
    """Experts in the pair (target_parameters): A is [E*r, in], expert outermost; B is [out, r*E], expert innermost."""
    a_repeat: int = 1
    """QALoRA: each column of A stands for this many inputs."""
    a_blocks: int = 1
    """BD-LoRA: A is stored as this many blocks of a block-diagonal matrix."""
    b_blocks: int = 1
    swapped: bool = False
    """The pair adapts the transposed weight: `a` is the file's lora_B [in, r*E], `b` its lora_A [E*r, out]."""

    @property
    def d_in(self) -> int:
        """Width of A; of one expert's."""
        return self.a.shape[0] if self.swapped else self.a.shape[1] * self.a_repeat * self.a_blocks

    @property
    def d_out(self) -> int:
        """Rows of B; of one expert's."""
        return self.b.shape[1] if self.swapped else self.b.shape[0]


class Block(NamedTuple):
    """A pair of factors placed in a row: rows `b_rows` of B become rows `outs` of the target, at rank `rank_at`.

    One block holds one A, whole: the range of a row is balanced between the A and the B of each block.
    """

    factors: Factors
    b_rows: slice | Index = slice(None)
    outs: slice | Index = slice(None)
    source_expert: int = 0
    """Which expert of the pair."""
    expert: int = 0
    """Which expert of the row."""
    rank_at: int = 0


class Row(NamedTuple):
    """One row of lora_weights: A [E, r, in] then B [E, out, r] then, with DoRA, the magnitude [out]."""

    module: str
    layer: int
    rank: int
    d_in: int
    d_out: int
    blocks: tuple[Block, ...]
    path: str
    """Module path, for messages."""
    num_experts: int = 1
    magnitude: Tensor | None = None

    @property
    def module_id(self) -> int:
        """TensorRT-LLM's id."""
        return MODULES[self.module].id

    @property
    def size(self) -> int:
        """Elements before padding."""
        extra = self.d_out if self.magnitude else 0
        return self.num_experts * self.rank * (self.d_in + self.d_out) + extra


class Plan(NamedTuple):
    """Every row of the bundle, in its order."""

    rows: tuple[Row, ...]
    scales: Mapping[str, float]
    """Module path -> scale."""

    @property
    def width(self) -> int:
        """Elements of the longest row."""
        return max(row.size for row in self.rows)

    @property
    def columns(self) -> int:
        """Columns of lora_config: stock Triton configs declare three, DoRA needs the fourth."""
        return 4 if any(row.magnitude for row in self.rows) else 3

    def config(self) -> npt.NDArray[np.int32]:
        """`lora_config` [1, rows, 3 or 4] int32: module id, layer, rank, is_dora."""
        table = np.zeros((1, len(self.rows), self.columns), np.int32)
        for i, row in enumerate(self.rows):
            table[0, i, :3] = (row.module_id, row.layer, row.rank)
            if row.magnitude:
                table[0, i, 3] = 1
        return table
