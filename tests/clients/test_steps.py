"""The ensemble's text steps: what becomes of one request's text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lora_slots.base_model import make_tiny_llama
from lora_slots.steps import PromptEncoder, StreamDecoders
from lora_slots.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny base's: a token is a byte."""
    return Tokenizer(make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", seed=1))


def request(text: bytes = b"hello", **more: Any) -> dict[str, Any]:
    """One request's inputs."""
    query = np.array([[text]], np.object_)
    return {"QUERY": query, "REQUEST_OUTPUT_LEN": np.array([[4]], np.int32), **more}


def test_a_prompt_becomes_its_ids(tokenizer: Tokenizer) -> None:
    """Ids, their number, and the tokenizer's end id where the request gives none."""
    made = PromptEncoder(tokenizer).encode_request(request())
    assert made["INPUT_ID"].tolist() == [tokenizer.encode("hello", add_special_tokens=True)]
    assert made["REQUEST_INPUT_LEN"].tolist() == [[made["INPUT_ID"].shape[1]]]
    assert made["OUT_END_ID"].tolist() == [[tokenizer.eos_ids[0]]]
    assert PromptEncoder(tokenizer).encode_request(request(END_ID=np.array([[7]])))["OUT_END_ID"].tolist() == [[7]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (request(b""), "text_input is empty"),
        (request(b"ab\xff"), "text_input is not UTF-8: byte 2 is 0xff"),
        (request(QUERY=np.array([[b"a"], [b"b"]], np.object_)), "one prompt per request, found 2"),
        (request(STOP_WORDS_DICT=np.array([[b"\xfe"]], np.object_)), "stop_words is not UTF-8"),
        (request(EMBEDDING_BIAS_WORDS=np.array([[b"a"]], np.object_)), "1 words, 0 weights"),
    ],
)
def test_what_is_refused(tokenizer: Tokenizer, given: dict[str, Any], words: str) -> None:
    """Nothing is replaced or guessed: other text would be answered than was sent."""
    with pytest.raises(ValueError, match=words):
        PromptEncoder(tokenizer).encode_request(given)


def test_a_bias_lands_on_the_tokens_of_its_word(tokenizer: Tokenizer) -> None:
    """And nowhere else."""
    given = request(
        EMBEDDING_BIAS_WORDS=np.array([[b"a"]], np.object_), EMBEDDING_BIAS_WEIGHTS=np.array([[2.5]], np.float32)
    )
    bias = PromptEncoder(tokenizer).encode_request(given)["EMBEDDING_BIAS"]
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    assert np.flatnonzero(bias[0]).tolist() == [token]
    assert bias[0, token] == 2.5


TEXTS = ["naïve", "日本", "🏴‍☠️ ahoy"]


def piece(token: int, *, arrival: int = 7, last: int = 0, sequence: int | None = None) -> dict[str, Any]:
    """One streamed token as the engine hands it on."""
    one = {"TOKENS_BATCH": np.array([[[token]]], np.int32), "SEQUENCE_LENGTH": np.array([[1]], np.int32)}
    one |= {"ARRIVAL_TIME": np.array([[arrival]]), "LAST_TOKEN_TIME": np.array([[last]])}
    return one if sequence is None else {**one, "SEQUENCE_INDEX": np.array([[sequence]], np.int32)}


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_over_two_tokens_comes_out_whole(tokenizer: Tokenizer, text: str) -> None:
    """The pieces are the text, and none holds U+FFFD; the last one says so, and counts the stream's tokens."""
    decoders, ids = StreamDecoders(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    pieces = [decoders.decode(piece(token, last=number == len(ids) - 1)) for number, token in enumerate(ids)]
    assert "".join(one.texts[0] for one in pieces) == text
    assert not any("\ufffd" in one.texts[0] for one in pieces)
    assert [one.final for one in pieces] == [False] * (len(ids) - 1) + [True]
    assert pieces[-1].num_tokens == len(ids)


@pytest.mark.parametrize("by", ["arrival", "sequence"])
def test_streams_side_by_side_do_not_mix(tokenizer: Tokenizer, by: str) -> None:
    """Whatever their request ids: two requests, or two sequences of one, each get their own text."""
    decoders = StreamDecoders(tokenizer)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    found = [""] * len(ids)
    for at in range(max(map(len, ids))):
        for stream, tokens in enumerate(ids):
            if at < len(tokens):
                which = {"arrival": 9 + stream} if by == "arrival" else {"sequence": stream}
                found[stream] += decoders.decode(piece(tokens[at], last=at == len(tokens) - 1, **which)).texts[0]
    assert found == TEXTS


def test_what_a_broken_stream_held_back_reaches_nobody_else(tokenizer: Tokenizer) -> None:
    """The engine failed in the middle of a character; the next request begins with nothing."""
    decoders = StreamDecoders(tokenizer)
    half = tokenizer.encode("日", add_special_tokens=False)[0]
    decoders.decode(piece(half, arrival=1))
    whole = tokenizer.encode("a", add_special_tokens=False)[0]
    assert decoders.decode(piece(whole, arrival=2, last=1)).texts == ["a"]


def test_without_an_arrival_time_a_response_is_the_whole_answer(tokenizer: Tokenizer) -> None:
    """Nothing is kept, and what is no text comes out as U+FFFD."""
    decoders, ids = StreamDecoders(tokenizer), tokenizer.encode("日", add_special_tokens=False)
    lengths = np.array([[len(ids) - 1]], np.int32)
    found = decoders.decode({"TOKENS_BATCH": np.array([[ids]], np.int32), "SEQUENCE_LENGTH": lengths})
    assert (found.texts, found.final) == (["\ufffd"], False)
    whole = {"TOKENS_BATCH": np.array([[ids]], np.int32), "SEQUENCE_LENGTH": lengths + 1}
    assert decoders.decode(whole).texts == ["日"]


@pytest.mark.parametrize(("skip", "text"), [(True, "hi"), (False, "hi<|im_end|>")])
def test_special_tokens_are_skipped_or_spelled_out(tokenizer: Tokenizer, skip: bool, text: str) -> None:
    """By the model's parameter `skip_special_tokens`, in pieces as in one."""
    decoders = StreamDecoders(tokenizer, skip_special_tokens=skip)
    ids = [*tokenizer.encode("hi", add_special_tokens=False), tokenizer.eos_ids[0]]
    pieces = [decoders.decode(piece(token, last=number == len(ids) - 1)) for number, token in enumerate(ids)]
    assert "".join(one.texts[0] for one in pieces) == text == tokenizer.decode(ids, skip_special_tokens=skip)
