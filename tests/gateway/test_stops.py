"""Stop strings and the text of one answer, without a server: cut exactly, whatever pieces it comes in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_slots.base_model import make_tiny_llama
from lora_slots.gateway.choice import LENGTH, STOP, Choice
from lora_slots.gateway.jobs import Job
from lora_slots.gateway.stops import StopCutter
from lora_slots.text import Tokenizer

TEXTS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def cut_of(text: str, stops: list[str]) -> str:
    """The definition: read one character more at a time; end before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@given(text=TEXTS, stops=STOPS, data=st.data())
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    """Every way to cut a text into pieces gives what the definition says, and nothing given is taken back."""
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    cutter = StopCutter(stops)
    given_text = ""
    for piece in pieces:
        given_text += cutter.push(piece)
        assert cut_of(text, stops).startswith(given_text)
    if not cutter.stopped:
        given_text += cutter.flush()
    assert given_text == cut_of(text, stops)
    assert cutter.stopped == any(stop in text for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "cut"),
    [
        ("abb", ["abb", "b"], "a"),  # the one that is complete first, not the one that begins first
        ("xab", ["b", "ab"], "x"),  # of two that end together the longer one
        ("aaab", ["aab"], "a"),
        ("abc", ["d"], "abc"),
    ],
)
def test_which_stop_string_wins(text: str, stops: list[str], cut: str) -> None:
    """In one piece and letter by letter."""
    for pieces in ([text], list(text)):
        cutter = StopCutter(stops)
        given_text = "".join(cutter.push(piece) for piece in pieces)
        assert given_text + ("" if cutter.stopped else cutter.flush()) == cut == cut_of(text, stops)


@given(text=TEXTS, stop=st.text("ab", min_size=1, max_size=4))
def test_nothing_is_held_back_that_cannot_become_a_stop_string(text: str, stop: str) -> None:
    """What is held back is shorter than the stop string, and begins it."""
    cutter = StopCutter([stop])
    given_text = cutter.push(text)
    if not cutter.stopped:
        held = text[len(given_text) :]
        assert len(held) < len(stop)
        assert stop.startswith(held)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte: characters are split over tokens."""
    return Tokenizer(make_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=1))


def job(**more: Any) -> Job:
    """A job of one short prompt."""
    return Job(
        **{
            "prompts": ((1,),), "n": 1, "max_tokens": 100, "values": {}, "arrays": {}, "stops": (),
            "end_ids": frozenset(), "log_probs": False, "stream": True, "include_usage": False, **more,
        }
    )  # fmt: skip


def test_a_character_split_over_tokens_is_given_whole(tokenizer: Tokenizer) -> None:
    """And a broken one at the end as U+FFFD."""
    ids = tokenizer.encode("né", add_special_tokens=False)
    choice = Choice(0, job(), tokenizer)
    assert [choice.push([token]) for token in ids] == ["n", "", "é"]
    assert choice.push(ids[1:2]) == ""
    assert choice.end() == "�"
    assert choice.finish_reason == STOP


def test_a_stop_string_is_cut_inside_of_a_piece(tokenizer: Tokenizer) -> None:
    """The rest of the piece and everything after it is dropped."""
    choice = Choice(0, job(stops=("é!",)), tokenizer)
    text = choice.push(tokenizer.encode("ab", add_special_tokens=False))
    text += choice.push(tokenizer.encode("cé!d", add_special_tokens=False))
    assert text == "abc"
    assert choice.finish_reason == STOP
    assert choice.push(tokenizer.encode("more", add_special_tokens=False)) + choice.end() == ""


def test_the_length_ends_an_answer_and_gives_what_was_held_back(tokenizer: Tokenizer) -> None:
    """What could have become a stop string did not."""
    choice = Choice(0, job(stops=("bcd",), max_tokens=3), tokenizer)
    assert choice.push(tokenizer.encode("abc", add_special_tokens=False)) == "abc"
    assert choice.finish_reason == LENGTH
    assert choice.num_tokens == 3


def test_every_end_token_ends_an_answer(tokenizer: Tokenizer) -> None:
    """Those that the engine gives out, as it does with stop words, are no part of the answer."""
    end = tokenizer.eos_ids[0]
    choice = Choice(0, job(end_ids=frozenset({end}), log_probs=True), tokenizer)
    ids = [*tokenizer.encode("ok", add_special_tokens=False), end]
    assert choice.push(ids, [-1.0, -2.0, -3.0]) == "ok"
    assert choice.finish_reason == STOP
    assert choice.num_tokens == 2
    assert [token.log_prob for token in choice.take_log_probs()] == [-1.0, -2.0]


def test_log_probabilities_come_with_the_text_of_their_tokens(tokenizer: Tokenizer) -> None:
    """Held-back text holds back its tokens; what is cut away takes them along."""
    choice = Choice(0, job(stops=("bc",), log_probs=True), tokenizer)
    (a, b, c) = tokenizer.encode("abc", add_special_tokens=False)
    assert choice.push([a], [-1.0]) == "a"
    assert [token.spelling for token in choice.take_log_probs()] == [b"a"]
    assert choice.push([b], [-2.0]) == ""
    assert choice.take_log_probs() == []
    assert choice.push([a], [-3.0]) == "ba"
    assert [(token.spelling, token.offset) for token in choice.take_log_probs()] == [(b"b", 1), (b"a", 2)]
    assert choice.push([b, c], [-4.0, -5.0]) == ""
    assert choice.finish_reason == STOP
    assert choice.take_log_probs() == []


def test_an_echo_stands_before_the_first_text(tokenizer: Tokenizer) -> None:
    """Also of an answer that is empty."""
    choice = Choice(0, job(), tokenizer, echo="prompt")
    assert choice.push(tokenizer.encode("a", add_special_tokens=False)) == "prompta"
    assert Choice(0, job(), tokenizer, echo="prompt").end() == "prompt"
