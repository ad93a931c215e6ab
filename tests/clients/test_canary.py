"""A canary is judged beside what it would replace, by errors, answers and first tokens."""

from __future__ import annotations

import re

import pytest

from lora_slots.canary import Limits, Sample, judge
from lora_slots.canary_command import sample

STABLE = [Sample("arr one", 0.1), Sample("arr two", 0.2), Sample("arr three", 0.3)]
ARR = re.compile("arr")


def test_as_good_as_the_other() -> None:
    """The same answers at the same pace: good, with the numbers of both sides."""
    verdict = judge(STABLE, STABLE, Limits(expect=ARR))
    assert verdict.good
    assert (verdict.canary.requests, verdict.canary.errors, verdict.canary.match) == (3, 0, 1.0)
    assert verdict.canary.first_p50_s == 0.2
    assert judge(STABLE, STABLE, Limits()).canary.match is None


@pytest.mark.parametrize(
    ("samples", "limits", "says"),
    [
        ([], Limits(), "no request was sent"),
        ([*STABLE[:2], Sample(error="bad [INTERNAL]")], Limits(), "1 of 3 requests failed, 0% may; the first one: bad"),
        ([Sample(error="bad")] * 3, Limits(max_errors=0.5, expect=ARR), "3 of 3 requests failed, 50% may"),
        ([*STABLE[:2], Sample("beep", 0.2)], Limits(expect=ARR), "67% of its answers match, 100% must match 'arr'"),
        ([Sample("arr", 0.7)] * 3, Limits(), r"its first token takes 700 ms, 200 ms of the stable one"),
    ],
)
def test_every_reason_against_it(samples: list[Sample], limits: Limits, says: str) -> None:
    """Errors, answers and first tokens are each a reason of their own."""
    verdict = judge(STABLE, samples, limits)
    assert len(verdict.reasons) == 1
    assert says in verdict.reasons[0]


def test_what_is_allowed_is_no_reason() -> None:
    """At the limits themselves a canary is still good, and all reasons come together."""
    late = [Sample("arr", 0.6), Sample("beep", 0.6), Sample(error="x")]
    assert judge(STABLE, late, Limits(max_errors=0.34, max_slowdown=3.0, min_match=0.5, expect=ARR)).good
    assert len(judge(STABLE, late, Limits(max_errors=0.3, max_slowdown=2.9, min_match=0.6, expect=ARR)).reasons) == 3


def test_a_stable_version_without_answers_sets_no_pace() -> None:
    """If the stable version fails, the canary's times are compared with nothing."""
    assert judge([Sample(error="x")] * 3, [Sample("arr", 9.0)], Limits()).good


def test_a_server_that_is_not_there_is_an_error_of_the_sample() -> None:
    """What the server says, or that there is none, is in the sample, with its code."""
    found = sample("127.0.0.1:9", "pirate", "hello", 4, iter(range(9)).__next__)
    assert found.error is not None
    assert "no server answers at 127.0.0.1:9" in found.error
    assert found.error.endswith("[UNAVAILABLE]")
