"""bfloat16 through DLPack, as torch writes it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from reference_engine.dlpack import bfloat16_bits


@pytest.mark.oracle
def test_bits_are_torchs() -> None:
    """Shape and bits of a dense tensor, in its own memory, which lives as long; anything else is refused."""
    torch = pytest.importorskip("torch")
    from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

    values = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).to(torch.bfloat16) * 1.37
    bits, wanted = bfloat16_bits(to_dlpack(values), values), values.view(torch.uint16).numpy().copy()
    assert bits.ctypes.data == values.data_ptr()
    for other in (values.float(), values.transpose(0, 2)):
        with pytest.raises(ValueError, match="dense bfloat16"):
            bfloat16_bits(to_dlpack(other), other)
    row, alive = bits[1], weakref.ref(values)
    del values, other, bits
    assert alive() is not None
    np.testing.assert_array_equal(row, wanted[1])
    del row
    assert alive() is None
