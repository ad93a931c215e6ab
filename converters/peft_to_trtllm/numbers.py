"""From a plan to numbers: each row computed once, in order, into one reused buffer.

Nothing here knows files or bundles beside the tensors it is given: rows come out as they must stand in lora_weights,
and problems of the data (values that are not finite, ranges) go into the findings, all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from peft_to_trtllm.balance import Balance, RangeProblem, balance
from peft_to_trtllm.load import Loader
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rounding import Array, Floats, is_finite, largest, round_to, store, values_of
from peft_to_trtllm.rows import Block, Factors, Plan, Row
from peft_to_trtllm.tensor_file import Tensor
from trtllm_lora.tensors import STORAGE

_TYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_NO_WIDER = "no other --dtype holds more: smaller factors, by a training that did not diverge"
_WIDER = {
    "float16": "--dtype bfloat16 or float32, which hold far larger and smaller values, on an engine of that type",
    "bfloat16": _NO_WIDER,
    "float32": _NO_WIDER,
}

Magnitude = Callable[[Row], Floats]
"""Gives the normalised DoRA magnitude [out] of a row, float64."""


def convert_rows(
    plan: Plan, loader: Loader, dtype: str, problems: Findings, magnitude: Magnitude | None = None
) -> Iterator[tuple[int, Array]]:
    """Yield (row number, values [row.size] in the storage type of `dtype`) for every row without a problem.

    The array is reused: it is valid until two more have been asked for (one is being written, one waits, one is being
    filled). After a problem the rest is still examined, so that every reason is known; the caller must look at
    `problems` before it believes any row.
    """
    buffers = np.zeros((3, plan.width), STORAGE[dtype])
    for number, row in enumerate(plan.rows):
        values = buffers[number % 3, : row.size]
        if len(row.blocks) > 1 or row.num_experts > 1:
            values[:] = 0
        good = _fill_all(row, values, loader, dtype, problems)
        if good and row.magnitude and magnitude:
            good = _fill_magnitude(magnitude(row), values[-row.d_out :], dtype, row.magnitude, problems)
        if good:
            yield number, values


def _fill_all(row: Row, values: Array, loader: Loader, dtype: str, problems: Findings) -> bool:
    good = True
    # what overflows, sinks or is no number is looked for in the results, and told of there
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for block in row.blocks:  # every block, so that every problem is found
            good &= _fill(row, block, values, loader, dtype, problems)
    return good


def _fill(row: Row, block: Block, values: Array, loader: Loader, dtype: str, problems: Findings) -> bool:
    factors = block.factors
    a, b = loader.a(block), loader.b(block)
    largest_a, largest_b = largest(a, factors.a.dtype, 1), largest(b, factors.b.dtype, 0)
    finite = _check_finite(largest_a, factors.a, problems) & _check_finite(largest_b, factors.b, problems)
    if not finite:
        return False
    try:
        moved = balance(
            largest_a,
            _scaled(largest_b, factors.scale),
            dtype,
            exact_a=_TYPE_NAMES[dtype] == factors.a.dtype,
            exact_b=_TYPE_NAMES[dtype] == factors.b.dtype and abs(factors.scale) >= 1,
        )
    except RangeProblem as problem:
        problems.add("range", _where(row), str(problem), _WIDER[dtype])
        return False
    all_a, all_b = _parts(row, values)
    ranks = slice(block.rank_at, block.rank_at + factors.rank)
    if moved:
        rounded_a, rounded_b = _moved(a, b, factors, moved, dtype)
        good = is_finite(rounded_a, dtype) and is_finite(rounded_b, dtype)
        if not good:
            problems.add("range", _where(row), f"values overflow {dtype} when they are rounded", _WIDER[dtype])
        all_a[block.expert, ranks] = rounded_a
        all_b[block.expert, block.outs, ranks] = rounded_b
        return good
    store(a, factors.a.dtype, 1.0, all_a[block.expert, ranks], dtype)
    if isinstance(block.outs, slice):
        store(b, factors.b.dtype, factors.scale, all_b[block.expert, block.outs, ranks], dtype)
    else:
        scattered = np.empty(b.shape, values.dtype)
        store(b, factors.b.dtype, factors.scale, scattered, dtype)
        all_b[block.expert, block.outs, ranks] = scattered
    return True


def _scaled(largest_b: Floats, scale: float) -> Floats:
    """Largest magnitudes of s·B; a product that float64 cannot hold is a problem, not an infinity or a zero."""
    found = largest_b * abs(scale)
    if scale and (np.isinf(found) | ((found == 0) & (largest_b > 0))).any():
        raise RangeProblem(f"the scale {scale:.3g} times B is beyond what float64 can say")
    return found


def _moved(a: Array, b: Array, factors: Factors, moved: Balance, dtype: str) -> tuple[Array, Array]:
    """A and s·B, each component moved by its exponent and rounded once."""
    k, kept = moved.exponents, ~moved.dropped
    up = np.ldexp(values_of(a, factors.a.dtype) * kept[:, None], k[:, None])
    down = np.ldexp(values_of(b, factors.b.dtype) * kept * factors.scale, -k)
    return round_to(up, dtype), round_to(down, dtype)


def _where(row: Row) -> str:
    return f"{row.path} ({row.module}, layer {row.layer})"


def _parts(row: Row, values: Array) -> tuple[Array, Array]:
    """Views of a row's A [E, r, in] and B [E, out, r]."""
    end_a = row.num_experts * row.rank * row.d_in
    end_b = end_a + row.num_experts * row.d_out * row.rank
    all_a = values[:end_a].reshape(row.num_experts, row.rank, row.d_in)
    return all_a, values[end_a:end_b].reshape(row.num_experts, row.d_out, row.rank)


def _check_finite(found: Floats, tensor: Tensor, problems: Findings) -> bool:
    if np.isfinite(found).all():
        return True
    what = "NaN" if np.isnan(found).any() else "inf"
    problems.add(
        "not-finite", tensor.name, f"not finite: the tensor holds {what}", "an adapter whose training did not diverge"
    )
    return False


def _fill_magnitude(values: Floats, out: Array, dtype: str, tensor: Tensor, problems: Findings) -> bool:
    if not np.isfinite(values).all():
        problems.add(
            "not-finite", tensor.name, "the normalised DoRA magnitude is not finite", "the weights of the true base"
        )
        return False
    with np.errstate(over="ignore"):
        out[:] = round_to(values, dtype)
    if not is_finite(out, dtype):
        found = f"the normalised DoRA magnitude reaches {values.max():.3g}, which {dtype} cannot hold"
        problems.add("range", tensor.name, found, _WIDER[dtype])
        return False
    return True
