"""Answers as bytes: OpenAI's objects, whole or as server-sent events. Pure.

The envelope of a stream's chunks is serialised once per answer; a token costs one JSON string between two of its
fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from lora_slots.gateway.choice import Choice, TokenLogProb
from lora_slots.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"
_dumps = orjson.dumps


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int

    def document(self) -> dict[str, int]:
        """As plain data."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Answered:
    """One finished answer."""

    choice: Choice
    text: str
    log_probs: Sequence[TokenLogProb]


class Wire:
    """How one route speaks. `answer_id`, `created` (seconds since 1970) and `model` are those of one request."""

    object_name: str
    chunk_name: str

    def __init__(self, answer_id: str, created: int, model: str, *, log_probs: bool, with_usage: bool) -> None:
        self._id, self._created, self._model = answer_id, created, model
        self._log_probs = log_probs
        usage = {"usage": None} if with_usage else {}
        head = {"id": answer_id, "object": self.chunk_name, "created": created, "model": model, **usage}
        self._head = b"data: " + _dumps(head)[:-1] + b',"choices":['
        self._before: dict[int, bytes] = {}

    def whole(self, answers: Sequence[Answered], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        return _dumps(
            {
                "id": self._id,
                "object": self.object_name,
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(answer) for answer in answers],
                "usage": usage.document(),
            }
        )

    def first(self, index: int) -> bytes:
        """What comes before an answer's first text."""
        raise NotImplementedError

    def text(self, index: int, text: str, log_probs: Sequence[TokenLogProb]) -> bytes:
        """A chunk of text."""
        before = self._before.get(index)
        if before is None:
            before = self._before[index] = self._head + self._opening(index)
        if not self._log_probs:
            return before + _dumps(text) + self._closing
        return before + _dumps(text) + self._between + _dumps(self._shown(log_probs)) + b"}]}\n\n"

    def finish(self, index: int, reason: str) -> bytes:
        """The last chunk of an answer."""
        raise NotImplementedError

    def usage(self, usage: Usage) -> bytes:
        """The chunk of `stream_options.include_usage`."""
        head = {"id": self._id, "object": self.chunk_name, "created": self._created, "model": self._model}
        return b"data: " + _dumps({**head, "choices": [], "usage": usage.document()}) + b"\n\n"

    _closing: bytes
    _between: bytes

    def _opening(self, index: int) -> bytes:
        raise NotImplementedError

    def _choice(self, answer: Answered) -> dict[str, Any]:
        raise NotImplementedError

    def _shown(self, log_probs: Sequence[TokenLogProb]) -> Any:
        raise NotImplementedError


class ChatWire(Wire):
    """`/v1/chat/completions`."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    _closing = b'},"logprobs":null,"finish_reason":null}]}\n\n'
    _between = b'},"finish_reason":null,"logprobs":'

    def first(self, index: int) -> bytes:
        """The chunk that names the role."""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._head + delta % index

    def finish(self, index: int, reason: str) -> bytes:
        """An empty delta and the reason."""
        return self._head + b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}]}\n\n' % (
            index,
            reason.encode(),
        )

    def _opening(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def _choice(self, answer: Answered) -> dict[str, Any]:
        return {
            "index": answer.choice.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._shown(answer.log_probs) if self._log_probs else None,
            "finish_reason": answer.choice.finish_reason,
        }

    def _shown(self, log_probs: Sequence[TokenLogProb]) -> Any:
        return {
            "content": [
                {
                    "token": token.spelling.decode("utf-8", "replace"),
                    "logprob": token.log_prob,
                    "bytes": list(token.spelling),
                    "top_logprobs": [],
                }
                for token in log_probs
            ],
            "refusal": None,
        }


class CompletionWire(Wire):
    """`/v1/completions`."""

    object_name = chunk_name = "text_completion"
    _closing = b',"logprobs":null,"finish_reason":null}]}\n\n'
    _between = b',"finish_reason":null,"logprobs":'

    def first(self, index: int) -> bytes:  # noqa: ARG002 - a chat has one per answer
        """Nothing: a completion begins with its text."""
        return b""

    def finish(self, index: int, reason: str) -> bytes:
        """An empty text and the reason."""
        return self._head + b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%s"}]}\n\n' % (
            index,
            reason.encode(),
        )

    def _opening(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def _choice(self, answer: Answered) -> dict[str, Any]:
        return {
            "index": answer.choice.index,
            "text": answer.text,
            "logprobs": self._shown(answer.log_probs) if self._log_probs else None,
            "finish_reason": answer.choice.finish_reason,
        }

    def _shown(self, log_probs: Sequence[TokenLogProb]) -> Any:
        return {
            "tokens": [token.spelling.decode("utf-8", "replace") for token in log_probs],
            "token_logprobs": [token.log_prob for token in log_probs],
            "top_logprobs": None,
            "text_offset": [token.offset for token in log_probs],
        }


def error_event(error: ApiError) -> bytes:
    """An error after the stream has begun; nothing follows it."""
    return b"data: " + error.body() + b"\n\n"
