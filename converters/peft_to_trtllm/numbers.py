"""From a plan to numbers: each row computed once, in order, into one reused buffer.

Nothing here knows files or bundles beside the tensors it is given: rows come out as they must stand in lora_weights,
and problems of the data (values that are not finite, ranges) go into the findings, all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from peft_to_trtllm.balance import RangeProblem, balance
from peft_to_trtllm.load import Loader
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rounding import Array, Floats, largest, round_to, store
from peft_to_trtllm.rows import Block, Plan, Row
from peft_to_trtllm.tensor_file import Tensor
from trtllm_lora.tensors import STORAGE

_TYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

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
    for block in row.blocks:  # every block, so that every problem is found
        good &= _fill(row, block, values, loader, dtype, problems)
    return good


def _fill(row: Row, block: Block, values: Array, loader: Loader, dtype: str, problems: Findings) -> bool:
    factors = block.factors
    a, b = loader.a(block), loader.b(block)
    with np.errstate(invalid="ignore"):  # a signalling NaN is reported below, it need not warn
        largest_a, largest_b = largest(a, factors.a.dtype, 1), largest(b, factors.b.dtype, 0)
    finite = _check_finite(largest_a, factors.a, problems) & _check_finite(largest_b, factors.b, problems)
    if not finite:
        return False
    try:
        k = balance(
            largest_a,
            largest_b * abs(factors.scale),
            dtype,
            exact_a=_TYPE_NAMES[dtype] == factors.a.dtype,
            exact_b=_TYPE_NAMES[dtype] == factors.b.dtype and abs(factors.scale) >= 1,
        )
    except RangeProblem as problem:
        advice = "another --dtype (bfloat16 or float32) that the engine also has"
        problems.add("range", f"{row.path} ({row.module}, layer {row.layer})", str(problem), advice)
        return False
    all_a, all_b = _parts(row, values)
    ranks = slice(block.rank_at, block.rank_at + factors.rank)
    up, down = (1.0, factors.scale) if k is None else (np.ldexp(1.0, k)[:, None], np.ldexp(factors.scale, -k)[None, :])
    store(a, factors.a.dtype, up, all_a[block.expert, ranks], dtype)
    if isinstance(block.outs, slice):
        store(b, factors.b.dtype, down, all_b[block.expert, block.outs, ranks], dtype)
    else:
        scattered = np.empty(b.shape, values.dtype)
        store(b, factors.b.dtype, down, scattered, dtype)
        all_b[block.expert, block.outs, ranks] = scattered
    return True


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
    out[:] = round_to(values, dtype)
    return True
