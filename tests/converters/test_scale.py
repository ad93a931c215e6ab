"""Rank and scale by PEFT's own rules, and patterns of strangers in bounded time."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_to_trtllm.fields import Settings
from peft_to_trtllm.report import Findings
from peft_to_trtllm.scale import ScaleRules

PATH = "model.layers.1.self_attn.q_proj"


def rules(**fields: Any) -> ScaleRules:
    """Rules of a config, which must be without problems."""
    problems = Findings()
    made = ScaleRules(Settings(**fields), problems)
    assert not problems
    return made


def test_plain_and_rslora() -> None:
    """alpha / r, and alpha / sqrt(r) with rsLoRA."""
    assert rules(r=16, lora_alpha=24).of(PATH).scale == 1.5
    assert rules(r=8, lora_alpha=3, use_rslora=True).of(PATH).scale == 3 / math.sqrt(8)


def test_rank_and_alpha_are_looked_up_separately() -> None:
    """A module in one pattern and not in the other takes the other's default; rsLoRA takes its own rank."""
    found = rules(r=4, lora_alpha=8, use_rslora=True, rank_pattern={"q_proj": 9}).of(PATH)
    assert (found.rank, found.alpha, found.scale) == (9, 8, 8 / 3)


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("q_proj", True),
        ("roj", False),
        ("self_attn.q_proj", True),
        ("self_attn_q_proj", False),
        ("self.attn.q_proj", True),
        (r"layers\.1\.self_attn\.q_proj", True),
        (r"layers\.0\.self_attn\.q_proj", False),
        ("^model.layers.1.self_attn.q_proj", True),
        ("^layers.1.self_attn.q_proj", False),
        ("q_proj|v_proj", True),
        (r".*\.q_proj", True),
        (r"layers\.\d+\..*", True),
    ],
)
def test_matching(key: str, matches: bool) -> None:
    """A key is a regex for whole last parts of the path."""
    assert rules(alpha_pattern={key: 99}).of(PATH).alpha == (99 if matches else 8)


@pytest.mark.oracle
@settings(deadline=None)  # the first call imports peft
@given(
    st.lists(
        st.sampled_from(
            ["q_proj", "roj", "^model", r"layers\.1", ".*", r"layers\.\d+\..*", "a|q_proj", "self.attn.q_proj"]
        )
    )
)
def test_matching_is_pefts(keys: list[str]) -> None:
    """The first match in file order is the one PEFT takes."""
    from peft.utils.other import get_pattern_key

    patterns = {key: i for i, key in enumerate(keys)}
    assert rules(alpha_pattern=patterns).of(PATH).alpha == patterns.get(get_pattern_key(list(patterns), PATH), 8)


def test_unused_patterns_are_known() -> None:
    """A key that matched nothing is remembered, for PEFT passes over it silently."""
    made = rules(alpha_pattern={"q_proj": 1, "w_proj": 2})
    made.of(PATH)
    assert made.unused() == [("alpha_pattern", "w_proj")]


@pytest.mark.parametrize(
    "key", ["(a+)+", "(a*)*b", "(a|a)+", "(.*)*x", "(a?){40}", "a?" * 40, "((a{2}){8}){8}", ".*.*.*.*.*z", "(|a)+b"]
)
def test_explosive_patterns_are_refused(key: str) -> None:
    """A pattern that could take exponential time is never run."""
    problems = Findings()
    ScaleRules(Settings(alpha_pattern={key: 2}), problems)
    assert problems.counts["pattern-cost"] == 1


@pytest.mark.timeout(120)  # seconds; it takes less than one
def test_the_worst_admitted_pattern_ends() -> None:
    """Three open repetitions, the most that is matched, over a long path."""
    made = rules(alpha_pattern={".*.*.*x": 2})
    assert made.of("a." * 100 + "q_proj").scale == rules().of("q_proj").scale


@given(st.text(alphabet="ab.*+?|()[]{}^$\\d0,", max_size=24))
def test_any_pattern_is_matched_or_refused(key: str) -> None:
    """No pattern makes the rules stumble."""
    problems = Findings()
    ScaleRules(Settings(alpha_pattern={key: 2}), problems).of(PATH)
