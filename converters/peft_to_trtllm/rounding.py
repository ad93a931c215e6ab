"""Numbers from one storage type to another: one multiplication, one rounding.

bfloat16 is its bit pattern in uint16, as everywhere in this project. A factor is applied exactly (in float64, or in
float32 where the product is exact there) and the result is rounded once, to nearest even. For 16-bit sources that is
a table of 65,536 entries, which is both the exact way and a fast one: numpy converts halves one by one. A power of two
within one 16-bit type only moves the exponent, which is faster still.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from peft_to_trtllm.tensor_file import STORAGE as STORED
from trtllm_lora.tensors import STORAGE

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

_CHUNK = 1 << 16
"""Elements treated at a time, so that temporaries stay in the cache."""


_SAME = {"F16": "float16", "BF16": "bfloat16"}
_FIELDS = {"F16": (10, 30), "BF16": (7, 254)}
"""Bits below the exponent, and the exponent field of the largest normal values."""


class Range(NamedTuple):
    """What a target type can hold."""

    largest: float
    smallest_exponent: int
    """Of a normal number: below, precision is lost bit by bit."""


RANGES = {
    "float16": Range(65504.0, -14),
    "bfloat16": Range(float.fromhex("0x1.fep127"), -126),
    "float32": Range(float(np.finfo(np.float32).max), -126),
}


def values_of(stored: Array, dtype: str) -> Floats:
    """Stored tensor -> float64, exactly. `dtype` is the safetensors name."""
    values: Floats
    if dtype == "BF16":
        values = (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    elif dtype.startswith("F8_"):
        import ml_dtypes

        kind = ml_dtypes.float8_e4m3fn if dtype == "F8_E4M3" else ml_dtypes.float8_e5m2
        values = stored.view(kind).astype(np.float64)
    else:
        values = stored.astype(np.float64)
    return values


def largest(stored: Array, dtype: str, axis: int) -> Floats:
    """Largest magnitude along `axis` of a matrix, as float64; infinite or NaN where a value is.

    Without their sign floats order as integers do, and numpy's integer maximum is many times faster than a half's: the
    largest signed integer is the largest positive value, the largest unsigned one the largest negative value, if any.
    """
    if dtype not in ("F64", "F32", "F16", "BF16"):
        return _maximum(np.abs(values_of(stored, dtype)), axis)
    signed, unsigned = stored.view(f"i{stored.itemsize}"), stored.view(f"u{stored.itemsize}")
    positive, negative = _maximum(signed, axis).clip(0), _maximum(unsigned, axis).view(signed.dtype)
    bits = np.maximum(positive, negative & np.iinfo(signed.dtype).max)
    return values_of(bits.view(stored.dtype), dtype)


def _maximum(matrix: Array, axis: int) -> Array:
    rows, columns = matrix.shape
    fold = 1024 // columns if axis == 0 else 1
    if fold > 1 and rows % fold == 0:
        # numpy reduces long rows quickly and short ones slowly
        matrix = matrix.reshape(rows // fold, fold * columns).max(axis=0).reshape(fold, columns)
    found: Array = matrix.max(axis=axis)
    return found


def store(stored: Array, dtype: str, factor: float | Floats, out: Array, target: str) -> None:
    """out = round(stored * factor), once, to the target type.

    Args:
        stored: source in its storage type, `dtype` its safetensors name.
        factor: one number, or an array that broadcasts against `stored`.
        out: same shape, in the target's storage type (uint16 bits for bfloat16).
    """
    if not isinstance(factor, float):
        out[...] = round_to(values_of(stored, dtype) * factor, target)
        return
    if factor == 1.0 and STORAGE[target] == stored.dtype and (target == "bfloat16") == (dtype == "BF16"):
        np.copyto(out, stored)
        return
    flat = np.ascontiguousarray(stored).reshape(-1)
    if out.flags.c_contiguous:
        _store_flat(flat, dtype, factor, out.reshape(-1), target)
    else:
        packed = np.empty(flat.size, out.dtype)
        _store_flat(flat, dtype, factor, packed, target)
        out[...] = packed.reshape(out.shape)


def _store_flat(flat: Array, dtype: str, factor: float, out: Array, target: str) -> None:
    mantissa, exponent = math.frexp(factor)
    table = _table_for(flat.size, dtype, factor, target)
    if table is not None:
        span = _span(dtype, exponent - 1) if abs(mantissa) == 0.5 and _SAME[dtype] == target else None
        for at in range(0, flat.size, _CHUNK):
            part = slice(at, at + _CHUNK)
            if span:
                _move_exponents(flat[part].view(np.uint16), span, factor < 0, out[part].view(np.uint16), table)
            else:
                np.take(table, flat[part].view(np.uint16), out=out[part], mode="clip")
        return
    exact = dtype == "F32" and abs(mantissa) == 0.5 and abs(exponent) < 64  # float32 holds the factor itself
    for at in range(0, flat.size, _CHUNK):
        part = slice(at, at + _CHUNK)
        if exact:
            out[part] = _round_single(flat[part] * np.float32(factor), target)
        else:
            out[part] = round_to(values_of(flat[part], dtype) * factor, target)


class _Span(NamedTuple):
    """Of a 16-bit type: what is added to a value's bits to multiply it by a power of two, and for which magnitudes."""

    step: int
    lowest: int
    highest: int


def _span(dtype: str, exponent: int) -> _Span | None:
    """For 2^exponent: the values that are normal before and after; None if there are none."""
    bits, largest_exponent = _FIELDS[dtype]
    low, high = max(1, 1 - exponent), min(largest_exponent, largest_exponent - exponent)
    return _Span(exponent << bits, low << bits, (high + 1 << bits) - 1) if low <= high else None


def _move_exponents(source: Array, span: _Span, negative: bool, out: Array, table: Array) -> None:
    """out = source * (-1)^negative * 2^k, by one addition where the value stays normal, else by the table."""
    beyond = source & 0x7FFF
    beyond -= np.uint16(span.lowest)  # wraps round below
    np.add(source, np.uint16((span.step + (0x8000 if negative else 0)) & 0xFFFF), out=out)
    width = span.highest - span.lowest
    if beyond.max() > width:
        rest = np.flatnonzero(beyond > width)
        out[rest] = table[source[rest]].view(np.uint16)


class _Table:
    """Every 16-bit value of a type, multiplied and rounded; made once enough values asked for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.entries: Array | None = None


@functools.lru_cache(maxsize=64)
def _table(_dtype: str, _factor: float, _target: str) -> _Table:
    return _Table()


def _table_for(size: int, dtype: str, factor: float, target: str) -> Array | None:
    if dtype not in ("F16", "BF16"):
        return None
    table = _table(dtype, factor, target)
    table.asked += size
    if table.entries is None and table.asked >= _CHUNK:
        every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(STORED[dtype])
        with np.errstate(all="ignore"):  # it also holds the entries of infinities, which no tensor here has
            table.entries = round_to(values_of(every, dtype) * factor, target)
    return table.entries


def round_to(values: Floats, target: str) -> Array:
    """float64 -> target storage type, rounded once to nearest even."""
    if target == "bfloat16":
        # Rounding twice could double-round: the first goes to odd, which keeps the information the second needs.
        single = values.astype(np.float32)
        wide = single.astype(np.float64)
        bits = single.view(np.uint32)
        bits -= np.abs(wide) > np.abs(values)
        bits |= wide != values
        return _to_bfloat16(bits)
    return values.astype(STORAGE[target])


def is_finite(stored: Array, target: str) -> bool:
    """Whether values in the storage type of `target` are all finite."""
    if target == "bfloat16":
        return bool(((stored & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(stored).all())


def _round_single(values: npt.NDArray[np.float32], target: str) -> Array:
    if target == "bfloat16":
        return _to_bfloat16(values.view(np.uint32))
    return values.astype(STORAGE[target], copy=False)


def _to_bfloat16(bits: npt.NDArray[np.uint32]) -> Array:
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    return odd.astype(np.uint16)
