"""At the ends of the number range: what is written is finite and right, or refused, and numpy stays silent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import LLAMA_ROW_DIMS, PREFIX, Tensors, bundle_deltas, values, write_adapter

from peft_to_trtllm import inspect

Q = f"{PREFIX}0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """numpy's warnings would reach the user's terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _pair(a: Any, b: Any) -> Tensors:
    return {f"{Q}.lora_A.weight": a, f"{Q}.lora_B.weight": b}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("zero", ["A", "B"])
def test_a_component_of_zero(converted: Any, dtype: str, zero: str) -> None:
    """A component with a zero side adds nothing, however large the other side is; the others are as they were."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((4, 16)), rng.standard_normal((16, 4))
    (a[0], b[:, 0]) = (0, 1e308) if zero == "A" else (1e308, 0)
    bundle = converted(_pair(a, b), {"lora_alpha": 4}, dtype=dtype)
    assert np.isfinite(values(np.array(bundle.weights()))).all()
    wanted = b[:, 1:] @ a[1:]
    found = bundle_deltas(bundle, LLAMA_ROW_DIMS)[0, "attn_q"]
    np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05)


def test_factors_far_apart(converted: Any) -> None:
    """1e-320 times 1e308 is no overflow: the power of two between them has more than 1,023 places."""
    a, b = np.full((4, 16), 1e-310), np.full((16, 4), 1e308)
    found = bundle_deltas(converted(_pair(a, b), {"lora_alpha": 4}), LLAMA_ROW_DIMS)
    np.testing.assert_allclose(found[0, "attn_q"], 4 * 1e-310 * 1e308, rtol=1e-6)


def test_a_tiny_scale_on_large_factors(converted: Any) -> None:
    """A scale that float32 cannot say is applied in float64."""
    a, b = np.ones((4, 16), np.float32), np.full((16, 4), 2.0**120, np.float32)
    found = bundle_deltas(converted(_pair(a, b), {"lora_alpha": 2.0**-158}), LLAMA_ROW_DIMS)
    np.testing.assert_allclose(found[0, "attn_q"], 4 * 2.0**-40, rtol=1e-6)


@pytest.mark.parametrize(("alpha", "b"), [(8, 1.6e308), (1e-310, 1e-30)])
def test_beyond_float64(refused: Any, alpha: float, b: float) -> None:
    """A scale times B that float64 cannot hold is refused, neither inf nor silently zero."""
    assert refused(_pair(np.full((4, 16), 1e-3), np.full((16, 4), b)), {"lora_alpha": alpha}) == {"range"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_advice_is_another_type(tmp_path: Any, dtype: str) -> None:
    """Nobody is told to take the type that was just refused."""
    adapter = write_adapter(tmp_path / "a", _pair(np.full((4, 16), 1e200), np.full((16, 4), 1e200)))
    report = inspect(adapter, dtype=dtype)
    assert set(report.problems.counts) == {"range"}
    assert f"--dtype {dtype}" not in report.text()
    assert ("--dtype bfloat16" in report.text()) == (dtype == "float16")
