"""A file of named tensors: where each lies, and how its bytes are brought in.

Both file kinds PEFT writes (safetensors, and the zip of torch.save) end up as `TensorFile`: the header is parsed and
checked completely at the border, the data is read on demand, one tensor at a time, into a caller's buffer.

Rules of the safetensors format that are checked here (its README, section Format): header length within the file and
below 64 MiB, no duplicate keys, known dtypes, dtype x shape = size, offsets in order without holes or overlaps, data
ending with the file.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from peft_to_trtllm.file_hash import open_regular, stamp_of
from peft_to_trtllm.strict_json import JsonProblem, parse_object

HEADER_LIMIT = 64 << 20
TENSOR_LIMIT = 1 << 18
"""More tensors than any known adapter has (DeepSeek-V3 with every expert adapted: 94,000)."""

_VALUE_LIMIT = 12 * TENSOR_LIMIT
"""JSON values in a header: an entry of a matrix has nine."""

STORAGE: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"),
}
"""numpy type that carries each safetensors dtype; types numpy lacks travel as bit patterns."""

Array = npt.NDArray[Any]


class FileProblem(ValueError):
    """The file is not what it should be; the message is one line, `rule` the anchor in the rules page."""

    def __init__(self, message: str, rule: str = "corrupt-file") -> None:
        super().__init__(message)
        self.rule = rule


class Tensor(NamedTuple):
    """Where one tensor lies in its file. `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte, from the start of the file."""
    nbytes: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.nbytes // STORAGE[self.dtype].itemsize


class TensorFile:
    """An open file of tensors, to be closed."""

    def __init__(self, path: Path, descriptor: int, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self.tensors = tensors
        self.stamp = stamp_of(os.fstat(descriptor))
        self._descriptor = descriptor
        self._scratch: dict[str, Array] = {}
        self._held: dict[str, Tensor] = {}

    def close(self) -> None:
        """Close the file; open arrays stay valid."""
        os.close(self._descriptor)

    def read(self, tensor: Tensor, scratch: str | None = None) -> Array:
        """The tensor in its storage type and shape (BF16 as uint16, F8 as uint8).

        With `scratch`, the array lives in a buffer of that name and is valid until another tensor is read into it: a
        conversion reads hundreds of tensors of one size, and fresh memory for each would cost more than the copy.
        Reading the tensor the buffer already holds costs nothing.

        Raises:
            FileProblem: the file became shorter since it was opened.
        """
        if scratch is None:
            flat = np.empty(tensor.nbytes, np.uint8)
            self._fill(flat, tensor)
        else:
            flat = self._scratch.get(scratch, np.empty(0, np.uint8))
            if flat.size < tensor.nbytes:
                flat = self._scratch[scratch] = np.empty(tensor.nbytes, np.uint8)
            flat = flat[: tensor.nbytes]
            if self._held.get(scratch) is not tensor:
                self._fill(flat, tensor)
                self._held[scratch] = tensor
        return flat.view(STORAGE[tensor.dtype]).reshape(tensor.shape)

    def _fill(self, flat: Array, tensor: Tensor) -> None:
        view, done = flat.data, 0
        while done < tensor.nbytes:
            got = os.preadv(self._descriptor, [view[done:]], tensor.offset + done)
            if got <= 0:
                raise FileProblem(f"{tensor.name}: the file ended early; was it changed while it was read?")
            done += got


def open_safetensors(path: Path) -> TensorFile:
    """Open a safetensors file and check its header completely.

    Raises:
        FileProblem: everything the format forbids.
        OSError: the file cannot be opened.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        return TensorFile(path, descriptor, _header(descriptor, size))
    except BaseException:
        os.close(descriptor)
        raise


def _header(descriptor: int, size: int) -> dict[str, Tensor]:
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise FileProblem(f"{size} bytes are too short for a safetensors header: truncated or another format")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        raise FileProblem(
            f"safetensors header length {length} is larger than the file ({size} bytes): truncated or corrupt"
        )
    if length > HEADER_LIMIT:
        raise FileProblem(f"safetensors header of {length} bytes, at most {HEADER_LIMIT} are read")
    text = os.pread(descriptor, length, 8)
    count = text.count(b'"data_offsets"')
    if count > TENSOR_LIMIT:
        raise FileProblem(f"about {count} tensors, at most {TENSOR_LIMIT} are read")
    try:
        entries = parse_object(text, limit=HEADER_LIMIT, most_values=_VALUE_LIMIT)
    except JsonProblem as problem:
        raise FileProblem(f"safetensors header: {problem}") from None
    entries.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _entry(name, entry, start) for name, entry in entries.items()}
    _check_cover(tensors.values(), start, size)
    return tensors


def _entry(name: str, entry: Any, start: int) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileProblem(f"safetensors header: {name[:120]!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORAGE:
        raise FileProblem(f"{name[:120]!r}: tensor type {str(dtype)[:40]!r} is none of {', '.join(STORAGE)}")
    if not (_whole_numbers(shape) and len(shape) <= 8 and _whole_numbers(offsets) and len(offsets) == 2):
        raise FileProblem(f"{name[:120]!r}: invalid shape or data_offsets in the safetensors header")
    nbytes = STORAGE[dtype].itemsize
    for side in shape:
        nbytes *= side
    begin, end = offsets
    if end - begin != nbytes:
        raise FileProblem(
            f"{name[:120]!r}: {dtype} {shape} takes {nbytes} bytes, data_offsets span {end - begin}: corrupt"
        )
    return Tensor(name, dtype, tuple(shape), start + begin, nbytes)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_cover(tensors: Any, start: int, size: int) -> None:
    position = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise FileProblem(f"{tensor.name[:120]!r}: invalid data_offsets, the tensor {what}: corrupt")
        position += tensor.nbytes
    if position != size:
        what = "truncated" if position > size else "trailing bytes"
        raise FileProblem(f"safetensors data ends at byte {position}, the file has size {size}: {what}")
