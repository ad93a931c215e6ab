"""Keeping both factors within the range of the target type.

ΔW = Σᵢ B[:, i] · A[i, :]. A power of two moved from one factor of a term to the other changes nothing, so where A or
s·B would overflow, or sink where float16 loses precision, each rank component is balanced on its own: exactly. What
does not fit even then is refused. Reference: docs/conversion-rules.md#range.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peft_to_trtllm.rounding import RANGES, Floats, Range

_COMFORT = 6
"""Binary places kept free below a component's largest value: it is balanced if there are fewer."""


class Balance(NamedTuple):
    """What each rank component is multiplied by, before the one rounding."""

    exponents: npt.NDArray[np.intp]
    """k [r]: A[i] * 2^k and s·B[:, i] * 2^-k."""
    dropped: npt.NDArray[np.bool_]
    """[r] components of zero whose other side the type cannot hold: both sides are written as zeros, exactly."""


class RangeProblem(ValueError):
    """A row that the target type cannot hold; the message is one line."""


def balance(
    largest_a: Floats, largest_b: Floats, target: str, *, exact_a: bool = False, exact_b: bool = False
) -> Balance | None:
    """Exponents k [r] with A[i] * 2^k and s·B[:, i] * 2^-k in range; None where nothing needs to move.

    A component with a zero side adds nothing and is left where it is.

    Args:
        largest_a: largest magnitude of each row of A, float64 [r].
        largest_b: largest magnitude of each column of s·B, float64 [r].
        exact_a, exact_b: the factor is of the target type already and does not shrink: small values lose nothing where
            they are, and would if they moved.

    Raises:
        RangeProblem: a component overflows, or the whole row sinks below the target's precision.
    """
    span = RANGES[target]
    low = 2.0 ** (span.smallest_exponent + _COMFORT)
    both = (largest_a > 0) & (largest_b > 0)
    too_large = (largest_a > span.largest) | (largest_b > span.largest)
    too_small = both & ((largest_a < low) & (not exact_a) | (largest_b < low) & (not exact_b))
    if not (too_large.any() or too_small.any()):
        return None
    exponent_a, exponent_b = np.frexp(largest_a)[1], np.frexp(largest_b)[1]
    k = np.where(both & (too_large | too_small), (exponent_b - exponent_a) // 2, 0)
    dropped = too_large & ~both
    with np.errstate(over="ignore", under="ignore"):  # what overflows here is what is looked for
        _check_range(np.where(both, largest_a, 0), np.where(both, largest_b, 0), k, target, span)
    return Balance(k, dropped)


def _check_range(largest_a: Floats, largest_b: Floats, k: npt.NDArray[np.intp], target: str, span: Range) -> None:
    both = largest_a > 0
    if not both.any():
        return
    peak = float((largest_a * largest_b).max())
    if (np.ldexp(largest_a, k) > span.largest).any() or (np.ldexp(largest_b, -k) > span.largest).any():
        raise RangeProblem(
            f"values overflow {target}: a rank component reaches {peak:.3g}, too large for any split between A and B"
        )
    level = (np.frexp(largest_a)[1] + np.frexp(largest_b)[1]) / 2
    if level[both].max() < span.smallest_exponent + 2:
        raise RangeProblem(
            f"values underflow {target}: the largest rank component is {peak:.3g}, below what its precision can say"
        )
