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


@pytest.mark.parametrize("text", ["naïve", "日本", "🏴‍☠️ ahoy"])
def test_a_character_over_two_tokens_comes_out_whole(tokenizer: Tokenizer, text: str) -> None:
    """With a request id; the pieces are the text, and none holds U+FFFD."""
    decoders = StreamDecoders(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = []
    for number, token in enumerate(ids):
        texts, _ = decoders.decode(
            "one", np.array([[[token]]], np.int32), np.array([[1]], np.int32), final=number == len(ids) - 1
        )
        pieces += texts
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
