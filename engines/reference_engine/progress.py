"""What a listener is told of one sequence: a snapshot, made in the loop, that nothing changes afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference_engine.kv_blocks import BlockPool
from reference_engine.request import GenerationRequest
from reference_engine.sequence import Sequence

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Timing:
    """`return_perf_metrics`: steady-clock nanoseconds and block counts; 0 for what has not happened."""

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    """Non-zero on the final response only (llmRequest.h, updatePerfMetrics)."""
    new_blocks: int
    reused_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of one sequence, and with the final one everything that was asked for."""

    index: int
    tokens: tuple[int, ...]
    """Streaming: the new ones. Else the whole answer, with the prompt unless it is excluded."""
    num_generated: int
    final: bool
    timing: Timing
    log_probs: tuple[float, ...] = ()
    """Of the answer's tokens in `tokens`."""
    cum_log_prob: float = 0.0
    context_logits: Floats | None = None
    generation_logits: Floats | None = None

    @classmethod
    def of(cls, sequence: Sequence, pool: BlockPool) -> Progress:
        """Snapshot of a running or just finished sequence; marks its tokens as told."""
        request, final = sequence.request, sequence.finished is not None
        new = slice(sequence.num_told, sequence.num_generated)
        sequence.num_told = sequence.num_generated
        begin = sequence.num_prompt if request.streaming or request.exclude_input else 0
        tokens = sequence.tokens[begin:][new] if request.streaming else sequence.tokens[begin:]
        generation = sequence.generation_logits[new]
        context = np.concatenate(sequence.context_logits) if sequence.context_logits else None
        sequence.context_logits = []
        return cls(
            index=sequence.index,
            tokens=tuple(tokens),
            num_generated=sequence.num_generated,
            final=final,
            timing=_timing(sequence, pool),
            log_probs=tuple(sequence.log_probs[new]),
            cum_log_prob=sum(sequence.log_probs),
            context_logits=context,
            generation_logits=np.stack(generation) if generation else None,
        )

    @classmethod
    def unstarted(cls, request: GenerationRequest, index: int) -> Progress:
        """The last word to a request that was cancelled before it ran."""
        keep_prompt = not (request.streaming or request.exclude_input)
        timing = Timing(request.arrival_ns, 0, 0, 0, 0, 0, 0)
        return cls(index, request.token_ids if keep_prompt else (), 0, True, timing)


def _timing(sequence: Sequence, pool: BlockPool) -> Timing:
    used = pool.blocks_for(len(sequence.tokens))
    return Timing(
        arrival_ns=sequence.request.arrival_ns,
        first_scheduled_ns=sequence.first_scheduled_ns,
        first_token_ns=sequence.first_token_ns,
        last_token_ns=sequence.last_token_ns,
        new_blocks=used - sequence.reused_blocks,
        reused_blocks=sequence.reused_blocks,
        total_blocks=used,
    )
