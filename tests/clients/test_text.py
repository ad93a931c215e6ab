"""lora_slots.text against tokenizers itself and against transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_slots.base_model import make_tiny_llama
from lora_slots.text import IncrementalDecoder, Tokenizer, TokenizerError, byte_spelling

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer of the two-layer random Llama."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=1, vocab=400)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    """Its tokenizer: byte-level, 400 tokens."""
    return Tokenizer(tiny)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of the SentencePiece kind: bytes as <0x..>, a leading space that decoding strips."""
    path = tmp_path_factory.mktemp("sentencepiece")
    tokens = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "b", "▁a", "é", "▁é"]
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer(path)


def streamed(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    """What one decoder gives for each piece, and at the end."""
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(piece) for piece in pieces), decoder.flush()]


@given(text=st.text())
def test_encode_and_decode_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Any text survives encoding and decoding."""
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(pieces=st.lists(st.lists(st.integers(0, 420), max_size=4)))
def test_pieces_join_to_the_whole_for_any_ids(tokenizer: Tokenizer, pieces: list[list[int]]) -> None:
    """Texts of pieces, joined, are the text of all ids: broken UTF-8, special and unknown ids included."""
    assert "".join(streamed(tokenizer, pieces)) == tokenizer.decode([number for piece in pieces for number in piece])


@given(text=st.text(alphabet=st.sampled_from("aé日😀👨\u200d👩 \n1")))
def test_no_half_character_is_given_out(tokenizer: Tokenizer, text: str) -> None:
    """One token at a time, valid text never shows U+FFFD and every prefix given out is a prefix of the text."""
    parts = streamed(tokenizer, [[number] for number in tokenizer.encode(text)])
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text


def test_a_split_emoji_comes_out_with_its_last_token(tokenizer: Tokenizer) -> None:
    """An emoji of four tokens is held back for three of them."""
    assert streamed(tokenizer, [[number] for number in tokenizer.encode("😀")]) == ["", "", "", "😀", ""]


def test_a_cut_emoji_is_flushed_as_the_whole_decode_has_it(tokenizer: Tokenizer) -> None:
    """Three of an emoji's four bytes end as one U+FFFD, at the flush."""
    assert streamed(tokenizer, [tokenizer.encode("a😀")[:-1]]) == ["a", "\ufffd"]


@given(text=st.text(alphabet=st.sampled_from(" ▁abé日😀👩\u200d\ufffd")))
@settings(max_examples=50)
def test_other_decoders_join_to_the_whole_too(fallback: Tokenizer, text: str) -> None:
    """A SentencePiece-like tokenizer, which strips the first space, streams text to what the whole decode gives."""
    ids = fallback.encode(text)
    parts = streamed(fallback, [[number] for number in ids])
    assert "".join(parts) == fallback.decode(ids)


def test_word_list_has_ids_and_ends(tokenizer: Tokenizer) -> None:
    """Row 0 holds the ids one after the other, row 1 the cumulative ends padded with -1."""
    assert tokenizer.decode(list(tokenizer.word_list(["xyz", "", "\n"])[0])) == "xyz\n"
    expected = [[*tokenizer.encode("xyz"), *tokenizer.encode("\n")], [3, 4, -1, -1]]
    found = tokenizer.word_list(["xyz", "", "\n"])
    np.testing.assert_array_equal(expected, found)
    assert found.dtype == np.int32


@pytest.mark.parametrize("words", [[], [""]])
def test_no_words_are_one_column(tokenizer: Tokenizer, words: list[str]) -> None:
    """Without a word that has tokens the list is [[0], [-1]]."""
    assert tokenizer.word_list(words).tolist() == [[0], [-1]]


def test_eos_ids_come_from_the_generation_config(tiny: Path, tmp_path: Path) -> None:
    """A list of end tokens in generation_config.json wins over config.json; without both the token's name serves."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    assert Tokenizer(tmp_path).eos_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer(tmp_path).eos_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer(tmp_path).eos_ids == (2, 0)


def test_template_beside_the_config_wins(tiny: Path, tmp_path: Path) -> None:
    """chat_template.jinja, where newer transformers save it, is used before tokenizer_config.json's."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content | tojson }}")
    assert Tokenizer(tmp_path).apply_chat_template(CHAT) == '<|im_start|>"Hi"'


def test_a_template_that_refuses_is_an_error_with_its_words(tiny: Path, tmp_path: Path) -> None:
    """raise_exception in a template reaches the caller as TokenizerError."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        Tokenizer(tmp_path).apply_chat_template(CHAT)


def test_a_template_cannot_leave_its_sandbox(tiny: Path, tmp_path: Path) -> None:
    """A template that reaches for Python's internals is refused."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TokenizerError, match="unsafe"):
        Tokenizer(tmp_path).apply_chat_template(CHAT)


def test_a_tokenizer_without_template_says_so(fallback: Tokenizer) -> None:
    """No chat template is an error that names the way out."""
    with pytest.raises(TokenizerError, match="no chat template"):
        fallback.apply_chat_template(CHAT)


def test_missing_and_broken_files_are_named(tiny: Path, tmp_path: Path) -> None:
    """An absent tokenizer.json and a broken tokenizer_config.json are errors with the path."""
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path)


def test_byte_spelling_is_the_librarys() -> None:
    """The 256 characters are those of the tokenizers library's byte-level alphabet."""
    assert set(byte_spelling()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert byte_spelling()[ord(" ")] == "Ġ"


@pytest.mark.oracle
def test_chat_template_is_rendered_as_transformers_does(tiny: Path, tokenizer: Tokenizer) -> None:
    """With and without the generation prompt the text equals transformers'."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny)
    for prompt in (True, False):
        assert theirs.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=prompt
        ) == tokenizer.apply_chat_template(CHAT, add_generation_prompt=prompt)
