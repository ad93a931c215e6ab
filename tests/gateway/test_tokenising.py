"""Texts on their way to token ids: what cannot fit is never tokenised, what is long is not on the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.asgi import offline

from lora_slots.base_model import make_tiny_llama
from lora_slots.gateway.bodies import ChatBody, CompletionBody, read_body
from lora_slots.gateway.errors import ApiError
from lora_slots.gateway.jobs import Job
from lora_slots.gateway.record import Record
from lora_slots.text import Tokenizer


class Watched(Tokenizer):
    """Tells what was tokenised together, and in which thread."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.calls: list[tuple[int, bool]] = []
        """Number of texts; whether it was in the event loop's thread."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """As the tokenizer's."""
        self.calls.append((len(texts), threading.current_thread() is threading.main_thread()))
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Watched:
    """A byte-level tokenizer."""
    return Watched(make_tiny_llama(tmp_path, seed=1, vocab=400))


def job(tokenizer: Tokenizer, kind: type[ChatBody | CompletionBody], **fields: Any) -> Job:
    """What a gateway before an engine of 20,000 tokens makes of a body."""
    gateway = offline(tokenizer)
    body = read_body(kind, json.dumps({"model": "llama", **fields}).encode())
    return asyncio.run(gateway.generation(body, Record("r", 0.0), {})).job


def said(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionBody, {"prompt": "x" * 4_000_000}, "prompt"),
        (CompletionBody, {"prompt": ["a", "x" * 4_000_000]}, "prompt[1]"),
        (ChatBody, {"messages": said("x" * 4_000_000)}, "messages"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    tokenizer: Watched, kind: type[ChatBody | CompletionBody], fields: dict[str, Any], param: str
) -> None:
    """With both lengths: what it has at least, and what the engine takes."""
    with pytest.raises(ApiError) as error:
        job(tokenizer, kind, **fields)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", param)
    least = int(str(error.value).partition("at least ")[2].partition(" ")[0])
    assert 20_000 < least <= 4_000_000
    assert "takes at most 20000" in str(error.value)
    assert tokenizer.calls == []


@pytest.mark.parametrize(
    ("kind", "fields", "call"),
    [
        (CompletionBody, {"prompt": "short"}, (1, True)),
        (CompletionBody, {"prompt": "x" * 5000}, (1, False)),
        (CompletionBody, {"prompt": ["x" * 100] * 128}, (128, False)),
        (ChatBody, {"messages": said("short")}, (1, True)),
        (ChatBody, {"messages": said("x" * 5000)}, (1, False)),
        (ChatBody, {"messages": said("") * 128}, (1, False)),
    ],
)
def test_what_is_long_is_tokenised_at_once_and_in_a_thread(
    tokenizer: Watched, kind: type[ChatBody | CompletionBody], fields: dict[str, Any], call: tuple[int, bool]
) -> None:
    """By the length of all of a request's texts together."""
    made = job(tokenizer, kind, **fields)
    assert tokenizer.calls == [call]
    if kind is CompletionBody:
        texts = fields["prompt"] if isinstance(fields["prompt"], list) else [fields["prompt"]]
        assert made.prompts == tuple(tuple(tokenizer.encode(text)) for text in texts)


def test_the_first_prompt_that_is_too_long_ends_it(tokenizer: Watched) -> None:
    """The others are not tokenised."""
    with pytest.raises(ApiError, match="has 20001 tokens") as error:
        job(tokenizer, CompletionBody, prompt=["a", "\x01" * 20_001, *["b" * 60_000] * 9])
    assert error.value.param == "prompt[1]"
    assert tokenizer.calls == [(3, False)]


def test_token_ids_are_not_tokenised(tokenizer: Watched) -> None:
    """They are taken as they are."""
    assert job(tokenizer, CompletionBody, prompt=[[3, 4], [5]]).prompts == ((3, 4), (5,))
    assert tokenizer.calls == []
