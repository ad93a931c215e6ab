"""Keeping both factors within the range of the target type.

ΔW = Σᵢ B[:, i] · A[i, :]. A power of two moved from one factor of a term to the other changes nothing, so where A or
s·B would overflow, or sink where float16 loses precision, each rank component is balanced on its own: exactly. What
does not fit even then is refused. Reference: docs/conversion-rules.md#range.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from peft_to_trtllm.rounding import RANGES, Floats

_COMFORT = 6
"""Binary places kept free below a component's largest value: it is balanced if there are fewer."""


class RangeProblem(ValueError):
    """A row that the target type cannot hold; the message is one line."""


def balance(
    largest_a: Floats, largest_b: Floats, target: str, *, exact_a: bool = False, exact_b: bool = False
) -> npt.NDArray[np.intp] | None:
    """Exponents k [r] with A[i] * 2^k and s·B[:, i] * 2^-k in range; None where nothing needs to move.

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
    middle = np.where(both, (exponent_b - exponent_a) // 2, np.where(largest_a > 0, -exponent_a, exponent_b))
    k = np.where(too_large | too_small, middle, 0)
    if (np.ldexp(largest_a, k) > span.largest).any() or (np.ldexp(largest_b, -k) > span.largest).any():
        peak = float((largest_a * largest_b).max())
        raise RangeProblem(
            f"values overflow {target}: a rank component reaches {peak:.3g}, too large for any split between A and B"
        )
    level = np.where(both, (exponent_a + exponent_b) / 2, -np.inf)
    if both.any() and level.max() < span.smallest_exponent + 2:
        peak = float((largest_a * largest_b).max())
        raise RangeProblem(
            f"values underflow {target}: the largest rank component is {peak:.3g}, below what its precision can say"
        )
    return k
