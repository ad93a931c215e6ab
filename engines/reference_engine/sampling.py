"""From logits to the next token of one sequence.

Order, as in the runtime's decoding layers: embedding bias, temperature, repetition, presence and frequency penalties
over prompt and answer, end id forbidden below `min_tokens`, bad words, then the choice.
Neither top-k nor top-p (both 0, the defaults) is greedy, whatever the temperature; so are top-k 1 and temperature 0.
Log-probabilities are of the whole distribution that the choice was made from, before top-k and top-p cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Words = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; defaults are the runtime's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_min: float = 1e-6
    top_p_decay: float = 1.0
    top_p_reset_id: int = -1
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    end_id: int = -1
    bad_words: Words = ()
    embedding_bias: Floats | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Sampler:
    """Chooses the tokens of one sequence; holds its random state."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Sequence[int]) -> None:
        self._s = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._top_p = sampling.top_p
        self._counts = np.bincount(prompt, minlength=vocab_size) if sampling.penalised else None
        self.plain = sampling.greedy and not (
            sampling.penalised or sampling.bad_words or sampling.embedding_bias is not None
        )
        """Whether the choice is the largest logit (the end id aside, below `min_tokens`)."""

    def forbids_end(self, num_generated: int) -> bool:
        """Whether the end id may not be chosen as the next token."""
        return self._s.end_id >= 0 and num_generated < self._s.min_tokens

    def choose(self, logits: Floats, tokens: Sequence[int], num_generated: int) -> tuple[int, Floats]:
        """The next token after `tokens` (prompt and answer), and the logits it was chosen from."""
        shaped = self._shape(logits, tokens, num_generated)
        token = int(shaped.argmax()) if self._s.greedy else self._draw(shaped)
        if self._counts is not None:
            self._counts[token] += 1
        if token == self._s.top_p_reset_id:
            self._top_p = self._s.top_p
        elif self._s.top_p_decay != 1:
            self._top_p = max(self._top_p * self._s.top_p_decay, self._s.top_p_min)
        return token, shaped

    def _shape(self, logits: Floats, tokens: Sequence[int], num_generated: int) -> Floats:
        s = self._s
        out = logits.astype(np.float32, copy=True)
        if s.embedding_bias is not None:
            out += s.embedding_bias
        if s.temperature not in (0, 1):
            out /= np.float32(s.temperature)
        if self._counts is not None:
            seen = np.flatnonzero(self._counts)
            values = out[seen]
            values = np.where(values < 0, values * s.repetition_penalty, values / s.repetition_penalty)
            out[seen] = values - s.presence_penalty - s.frequency_penalty * self._counts[seen]
        if self.forbids_end(num_generated):
            out[s.end_id] = -np.inf
        for word in s.bad_words:
            before = word[:-1]
            if not before or tuple(tokens[-len(before) :]) == before:
                out[word[-1]] = -np.inf
        return out

    def _draw(self, logits: Floats) -> int:
        count = min(self._s.top_k, logits.size) or logits.size
        order = np.argpartition(-logits, count - 1)[:count] if count < logits.size else np.arange(logits.size)
        order = order[np.argsort(-logits[order], kind="stable")]
        weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64))
        weights /= weights.sum()
        if 0 < self._top_p < 1:
            kept = int(np.searchsorted(np.cumsum(weights), self._top_p)) + 1
            order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
        position = int(np.searchsorted(np.cumsum(weights), self._random.random(), side="right"))
        return int(order[min(position, len(order) - 1)])


def log_probability(logits: Floats, token: int) -> float:
    """Natural log-probability of a token under softmax of logits."""
    values = logits.astype(np.float64)
    top = values.max()
    return float(values[token] - top - np.log(np.exp(values - top).sum()))


def ends_with(tokens: Sequence[int], words: Words) -> bool:
    """Whether the last tokens are one of the words."""
    return any(len(tokens) >= len(word) and tuple(tokens[-len(word) :]) == word for word in words)
