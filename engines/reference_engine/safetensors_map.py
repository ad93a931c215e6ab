"""Tensors of safetensors files, mapped: weights stay on disk until the operating system brings a page.

safetensors' own numpy door copies, and knows no bfloat16; here the file is checked by the library and then mapped.
bfloat16 comes as the bit pattern in `uint16`.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from reference_engine.errors import EngineDirectoryError

Array = npt.NDArray[Any]

TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""safetensors type -> numpy type that carries it."""


class MappedTensors:
    """Read-only views of every tensor in one or more safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Open and check the files.

        Raises:
            EngineDirectoryError: a file is missing or no safetensors file, or a tensor has an unsupported type.
        """
        self._views: dict[str, Array] = {}
        self._maps: list[mmap.mmap] = []
        for file in files:
            self._open(file)

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def release(self) -> None:
        """Let the operating system have the pages back; they are read again if anyone looks."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, framework="numpy"):
                pass  # the library checks header, offsets and size
            with file.open("rb") as source:
                size = int.from_bytes(source.read(8), "little")
                header = json.loads(source.read(size))
                # private: OpenVINO wants writable memory, nobody writes, and the file would not change if one did
                mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, SafetensorError, ValueError) as error:
            raise EngineDirectoryError(f"{file}: not a readable safetensors file: {error}") from None
        self._maps.append(mapped)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            kind = TYPES.get(entry["dtype"])
            if kind is None:
                raise EngineDirectoryError(f"{file}: {name} is {entry['dtype']}, {', '.join(TYPES)} are supported")
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(mapped, kind, (end - begin) // kind.itemsize, 8 + size + begin)
            self._views[name] = flat.reshape(entry["shape"])


def base_files(base: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory, whole or in shards.

    Raises:
        EngineDirectoryError: there are none, or the index cannot be read.
    """
    index = base / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise EngineDirectoryError(f"{index}: not a readable index: {error}") from None
        return [base / name for name in names]
    if not (base / "model.safetensors").is_file():
        raise EngineDirectoryError(f"{base}: no model.safetensors")
    return [base / "model.safetensors"]


def write_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]], kind: str, tensors: Iterator[Array]) -> None:
    """Write tensors of one safetensors type (`F32`, `F16`, `BF16`), one at a time, in the order of `shapes`; fsync.

    Each tensor starts on a multiple of 64 bytes within the file, as mapped constants want it.
    """
    itemsize, header, total = TYPES[kind].itemsize, dict[str, object](), 0
    for name, shape in shapes.items():
        end = total + itemsize * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != shape:
                raise EngineDirectoryError(f"{name} is {list(tensor.shape)}, the config says {list(shape)}")
            out.write(np.ascontiguousarray(tensor, TYPES[kind]).data)
        out.flush()
        os.fsync(out.fileno())
