"""bfloat16 through DLPack, as torch writes it."""

from __future__ import annotations

import numpy as np
import pytest

from reference_engine.dlpack import bfloat16_bits


@pytest.mark.oracle
def test_bits_are_torchs() -> None:
    """Shape and bits of a dense tensor; anything else is refused."""
    torch = pytest.importorskip("torch")
    from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

    values = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).to(torch.bfloat16) * 1.37
    np.testing.assert_array_equal(bfloat16_bits(to_dlpack(values)), values.view(torch.uint16).numpy())
    for other in (values.float(), values.transpose(0, 2)):
        with pytest.raises(ValueError, match="dense bfloat16"):
            bfloat16_bits(to_dlpack(other))
