"""The next token, by the numbers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from reference_engine.sampling import Sampler, Sampling, ends_with, log_probability

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))


def _draws(count: int = 4000, **settings: float) -> Counter[int]:
    sampler = Sampler(Sampling(**settings), 4, ())  # type: ignore[arg-type]
    return Counter(sampler.choose(LOGITS, [], i)[0] for i in range(count))


def test_top_k_keeps_the_likeliest_in_their_proportion() -> None:
    """top-k 2 draws the two likeliest two to one."""
    draws = _draws(top_k=2)
    assert set(draws) == {0, 1}
    assert draws[0] / draws[1] == pytest.approx(2, rel=0.15)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """top-p 0.7 needs two of the four; 0.8 needs three."""
    assert set(_draws(top_p=0.7)) == {0, 1}
    assert set(_draws(top_p=0.8)) == {0, 1, 2}


def test_temperature_flattens() -> None:
    """At temperature 2 probabilities go as their square roots."""
    draws = _draws(top_k=2, temperature=2.0)
    assert draws[0] / draws[1] == pytest.approx(2**0.5, rel=0.15)


def test_top_p_decays_to_its_floor_and_is_reset() -> None:
    """After each token top-p shrinks by its decay, until the reset token comes."""
    sampler = Sampler(Sampling(top_p=0.99, top_p_decay=0.5, top_p_min=0.3, top_p_reset_id=0), 4, ())
    seen = [sampler.choose(LOGITS, [], i)[0] for i in range(200)]
    after_reset = {after for before, after in pairwise(seen) if before == 0}
    assert max(after_reset) > 0
    floor = Sampler(Sampling(top_p=0.99, top_p_decay=0.01, top_p_min=0.3), 4, ())
    assert {floor.choose(LOGITS, [], i)[0] for i in range(50)} - {floor.choose(LOGITS, [], 0)[0]} <= {1, 2, 3}
    assert {floor.choose(LOGITS, [], i)[0] for i in range(50)} == {0}


def test_penalties_count_prompt_and_answer() -> None:
    """Repetition divides a positive logit and multiplies a negative one; presence and frequency subtract."""
    sampler = Sampler(
        Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), 4, prompt=[1, 1, 3]
    )
    _, shaped = sampler.choose(np.array([9.0, 4.0, 1.0, -4.0], np.float32), [1, 1, 3], 0)
    np.testing.assert_allclose(shaped, [9.0, 4 / 2 - 0.5 - 2 * 0.25, 1.0, -4 * 2 - 0.5 - 0.25])


def test_end_id_is_forbidden_below_min_tokens() -> None:
    """With two tokens generated of three the end id may not come; with three it may."""
    sampler = Sampler(Sampling(min_tokens=3, end_id=0), 4, ())
    assert sampler.plain
    assert [sampler.forbids_end(count) for count in (0, 2, 3)] == [True, True, False]
    assert sampler.choose(LOGITS, [], 2)[0] == 1


def test_bad_words_by_their_last_token() -> None:
    """A longer word is forbidden only after its beginning."""
    sampler = Sampler(Sampling(bad_words=((2, 0),)), 4, ())
    assert sampler.choose(LOGITS, [1, 2], 0)[0] == 1
    assert sampler.choose(LOGITS, [2, 1], 0)[0] == 0


def test_log_probability_and_word_ends() -> None:
    """Natural logarithm under softmax; a word longer than the text does not match."""
    assert log_probability(LOGITS, 1) == pytest.approx(np.log(0.25))
    assert ends_with([1, 2, 3], ((3,),))
    assert not ends_with([3], ((2, 3), (1,)))
