"""Aliases share out as their weights say, stick to their keys, and move no key that need not move."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adapter_slots.errors import ChangeRefused
from adapter_slots.registry_changes import give_share, set_alias
from adapter_slots.registry_entries import Alias, adapter_of
from adapter_slots.registry_rules import problems_of

KEYS = [f"user-{number}" for number in range(10_000)]
TARGETS = ("ant", "ant@2", "ant@3", "bee", "bee@4", "cat")


@st.composite
def weights(draw: st.DrawFn) -> dict[str, float]:
    """Whole percentages that sum to 100."""
    names = draw(st.lists(st.sampled_from(TARGETS), min_size=1, max_size=5, unique=True))
    cuts = sorted(draw(st.lists(st.integers(0, 100), min_size=len(names) - 1, max_size=len(names) - 1)))
    shares = [high - low for low, high in zip([0, *cuts], [*cuts, 100], strict=True)]
    return dict(zip(names, map(float, shares), strict=True))


@given(weights(), st.text(max_size=30))
@settings(deadline=None, max_examples=40)
def test_the_split_over_ten_thousand_keys_is_within_one_percent(shares: dict[str, float], name: str) -> None:
    """Measured, with each name of an alias: its hash is a draw of its own. (4 standard deviations are 2 %.)"""
    found = Counter(map(Alias(name, shares).choose, KEYS))
    for target, weight in shares.items():
        deviation = math.sqrt(weight / 100 * (1 - weight / 100) / len(KEYS)) * 100
        assert abs(found[target] / 100 - weight) <= max(1.0, 4.5 * deviation) if weight else found[target] == 0


def test_a_canary_of_five_percent_is_within_one_percent() -> None:
    """The figure of the promise, fixed: five percent of ten thousand sessions, then of ten thousand draws."""
    alias = Alias("support", {"ant": 95.0, "ant@2": 5.0})
    assert abs(sum(alias.choose(key) == "ant@2" for key in KEYS) / 100 - 5) < 1
    drawn = [alias.choose(draw=(number + 0.5) / len(KEYS)) for number in range(len(KEYS))]
    assert drawn.count("ant@2") == 500


@given(weights(), st.text(), st.text())
def test_a_key_sticks(shares: dict[str, float], name: str, key: str) -> None:
    """The same key has the same target, in whatever order the file has them; one without weight has nobody."""
    target = Alias(name, shares).choose(key)
    assert Alias(name, dict(reversed(shares.items()))).choose(key) == target
    assert shares[target] > 0


@given(weights(), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_shared_out_by_weight(shares: dict[str, float], draw: float) -> None:
    """Without a key: the targets' shares, side by side."""
    target = Alias("a", shares).choose(draw=draw)
    below = math.fsum(shares[name] for name in sorted(shares) if name < target)
    assert below / 100 <= draw + 1e-9
    assert draw - 1e-9 <= (below + shares[target]) / 100


@given(weights())
def test_without_key_and_draw_it_is_the_heaviest(shares: dict[str, float]) -> None:
    """What an operator's command on an alias means."""
    assert shares[Alias("a", shares).choose()] == max(shares.values())


@given(st.integers(0, 100), st.integers(0, 100), st.text(max_size=10))
@settings(deadline=None, max_examples=60)
def test_more_for_the_canary_moves_only_the_keys_it_gains(low: int, high: int, name: str) -> None:
    """5 % -> 20 %: nobody leaves the canary, nobody else moves, and back again it is as it was."""
    low, high = sorted((low, high))
    before = Alias(name, {"ant": 100.0 - low, "ant@2": float(low)})
    after = Alias(name, {"ant": 100.0 - high, "ant@2": float(high)})
    moved = [(before.choose(key), after.choose(key)) for key in KEYS[:1000]]
    assert {pair for pair in moved if pair[0] != pair[1]} <= {("ant", "ant@2")}


@given(weights(), weights(), st.lists(st.text(max_size=10), min_size=30, max_size=30, unique=True))
def test_a_key_moves_only_to_where_more_is_given(old: dict[str, float], new: dict[str, float], keys: list[str]) -> None:
    """In general: within an adapter, and between adapters, only to a side that grew relative to the one it leaves."""
    before, after = Alias("a", old), Alias("a", new)
    for key in keys:
        one, other = before.choose(key), after.choose(key)
        if one == other:
            continue
        if adapter_of(one) == adapter_of(other):
            assert new[other] * old[one] > old.get(other, 0) * new.get(one, 0)
        else:
            grown = share(new, other) * share(old, one), share(old, other) * share(new, one)
            assert grown[0] > grown[1]


def share(shares: dict[str, float], target: str) -> float:
    """What a target's adapter has in all."""
    return math.fsum(weight for name, weight in shares.items() if adapter_of(name) == adapter_of(target))


@given(weights(), st.integers(0, 100))
def test_a_canary_of_one_adapter_moves_no_key_of_another(shares: dict[str, float], percent: int) -> None:
    """`give_share` takes from the adapter's own versions, and so do the keys."""
    mine = {name: weight for name, weight in shares.items() if adapter_of(name) == "ant" and name != "ant@3"}
    room = share(shares, "ant")
    assume(mine and percent <= room)
    doc = set_alias({"schema": 1, "adapters": {}}, "a", shares)
    targets = give_share(doc, "a", "ant@3", float(percent))["aliases"]["a"]["targets"]
    assert math.fsum(targets.values()) == pytest.approx(100)
    assert targets.get("ant@3", 0) == pytest.approx(percent) or len([t for t in targets if adapter_of(t) == "ant"]) == 1
    for key in KEYS[:50]:
        one, other = Alias("a", shares).choose(key), Alias("a", targets).choose(key)
        assert adapter_of(one) == adapter_of(other)


@given(weights(), st.sampled_from(TARGETS), st.none() | st.floats(0, 100))
def test_shares_always_sum_to_hundred(shares: dict[str, float], target: str, percent: float | None) -> None:
    """Whatever is given to whom: a change is refused, or leaves an alias that the rules take."""
    versions = [{"version": number, "digest": "d", "path": "p"} for number in (1, 2, 3, 4)]
    adapters = {name: {"versions": versions} for name in ("ant", "bee", "cat")}
    doc = set_alias({"schema": 1, "adapters": adapters}, "a", shares)
    try:
        changed = give_share(doc, "a", target, percent)
    except ChangeRefused as refused:
        assert str(refused)
        return
    assert not list(problems_of(changed))
    if percent is not None and len(changed["aliases"]["a"]["targets"]) > 1:
        assert changed["aliases"]["a"]["targets"][target] == pytest.approx(percent)
