"""One step's work for the decoder: tokens of several sequences, packed one after another.

Legend: T tokens in the step, S sequences, R rows of logits wanted, n adapters in the step, m tokens of the busiest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of one step; all int32."""

    token_ids_T: Ints
    positions_T: Ints
    past_lens_S: Ints
    """Tokens of each sequence whose keys and values are already in its blocks."""
    begins_S1: Ints
    """Where each sequence's tokens begin; the last entry is T."""
    block_ids: Ints
    """The key/value blocks of all sequences, one sequence after another."""
    block_begins_S1: Ints
    logit_rows_R: Ints
    """Tokens whose logits are wanted, as indices into T."""
    groups_nm: Ints
    """For each adapter of the stack the tokens it applies to, filled up with token 0."""
    place_T: Ints
    """Where each token's LoRA delta stands: 0 for none, then the flattened [n, m]; [1] for one delta for all."""
    adapter_T: Ints
    """Each token's place in the stack, 0 for the base (read by engines with DoRA rows)."""


NO_GROUPS = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
"""(groups, place) of a step without adapters: no delta for all tokens."""


def group_tokens(adapter_T: Ints, num_adapters: int) -> tuple[Ints, Ints]:
    """(groups [n, m], place [T]) for tokens with the given place in the stack each, some of it not 0.

    Rows of the busiest adapter set m; the places of the others are computed in vain, which costs less than one
    multiplication per adapter as long as tokens are spread evenly (decode), or belong to few adapters (prefill).
    m is rounded up to a power of two: the runtime compiles and keeps a kernel for every shape it meets.
    """
    counts = np.bincount(adapter_T, minlength=num_adapters + 1)
    width = 1 << (int(counts[1:].max()) - 1).bit_length()
    order = np.argsort(adapter_T, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rank_in_group = np.empty_like(order)
    rank_in_group[order] = np.arange(len(order)) - np.repeat(starts, counts)
    place = np.where(adapter_T == 0, 0, 1 + (adapter_T - 1) * width + rank_in_group)
    groups = np.zeros(num_adapters * width, np.int32)
    groups[place[adapter_T > 0] - 1] = np.flatnonzero(adapter_T)
    return groups.reshape(num_adapters, width), place.astype(np.int32)
