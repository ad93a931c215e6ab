"""How few tokens a text can have, and many texts at once, against tokenizers itself."""

import copy
import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_slots.base_model import make_tiny_llama
from lora_slots.text import Tokenizer, byte_spelling
from lora_slots.text_bound import TokenBound, token_bound

ALPHABET = byte_spelling()
LLAMA_2: dict[str, Any] = {
    "added_tokens": [],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": None,
    "model": {
        "type": "BPE",
        "byte_fallback": True,
        "vocab": {
            token: i
            for i, token in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abc", "ab", "abc", "▁abc"])
        },
        "merges": ["a b", "ab c", "▁ abc"],
        "unk_token": "<unk>",
        "fuse_unk": True,
    },
}


def change(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets what a path such as "model.type" leads to."""

    def set_it(definition: dict[str, Any]) -> None:
        *path, last = place.split(".")
        for step in path:
            definition = definition[step]
        definition[last] = value

    return set_it


def take_out(definition: dict[str, Any], *values: int) -> None:
    """Leave bytes out of a byte-level vocabulary, as the vocabularies of real models do."""
    for value in values:
        del definition["model"]["vocab"][ALPHABET[value]]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tokenizer.json of the tiny Llama."""
    path = make_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=1, vocab=400)
    return dict(json.loads((path / "tokenizer.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module", params=["byte-level", "NFC", "lacks some", "Llama 2"])
def tokenizer(
    request: pytest.FixtureRequest, byte_level: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """Tokenizers of the kinds that have a bound."""
    definition = LLAMA_2 if request.param == "Llama 2" else copy.deepcopy(byte_level)
    if request.param == "NFC":
        definition["normalizer"] = {"type": "NFC"}
    if request.param == "lacks some":
        take_out(definition, *b"\x04\x7f\xc0\xf1\xff")
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "decoder": None, **definition}))
    return Tokenizer(path)


ODD = "abc \n\u03b1\u0313\u0300\u0345<|im_start|>日😀\x04\x7f\U00040000"
TEXTS = st.text() | st.text(alphabet=ODD, max_size=200) | st.just("abc" * 99)


@given(text=TEXTS)
def test_a_text_never_has_fewer_tokens_than_told(tokenizer: Tokenizer, text: str) -> None:
    """Whatever is in it; and something is told."""
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.least_tokens("a" + text) > 0


@given(texts=st.lists(TEXTS, max_size=4), special=st.booleans())
def test_many_texts_at_once_have_the_ids_of_each(tokenizer: Tokenizer, texts: list[str], special: bool) -> None:
    """Also none at all, and empty ones."""
    each = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    assert tokenizer.encode_batch(texts, add_special_tokens=special) == each


def test_the_bound_is_the_longest_tokens() -> None:
    """Added ones included."""
    assert token_bound(LLAMA_2, ALPHABET) == TokenBound(len("<0x00>"))
    plain = copy.deepcopy(LLAMA_2)
    plain["added_tokens"] = [{"content": "<a long one>", "lstrip": False, "rstrip": False}]
    assert token_bound(plain, ALPHABET) == TokenBound(len("<a long one>"))


@pytest.mark.parametrize(
    "swallow",
    [
        change("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
        change("normalizer", {"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}),
        change("normalizer", {"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"}),
        change("pre_tokenizer", {"type": "Whitespace"}),
        change("pre_tokenizer", {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}),
        change("model.byte_fallback", False),
        change("model.type", "WordLevel"),
        change("model.vocab", {"a": 0}),
        change("added_tokens", [{"content": "<mask>", "lstrip": True, "rstrip": False}]),
        change("truncation", {"max_length": 5}),
    ],
)
def test_where_text_can_vanish_there_is_no_bound(swallow: Callable[[dict[str, Any]], None]) -> None:
    """Then every text is tokenised before its length is judged."""
    definition = copy.deepcopy(LLAMA_2)
    swallow(definition)
    assert token_bound(definition, ALPHABET) is None


def test_control_characters_that_the_vocabulary_lacks_are_counted(byte_level: dict[str, Any]) -> None:
    """They vanish; if others did, or if other steps could make them, there is no bound."""
    lacks = copy.deepcopy(byte_level)
    take_out(lacks, 0x04, 0xF1, 0xFF)
    bound = token_bound(lacks, ALPHABET)
    assert bound is not None
    assert bound.lost == "\x04"
    assert bound.least_tokens("\x04" * 1000) == 0
    assert bound.least_tokens("\x04" * 1000 + "a" * 1000) == bound.least_tokens("a" * 1000) > 0
    prepends = {**copy.deepcopy(lacks), "normalizer": {"type": "Prepend", "prepend": "\x04"}}
    assert token_bound(prepends, ALPHABET) is None
    take_out(lacks, ord("q"))
    assert token_bound(lacks, ALPHABET) is None


def test_no_character_decomposes_into_more_than_four() -> None:
    """What NFC can shorten a text by."""
    every = map(chr, range(sys.maxunicode + 1))
    assert max(len(unicodedata.normalize("NFD", one)) for one in every) == 4


def test_a_tokenizer_without_a_bound_tells_nothing(tmp_path: Path) -> None:
    """0 tokens at least."""
    definition = copy.deepcopy(LLAMA_2)
    definition["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "decoder": None, **definition}))
    assert Tokenizer(tmp_path).least_tokens(" " * 10_000) == 0
