"""One Triton request: gathers what its sequences tell and answers with the contract's output tensors.

Rules:
1. The last answer carries the FINAL flag, whatever happened before; nothing follows it.
2. Only outputs that the client asked for are built; those behind a switch need the switch too.
3. `last_token_time_ns` and the other counters come only with `return_perf_metrics`.

Shapes have a leading dimension of 1: every answer is of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference_engine.progress import Progress

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer to Triton: outputs, or an error text, or (with neither) the FINAL flag alone."""

    outputs: Mapping[str, Array] | None = None
    error: str | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which outputs a request is answered with."""

    outputs: frozenset[str]
    """Names the client asked for."""
    perf_metrics: bool = False
    log_probs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    sequence_index: bool = False
    """More than one sequence per prompt."""
    batch_index: bool = False
    """More than one prompt."""


class Ticket:
    """Counts a Triton request's open sequences and sends its replies, from the outbox thread."""

    def __init__(self, wanted: Wanted, num_sequences: int, send: Callable[[Reply], None]) -> None:
        """`num_sequences` over all prompts; `send` passes a reply to Triton."""
        self._wanted, self._open, self._send = wanted, num_sequences, send
        self.cancelled = False
        """Set when the client has gone: from then on only the FINAL flag is sent."""

    @property
    def done(self) -> bool:
        """Whether the last reply was sent."""
        return self._open == 0

    def listener(self, row: int, num_input: int, num_sequences: int) -> TicketRow:
        """Who listens for the prompt in a row of the batch."""
        return TicketRow(self, row, num_input, num_sequences)

    def answer(self, outputs: Mapping[str, Array], final: bool) -> None:
        """One sequence's news."""
        self._open -= final
        if not self.cancelled:
            self._send(Reply(outputs=outputs, final=self._open == 0))
        elif self._open == 0:
            self._send(Reply(final=True))

    def fail(self, text: str, num_sequences: int) -> None:
        """Sequences of one prompt failed."""
        self._open -= num_sequences
        self._send(Reply(error=text, final=self._open == 0))

    def outputs(self, row: int, num_input: int, progress: Progress) -> dict[str, Array]:
        """The output tensors of one sequence's news."""
        wanted, timing = self._wanted, progress.timing
        makers: dict[str, Callable[[], Array]] = {
            "output_ids": lambda: np.array([[progress.tokens]], np.int32).reshape(1, 1, -1),
            "sequence_length": lambda: np.array([[len(progress.tokens)]], np.int32),
        }
        if wanted.log_probs:
            makers["cum_log_probs"] = lambda: np.array([[progress.cum_log_prob]], np.float32)
            makers["output_log_probs"] = lambda: np.array(progress.log_probs, np.float32).reshape(1, 1, -1)
        if progress.context_logits is not None:
            makers["context_logits"] = lambda: np.asarray(progress.context_logits)[None]
        if progress.generation_logits is not None:
            makers["generation_logits"] = lambda: np.asarray(progress.generation_logits)[None, None]
        counts = {"batch_index": (wanted.batch_index, row), "sequence_index": (wanted.sequence_index, progress.index)}
        counts |= {
            "num_input_tokens": (wanted.num_input_tokens, num_input),
            "num_output_tokens": (wanted.num_output_tokens, progress.num_generated),
            "kv_cache_alloc_new_blocks": (wanted.perf_metrics, timing.new_blocks),
            "kv_cache_reused_blocks": (wanted.perf_metrics, timing.reused_blocks),
            "kv_cache_alloc_total_blocks": (wanted.perf_metrics, timing.total_blocks),
            "total_accepted_draft_tokens": (wanted.perf_metrics, 0),
            "total_draft_tokens": (wanted.perf_metrics, 0),
        }
        for name, (on, value) in counts.items():
            if on:
                makers[name] = lambda value=value: np.array([[value]], np.int32)  # type: ignore[misc]
        if wanted.perf_metrics:
            times = (timing.arrival_ns, timing.first_scheduled_ns, timing.first_token_ns, timing.last_token_ns)
            for name, value in zip(_TIMES, times, strict=True):
                makers[name] = lambda value=value: np.array([[value]], np.int64)  # type: ignore[misc]
            makers["acceptance_rate"] = lambda: np.zeros((1, 1), np.float32)
        return {name: make() for name, make in makers.items() if name in wanted.outputs}


_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")


class TicketRow:
    """The engine's listener for one prompt of a Triton request."""

    def __init__(self, ticket: Ticket, row: int, num_input: int, num_sequences: int) -> None:
        self._ticket, self._row, self._num_input, self._open = ticket, row, num_input, num_sequences

    def tell(self, progress: Progress) -> None:
        """News of one sequence."""
        self._open -= progress.final
        self._ticket.answer(self._ticket.outputs(self._row, self._num_input, progress), progress.final)

    def fail(self, text: str) -> None:
        """What is open of this prompt failed; told once, however many sequences it had."""
        if self._open:
            still_open, self._open = self._open, 0
            self._ticket.fail(text, still_open)
