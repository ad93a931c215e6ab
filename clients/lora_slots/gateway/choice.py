"""One answer in the making: the engine's tokens -> text cut at stop strings, why it ended, log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lora_slots.gateway.jobs import Job
from lora_slots.gateway.stops import StopCutter
from lora_slots.text import Tokenizer

STOP, LENGTH = "stop", "length"


class TokenLogProb(NamedTuple):
    """A token of the answer."""

    spelling: bytes
    log_prob: float
    offset: int
    """Where its text begins in the answer, in characters."""


class Choice:
    """One of a request's answers. `push` what the engine says, and `end` when it is over; both give text."""

    def __init__(self, index: int, job: Job, tokenizer: Tokenizer, echo: str = "") -> None:
        """`echo` stands before the answer's text."""
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        """Why it ended; None while it runs."""
        self._echo = echo
        self._max_tokens, self._end_ids = job.max_tokens, job.end_ids
        self._tokenizer = tokenizer
        self._decoder = tokenizer.incremental_decoder()
        self._cutter = StopCutter(job.stops) if job.stops else None
        self._wants_log_probs = job.log_probs
        self._tokens: list[TokenLogProb] = []
        self._decoded = self._given = 0

    def push(self, tokens: Sequence[int], log_probs: Sequence[float] = ()) -> str:
        """The text that is certain after these tokens."""
        if self.finish_reason is not None:
            return ""
        ended = False
        if self._end_ids and not self._end_ids.isdisjoint(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._end_ids)]
            log_probs = log_probs[: len(tokens)]
            ended = True
        self.num_tokens += len(tokens)
        text = self._decode(tokens, log_probs) if self._wants_log_probs else self._decoder.push(tokens)
        text = self._cut(text)
        if self.finish_reason is None and (ended or self.num_tokens >= self._max_tokens):
            text += self._finish(STOP if ended else LENGTH)
        return self._give(text)

    def end(self) -> str:
        """The engine has ended the answer; the text that was held back."""
        return "" if self.finish_reason is not None else self._give(self._finish(STOP))

    def take_log_probs(self) -> list[TokenLogProb]:
        """The tokens whose text was given since the last call; at the end all that began before the cut."""
        done = self.finish_reason is not None
        count = 0
        for i, token in enumerate(self._tokens):
            following = self._tokens[i + 1].offset if i + 1 < len(self._tokens) else self._decoded
            if not (token.offset < self._given or following <= self._given if done else following <= self._given):
                break
            count += 1
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        return taken

    def _decode(self, tokens: Sequence[int], log_probs: Sequence[float]) -> str:
        text = ""
        for token, log_prob in zip(tokens, log_probs, strict=True):
            self._tokens.append(TokenLogProb(spelling(self._tokenizer, token), log_prob, self._decoded))
            piece = self._decoder.push((token,))
            self._decoded += len(piece)
            text += piece
        return text

    def _cut(self, text: str) -> str:
        if self._cutter is None:
            return text
        text = self._cutter.push(text)
        if self._cutter.stopped:
            self.finish_reason = STOP
        return text

    def _finish(self, reason: str) -> str:
        rest = self._decoder.flush()
        self._decoded += len(rest)
        text = self._cut(rest)
        if self._cutter is not None and self.finish_reason is None:
            text += self._cutter.flush()
        self.finish_reason = self.finish_reason or reason
        return text

    def _give(self, text: str) -> str:
        self._given += len(text)
        if self._echo:
            text, self._echo = self._echo + text, ""
        return text


def spelling(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes a token stands for; a special token's name."""
    table = tokenizer.token_bytes
    known = table[token] if table is not None and token < len(table) else b""
    return known or tokenizer.decode([token], skip_special_tokens=False).encode()
