"""One answer in the making: its tokens, its blocks, how far it is, and what has to be told of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reference_engine.request import GenerationRequest
from reference_engine.sampling import Sampler, ends_with, log_probability

Floats = npt.NDArray[np.float32]
END, LENGTH, STOP_WORD, CANCELLED = "end_id", "length", "stop_words", "cancelled"


@dataclass(slots=True)
class Sequence:
    """One of a request's `num_return_sequences` answers."""

    request: GenerationRequest
    number: int
    """The executor's number of the request."""
    index: int
    blocks: list[int]
    num_computed: int
    """Tokens whose keys and values are in the blocks."""
    reused_blocks: int
    sampler: Sampler
    tokens: list[int]
    """Prompt and answer."""
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished: str | None = None
    num_told: int = 0
    """Tokens of the answer that responses have carried."""
    log_probs: list[float] = field(default_factory=list)
    context_logits: list[Floats] = field(default_factory=list)
    generation_logits: list[Floats] = field(default_factory=list)

    @property
    def task(self) -> int | None:
        """The adapter's task id, None for the base model."""
        return self.request.task

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def prefilling(self) -> bool:
        """Whether more than the newest token has still to be computed."""
        return self.num_computed < len(self.tokens) - 1 or not self.num_generated

    def finish(self, reason: str) -> None:
        """End the answer here."""
        self.finished, self.last_token_ns = reason, time.monotonic_ns()

    def choose(self, logits: Floats, best: int) -> None:
        """Choose the next token from its logits (`best` is the largest) and see whether the answer ends with it.

        The end id is never part of an answer; a stop word is.
        """
        request, sampler = self.request, self.sampler
        if sampler.plain and not sampler.forbids_end(self.num_generated):
            token = best
        else:
            token, logits = sampler.choose(logits, self.tokens, self.num_generated)
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()
        if token == request.sampling.end_id:
            self.finish(END)
            return
        self.tokens.append(token)
        if request.wants_log_probs:
            self.log_probs.append(log_probability(logits, token))
        if request.wants_generation_logits:
            self.generation_logits.append(logits.copy())
        if self.num_generated >= request.max_new_tokens:
            self.finish(LENGTH)
        elif ends_with(self.tokens, request.stop_words):
            self.finish(STOP_WORD)
