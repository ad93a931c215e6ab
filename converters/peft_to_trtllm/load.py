"""The factors of a block, read and brought into the form [r, in] and [out, r], still in their storage type."""

from __future__ import annotations

import numpy as np

from peft_to_trtllm.rounding import Array
from peft_to_trtllm.rows import Block, Factors
from peft_to_trtllm.tensor_file import Tensor, TensorFile


class Loader:
    """Reads the factors of one file. The arrays are valid until the next one of their kind is asked for."""

    def __init__(self, file: TensorFile) -> None:
        self.file = file
        self._experts: Array | None = None
        self._experts_of: Tensor | None = None

    def a(self, block: Block) -> Array:
        """A [r, in]."""
        factors = block.factors
        if factors.swapped:
            turned = self._turned(factors.a, factors)[block.source_expert].T
            return np.ascontiguousarray(turned)
        a = self._stacked(factors.a, "A", block)
        if factors.a_blocks > 1:
            a = _block_diagonal(a, factors.a_blocks)
        if factors.a_repeat > 1:
            a = np.repeat(a, factors.a_repeat, axis=1)
        return a

    def b(self, block: Block) -> Array:
        """B [out, r], its rows in the target's order, without the scale."""
        factors = block.factors
        if factors.swapped:
            b = self._stacked(factors.b, "B", block).T
        elif factors.num_experts > 1:
            b = self._turned(factors.b, factors)[block.source_expert]
        else:
            b = self.file.read(factors.b, "B")
        if factors.b_blocks > 1:
            b = _block_diagonal(b, factors.b_blocks)
        return np.ascontiguousarray(b[block.b_rows])

    def _stacked(self, tensor: Tensor, scratch: str, block: Block) -> Array:
        """lora_A [E*r, x], expert outermost: one expert's [r, x]."""
        stored, factors = self.file.read(tensor, scratch), block.factors
        if factors.num_experts > 1:
            stored = stored.reshape(factors.num_experts, factors.rank, -1)[block.source_expert]
        return stored

    def _turned(self, tensor: Tensor, factors: Factors) -> Array:
        """lora_B [x, r*E], expert innermost, as [E, x, r]: turned once for all experts."""
        if self._experts is None or self._experts_of is not tensor:
            stored = self.file.read(tensor, "turned")
            turned = stored.reshape(stored.shape[0], factors.rank, factors.num_experts).transpose(2, 0, 1)
            self._experts, self._experts_of = np.ascontiguousarray(turned), tensor
        return self._experts


def _block_diagonal(stored: Array, blocks: int) -> Array:
    rows, columns = stored.shape[0] // blocks, stored.shape[1]
    full = np.zeros((rows * blocks, columns * blocks), stored.dtype)
    for i in range(blocks):
        full[i * rows : (i + 1) * rows, i * columns : (i + 1) * columns] = stored[i * rows : (i + 1) * rows]
    return full
