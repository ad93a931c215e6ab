"""What a step is made of."""

from __future__ import annotations

import numpy as np

from reference_engine.batch import group_tokens
from reference_engine.request import GenerationRequest
from reference_engine.sampling import Sampler, Sampling
from reference_engine.scheduler import plan_step, prefill_budget
from reference_engine.sequence import Sequence


def _sequence(num_prompt: int, *, computed: int = 0, answer: int = 0, task: int | None = None) -> Sequence:
    request = GenerationRequest(tuple(range(num_prompt)), 10, task=task)
    tokens = list(range(num_prompt + answer))
    return Sequence(request, 1, 0, [], computed, 0, Sampler(Sampling(), 16, ()), tokens)


def test_streams_get_a_token_each_and_prompts_share_the_rest() -> None:
    """Decoding sequences come first; prompts follow in order of arrival until the budget is spent."""
    streams = [_sequence(5, computed=5 + i, answer=i + 1) for i in range(2)]
    first, second = _sequence(11), _sequence(40)
    chunks = plan_step([first, *streams, second], 256)
    assert [(s, 1) for s in streams] == [(c.sequence, c.num_tokens) for c in chunks[:2]]
    assert [(first, 11), (second, 1)] == [(c.sequence, c.num_tokens) for c in chunks[2:]]


def test_a_prompt_alone_is_as_long_as_the_step_allows() -> None:
    """With nobody streaming a chunk is max_num_tokens; the last one is what is left."""
    assert [c.num_tokens for c in plan_step([_sequence(300)], 256)] == [256]
    assert [c.num_tokens for c in plan_step([_sequence(300, computed=256)], 256)] == [44]


def test_a_prompt_that_waits_for_budget_is_left_out() -> None:
    """A sequence with no tokens in the step is no chunk of zero tokens."""
    chunks = plan_step([_sequence(256), _sequence(10)], 256)
    assert len(chunks) == 1


def test_many_adapters_shorten_the_chunks() -> None:
    """Beside streams of the base the budget grows slowly with them; adapters, and many of them, shorten it."""
    assert prefill_budget(0, 16, 256) == 256
    assert prefill_budget(1, 0, 256) < prefill_budget(16, 0, 256) < 2 * 16
    assert prefill_budget(16, 0, 256) > prefill_budget(16, 1, 256) > prefill_budget(16, 16, 256)
    assert prefill_budget(16, 1, 8) == 8


def test_a_chunk_beside_many_adapters_fits_its_group() -> None:
    """Groups are powers of two wide: with one token more every adapter's would be twice as wide, mostly in vain."""
    streams = [_sequence(5, computed=6, answer=2, task=task) for task in range(1, 17)]
    for task, size in ((17, 8), (1, 7)):  # a new adapter, and one that streams already
        *_, last = plan_step([*streams, _sequence(100, task=task)], 256)
        assert (last.sequence.task, last.num_tokens) == (task, size)
        places = np.array([*range(1, 17), *[task] * size], np.int32)
        assert group_tokens(places, 17)[0].shape[1] == 8
        assert group_tokens(np.append(places, np.int32(task)), 17)[0].shape[1] == 16
    crowd = [_sequence(5, computed=6, answer=2, task=1) for _ in range(8)]
    *_, last = plan_step([*streams, *crowd, _sequence(100, task=1)], 256)
    assert last.num_tokens == 4, "its group is wide already; the prompt goes on all the same"
    alone = plan_step([_sequence(100, task=task) for task in range(1, 7)], 256)
    assert [chunk.num_tokens for chunk in alone] == [100, 100, 56], "nobody streams: nobody is held up"
