"""Writes a safetensors file tensor by tensor, so that 540 MB on disk never stand in memory at once.

Format: eight bytes little-endian header length, the JSON header padded with spaces to a multiple of eight, then the
tensors' bytes without holes, in the header's order.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterable[NDArray[np.float32]],
    wrote: Callable[[int, int], object] | None = None,
) -> None:
    """Write float32 `tensors`, given in the order of `shapes`, and fsync; `wrote(done, total)` counts bytes of data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, shape in shapes.items():
        end = total + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        done = 0
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != shape:
                raise ValueError(f"{name}: announced {shape}, got {tensor.shape}")
            file.write(np.ascontiguousarray(tensor, "<f4").data)
            done += tensor.nbytes
            if wrote is not None:
                wrote(done, total)
        file.flush()
        os.fsync(file.fileno())
