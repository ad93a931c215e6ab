"""DoRA: the magnitude as the engine wants it.

    W' = m * (W0 + s·B·A) / ‖W0 + s·B·A‖   per output row

The engine multiplies by what it is given and never sees W0: it wants m / ‖W0 + s·B·A‖, already divided. So the base's
weights are needed once, here. Row norms are taken in float64, a few hundred rows at a time.
Source: TensorRT-LLM `tensorrt_llm/lora_manager.py` norm_dora_magnitude; PEFT `tuners/lora/dora.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from peft_to_trtllm.base import Base
from peft_to_trtllm.errors import InputError
from peft_to_trtllm.families import CONV1D
from peft_to_trtllm.keys import Place, parse_path
from peft_to_trtllm.load import Loader
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rounding import Floats, round_to, values_of
from peft_to_trtllm.rows import Plan, Row
from peft_to_trtllm.tensor_file import FileProblem, Tensor, TensorFile, open_safetensors

_FLOATS = ("F64", "F32", "F16", "BF16")
_ROWS = 256
_DOUBT = 1e-12
"""Relative; far above what the order of a sum changes, far below what a target type can say."""

_Key = tuple[int, tuple[str, ...]]
"""(layer, leaf path below it)."""


class BaseWeights:
    """The linear weights of a base, found by layer and leaf. Close it, or use it as a context manager."""

    def __init__(self, path: Path, base: Base | None) -> None:
        self.path = path
        self._transposed = base is not None and base.model_type in CONV1D
        self._files = _open_all(path)
        self._tensors: dict[_Key, tuple[TensorFile, Tensor]] = {}
        twice: set[_Key] = set()
        for file in self._files:
            for name, tensor in file.tensors.items():
                place = parse_path(name.removesuffix(".weight")) if name.endswith(".weight") else None
                if isinstance(place, Place):
                    key = (place.layer, place.leaf)
                    twice |= {key} & self._tensors.keys()
                    self._tensors[key] = (file, tensor)
        for key in twice:
            del self._tensors[key]

    def __enter__(self) -> BaseWeights:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def check(self, plan: Plan, problems: Findings) -> None:
        """Whether every DoRA row finds its weight, of its shape."""
        for row in plan.rows:
            if row.magnitude:
                self._check_row(row, row.magnitude, problems)

    def normalised(self, row: Row, loader: Loader, dtype: str) -> Floats:
        """m / ‖W0 + s·B·A‖ [out] of a row whose weight `check` has found, float64.

        Rounded to `dtype` it is the same on every machine: matrix products differ in their last bits between
        processors, so where the rounding hangs on those, the norm is taken again in a fixed order.
        """
        source, tensor = self._tensors[_key(row)]
        (block,), stored = row.blocks, row.magnitude
        if stored is None:
            raise ValueError(f"{row.path} has no magnitude")
        weight = source.read(tensor, "W")
        weight = (weight.T if self._transposed else weight)[block.b_rows]
        a = values_of(loader.a(block), block.factors.a.dtype)
        b = values_of(loader.b(block), block.factors.b.dtype) * block.factors.scale
        norms = np.empty(row.d_out)
        for at in range(0, row.d_out, _ROWS):
            rows = slice(at, at + _ROWS)
            norms[rows] = np.linalg.norm(values_of(weight[rows], tensor.dtype) + b[rows] @ a, axis=1)
        magnitude = values_of(loader.file.read(stored, "M").reshape(-1), stored.dtype)[block.b_rows]
        with np.errstate(all="ignore"):  # a zero row is reported as not finite
            found = magnitude / norms
            close = round_to(found * (1 - _DOUBT), dtype) != round_to(found * (1 + _DOUBT), dtype)
            for i in np.flatnonzero(close & np.isfinite(found)):
                found[i] = magnitude[i] / _norm(values_of(weight[i], tensor.dtype), b[i], a)
        return np.asarray(found)

    def _check_row(self, row: Row, magnitude: Tensor, problems: Findings) -> None:
        found = self._tensors.get(_key(row))
        if found is None:
            problems.add(
                "dora",
                row.path,
                f"no single weight of that name in {self.path}",
                "the weights of the adapter's own base",
            )
            return
        (block,) = row.blocks
        tensor = found[1]
        total = block.factors.d_out
        shape = (total, row.d_in)
        wanted = shape[::-1] if self._transposed else shape
        if tensor.shape != wanted or tensor.dtype not in _FLOATS:
            what = f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} in {self.path}"
            problems.add(
                "dora",
                row.path,
                what,
                f"a floating-point weight of shape {list(wanted)}: the adapter's own base, not quantised",
            )
        if magnitude.size != total:
            problems.add(
                "dora",
                magnitude.name,
                f"{magnitude.size} values where the module has {total} rows",
                "one magnitude per output row",
            )


def _norm(weight: Floats, b: Floats, a: Floats) -> float:
    """‖w + b·A‖ of one row, by single additions in a fixed order."""
    total = weight.copy()
    for factor, component in zip(b, a, strict=True):
        total += factor * component
    total *= total
    while total.size > 1:
        half = total.size // 2
        total, rest = total[:half] + total[half : 2 * half], total[2 * half :]
        total[:1] += rest.sum()  # of one value, or none
    return math.sqrt(float(total[0]))


def _key(row: Row) -> _Key:
    place = parse_path(row.path)
    return (place.layer, place.leaf) if isinstance(place, Place) else (row.layer, ())


def _open_all(path: Path) -> list[TensorFile]:
    try:
        names = [path.name] if path.is_file() else sorted(item.name for item in path.glob("*.safetensors"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; --base-weights wants the base's directory") from None
    folder = path.parent if path.is_file() else path
    if not names:
        raise InputError(f"{path}: no .safetensors file here; --base-weights wants the base's directory")
    files: list[TensorFile] = []
    try:
        for name in names:
            files.append(open_safetensors(folder / name))
    except (FileProblem, OSError) as error:
        for file in files:
            file.close()
        raise InputError(f"{folder / name}: {error}") from None
    return files
