"""One multiplication, one rounding; and powers of two moved so that nothing leaves the type's range."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import LLAMA_ROW_DIMS, assert_same, bundle_deltas, llama_deltas, llama_tensors, values
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_to_trtllm.balance import RangeProblem, balance
from peft_to_trtllm.rounding import RANGES, largest, round_to, store, values_of

TARGETS = ("float32", "float16", "bfloat16")
_BITS = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


def nearest(value: float, target: str) -> Fraction:
    """The value of the target type nearest to `value`, ties to even: by exact arithmetic."""
    exact = Fraction(value)
    if not exact:
        return exact
    digits, smallest = _BITS[target]
    exponent = max(int(np.frexp(value)[1]) - digits, smallest)
    return Fraction(round(exact / Fraction(2) ** exponent)) * Fraction(2) ** exponent


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(TARGETS), finite.filter(lambda x: abs(x) < 6e4))
def test_round_once_to_nearest_even(target: str, value: float) -> None:
    """A float64 is rounded straight to the target, never by way of another type."""
    stored = round_to(np.array([value]), target)
    assert Fraction(float(values(stored)[0])) == nearest(value, target)


def test_double_rounding_is_avoided() -> None:
    """Just above a tie of bfloat16, by less than float32 can see, is rounded up."""
    value = 1.0 + 2.0**-8 + 2.0**-40
    assert values(round_to(np.array([value]), "bfloat16"))[0] == 1.0 + 2.0**-7


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TARGETS),
    st.sampled_from(["F16", "BF16", "F32", "F64"]),
    st.floats(1e-3, 1e3),
    st.sampled_from([7, 70_000]),
    st.integers(0, 2**32 - 1),
)
def test_store_is_multiply_and_round(target: str, dtype: str, factor: float, size: int, seed: int) -> None:
    """By table, in float32 or in float64: the result is the same single rounding."""
    plain = np.random.default_rng(seed).standard_normal(size) * 1e-2
    kinds: dict[str, Any] = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
    source = round_to(plain, "bfloat16") if dtype == "BF16" else plain.astype(kinds[dtype])
    out = np.empty(size, round_to(plain[:1], target).dtype)
    for scale in (factor, 1.0, 2.0, -0.25):
        store(source, dtype, scale, out, target)
        np.testing.assert_array_equal(out, round_to(values_of(source, dtype) * scale, target))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_value_times_every_power_of_two(dtype: str, sign: int) -> None:
    """Moving the exponent is multiplying: zeros, subnormals, overflows, infinities and NaN included, on every bit."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    source, target = (every.view(np.float16), "float16") if dtype == "F16" else (every, "bfloat16")
    out = np.empty_like(source)
    for exponent in (*range(-42, 42), -260, -130, 127, 130, 260):
        factor = sign * 2.0**exponent
        with np.errstate(all="ignore"):
            store(source, dtype, factor, out, target)
            wanted = round_to(values_of(source, dtype) * factor, target)
        if factor != 1:  # a factor of one copies, NaN and all
            np.testing.assert_array_equal(out.view(np.uint16), wanted.view(np.uint16))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["F16", "BF16", "F32", "F64"]), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_largest_is_the_largest(dtype: str, rows: int, columns: int, seed: int) -> None:
    """The integer trick finds what abs().max() finds, along both axes."""
    plain = np.random.default_rng(seed).standard_normal((rows, columns))
    kinds: dict[str, Any] = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
    source = round_to(plain, "bfloat16") if dtype == "BF16" else plain.astype(kinds[dtype])
    for axis in (0, 1):
        np.testing.assert_array_equal(largest(source, dtype, axis), np.abs(values_of(source, dtype)).max(axis=axis))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_largest_shows_what_is_not_finite(bad: float, kind: Any) -> None:
    """A NaN or an infinity anywhere is in the result."""
    matrix = np.ones((3, 5), kind)
    matrix[1, 2] = bad
    name = {2: "F16", 4: "F32", 8: "F64"}[matrix.itemsize]
    assert not np.isfinite(largest(matrix, name, 0)).all()
    assert not np.isfinite(largest(matrix, name, 1)).all()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(TARGETS),
    st.lists(st.tuples(st.floats(1e-30, 1e30), st.floats(1e-30, 1e30)), min_size=1, max_size=6),
)
def test_balance_fits_or_says_so(target: str, pairs: list[tuple[float, float]]) -> None:
    """After balancing every component is in range; the product is untouched, for k goes up here and down there."""
    a, b = (np.array(column) for column in zip(*pairs, strict=True))
    try:
        moved = balance(a, b, target)
    except RangeProblem:
        peak = max(x * y for x, y in pairs)
        assert peak > RANGES[target].largest or peak < 2.0 ** (2 * RANGES[target].smallest_exponent + 6)
        return
    assert moved is None or not moved.dropped.any()
    k = np.zeros(len(pairs), int) if moved is None else moved.exponents
    assert (np.ldexp(a, k) <= RANGES[target].largest).all()
    assert (np.ldexp(b, -k) <= RANGES[target].largest).all()


@pytest.mark.parametrize("factor", [2.0**20, 2.0**-20, 1e6, 1e-7])
def test_one_factor_large_the_other_small(converted: Any, factor: float) -> None:
    """Factors of opposite size survive float16: a power of two moves between them."""
    tensors = {
        key: (value * np.float32(factor) if "lora_A" in key else value / np.float32(factor))
        for key, value in llama_tensors().items()
    }
    bundle = converted(tensors, dtype="float16")
    assert_same(bundle_deltas(bundle, LLAMA_ROW_DIMS), llama_deltas(tensors), "float16")


def test_components_of_opposite_size_in_one_matrix(converted: Any) -> None:
    """Each rank component moves on its own: one with a huge A and one with a tiny A share a row."""
    d = np.array([2.0**18, 2.0**-18, 1.0, 2.0**-10], np.float32)
    tensors = {
        key: (value * d[:, None] if "lora_A" in key else value / d[None, :]) for key, value in llama_tensors().items()
    }
    bundle = converted(tensors, dtype="float16")
    assert_same(bundle_deltas(bundle, LLAMA_ROW_DIMS), llama_deltas(tensors), "float16")


def test_a_scale_that_would_overflow(converted: Any) -> None:
    """s·B beyond 65504 is fine where A has room."""
    tensors = {k: v * np.float32(1e-3 if "lora_A" in k else 100) for k, v in llama_tensors().items()}
    config = {"lora_alpha": 40_000}
    bundle = converted(tensors, config, dtype="float16")
    assert_same(bundle_deltas(bundle, LLAMA_ROW_DIMS), llama_deltas(tensors, config), "float16")


def test_what_is_exact_already_is_not_moved(converted: Any) -> None:
    """A float16 adapter with small values and scale 1 is copied bit by bit into float16."""
    tensors = {
        key: (value * np.float32(1e-4 if "lora_B" in key else 1)).astype(np.float16)
        for key, value in llama_tensors(layers=1).items()
    }
    weights = converted(tensors, {"lora_alpha": 4}, dtype="float16").weights()[0]
    a, b = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
    np.testing.assert_array_equal(weights[0], np.concatenate([a.reshape(-1), b.reshape(-1)]))


def test_a_zero_factor_is_no_problem(converted: Any) -> None:
    """B of zeros (an untrained adapter) converts to rows of zeros beside any A."""
    tensors = {k: v * np.float32(0 if "lora_B" in k else 1e9) for k, v in llama_tensors().items()}
    weights = converted(tensors, dtype="float16").weights()
    assert np.isfinite(weights).all()
