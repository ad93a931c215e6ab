"""What runs in the next step: pure decisions over the waiting and the running sequences.

Rules:
1. First come, first served. A request waits until a place in the batch, its blocks and its adapter's device pages are
   free; one that only waits for device pages lets others pass, as in the runtime's capacity scheduler.
2. Every sequence that is past its prompt gets one token in every step.
3. Prompts are computed in chunks. While others stream, chunks are short enough that a step takes about twice a step
   without them at most; with nobody waiting for a token they are as long as `max_num_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass

from reference_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence in the next step."""

    sequence: Sequence
    num_tokens: int


FEW_ADAPTERS, GROUP = 4, 8
"""Beside more adapters than FEW the tokens of each make a group of GROUP, if they fit: wider ones cost all of them."""
LEAST = 4


def prefill_budget(num_decoding: int, num_adapters: int, max_num_tokens: int) -> int:
    """Prompt tokens allowed beside so many decoding sequences.

    A step's cost is flat up to about 8 tokens (it reads all weights) and then grows with their number. A chunk beside
    adapters also widens the groups of all of them, to a power of two (batch.py): one token more can double that part.
    """
    if num_decoding == 0:
        return max_num_tokens
    if num_adapters == 0:
        return min(12 + num_decoding // 4, max_num_tokens)
    return min(12 if num_adapters <= FEW_ADAPTERS else GROUP, max_num_tokens)


def plan_step(running: Items[Sequence], max_num_tokens: int) -> list[Chunk]:
    """The next step's chunks: every decoding sequence, then prompts in order of arrival."""
    chunks = [Chunk(sequence, 1) for sequence in running if not sequence.prefilling]
    tokens = Counter(chunk.sequence.task for chunk in chunks)
    adapters = {sequence.task for sequence in running if sequence.task is not None}
    left = prefill_budget(len(chunks), len(adapters), max_num_tokens)
    groups_matter = bool(chunks) and len(adapters) > FEW_ADAPTERS
    for sequence in running:
        if sequence.prefilling and left > 0:
            size = min(len(sequence.tokens) - sequence.num_computed, left)
            if groups_matter and sequence.task is not None:
                size = min(size, max(LEAST, GROUP - tokens[sequence.task]))
            chunks.append(Chunk(sequence, size))
            tokens[sequence.task] += size
            left -= size
    return chunks
