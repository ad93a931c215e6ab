"""Reads a GGUF file: metadata and tensors, dequantised to float32 one at a time.

The format is llama.cpp's (ggml docs/gguf.md, version 2 and 3, little endian): magic, version, counts, key-value pairs,
tensor table, then the data at `general.alignment`. Block types known here, 32 values per block:

    Q4_1  20 bytes  f16 scale, f16 minimum, 16 bytes of nibbles: low nibbles are values 0-15, high ones 16-31
    Q8_0  34 bytes  f16 scale, 32 int8

Rules: any other type is refused by name, never guessed; offsets are checked against the file before anything is read;
values are computed in float32 as `nibble * scale + minimum`, two roundings, so that every machine gives the same bits.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_slots.base_model.errors import GgufError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# ggml's type numbers (ggml.h); the known ones with values and bytes per block
_BLOCKS = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34)}
_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One entry of the tensor table. `shape` is in row-major order, the reverse of ggml's; `offset` is absolute."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    num_bytes: int


class Gguf:
    """A parsed GGUF file over a buffer that must stay alive as long as this object."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def __init__(self, data: bytes) -> None:
        """Parse the header of `data`. Raises GgufError; the tensors' values are not touched yet."""
        self._data = data
        self._at = 0
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise GgufError(f"GGUF header broken near byte {self._at:,}: {error}") from error

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor `name` as float32 in its row-major shape."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        return _DEQUANTISE[tensor.type](raw).reshape(tensor.shape)

    def _parse(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise GgufError(f"not a GGUF file: it starts with {magic!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise GgufError(f"GGUF version {version} is not known here (2 and 3 are)")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata = {}
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        table = [self._table_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise GgufError(f"general.alignment {alignment!r} is no alignment")
        start = -(-self._at // alignment) * alignment
        self.tensors = {entry[0]: self._tensor(*entry, start) for entry in table}
        if len(self.tensors) != len(table):
            raise GgufError("two tensors have one name")

    def _table_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], type_: int, offset: int, start: int) -> Tensor:
        if type_ not in _BLOCKS:
            known = ", ".join(_NAMES[t] for t in _BLOCKS)
            raise GgufError(f"tensor {name} is of type {_NAMES.get(type_, type_)}; only {known} are read here")
        values, size = _BLOCKS[type_]
        if not shape or shape[-1] % values:
            raise GgufError(f"tensor {name} of shape {shape} does not divide into {_NAMES[type_]} blocks of {values}")
        count = 1
        for extent in shape:
            count *= extent
        num_bytes = count // values * size
        if start + offset + num_bytes > len(self._data):
            raise GgufError(
                f"tensor {name} ends at byte {start + offset + num_bytes:,} of {len(self._data):,}: cut off"
            )
        return Tensor(name, shape, type_, start + offset, num_bytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) != length:
            raise GgufError(f"GGUF header cut off: a string of {length:,} bytes starts at byte {self._at:,}")
        self._at += length
        return raw.decode()

    def _value(self, type_: int) -> Any:
        if type_ == _STRING:
            return self._string()
        if type_ == _ARRAY:
            item, length = self._scalar("I"), self._scalar("Q")
            return [self._value(item) for _ in range(length)]
        if type_ not in _SCALARS:
            raise GgufError(f"GGUF metadata type {type_} is not known, near byte {self._at:,}")
        return self._scalar(_SCALARS[type_])


def _f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f2").astype(np.float32)


def _q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 20)
    head = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32)
    values = np.empty((len(blocks), 32), np.float32)
    values[:, :16] = blocks[:, 4:] & 0x0F
    values[:, 16:] = blocks[:, 4:] >> 4
    values *= head[:, :1]
    values += head[:, 1:]
    return values


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 34)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= scale
    return values


_DEQUANTISE = {0: _f32, 1: _f16, 3: _q4_1, 8: _q8_0}
