"""From the planned chunks to the arrays of one step (batch.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference_engine.batch import NO_GROUPS, Batch, group_tokens
from reference_engine.kv_blocks import BlockPool
from reference_engine.lora_stack import LoraStack
from reference_engine.scheduler import Chunk


def build_batch(chunks: Sequence[Chunk], pool: BlockPool, stack: LoraStack) -> Batch:
    """Arrays for the decoder; `stack` already holds the chunks' adapters."""
    sizes = np.array([chunk.num_tokens for chunk in chunks], np.int32)
    past = np.array([chunk.sequence.num_computed for chunk in chunks], np.int32)
    begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    used = [pool.blocks_for(int(end)) for end in past + sizes]
    adapters = np.repeat(np.array([stack.place(chunk.sequence.task) for chunk in chunks], np.int32), sizes)
    groups, place = NO_GROUPS if stack.only_base else group_tokens(adapters, stack.num_held)
    ends = [(int(begins[i + 1]), num_logit_rows(chunk)) for i, chunk in enumerate(chunks)]
    return Batch(
        token_ids_T=np.array([token for chunk in chunks for token in _tokens(chunk)], np.int32),
        positions_T=np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in zip(past, sizes, strict=True)]),
        past_lens_S=past,
        begins_S1=begins,
        block_ids=np.array([b for c, n in zip(chunks, used, strict=True) for b in c.sequence.blocks[:n]], np.int32),
        block_begins_S1=np.concatenate([[0], np.cumsum(used)]).astype(np.int32),
        logit_rows_R=np.concatenate([np.arange(end - rows, end, dtype=np.int32) for end, rows in ends]),
        groups_nm=groups,
        place_T=place,
        adapter_T=adapters,
    )


def num_logit_rows(chunk: Chunk) -> int:
    """Rows of logits a chunk needs: all of a prompt's for context logits, else the last one."""
    wants_all = chunk.sequence.request.wants_context_logits and not chunk.sequence.num_generated
    return chunk.num_tokens if wants_all else 1


def _tokens(chunk: Chunk) -> list[int]:
    begin = chunk.sequence.num_computed
    return chunk.sequence.tokens[begin : begin + chunk.num_tokens]
