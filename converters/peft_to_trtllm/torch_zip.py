"""adapter_model.bin without running it.

torch.save writes a zip: data.pkl, a pickle that describes the tensors, and one stored (never compressed) entry per
storage. A pickle is a program; this reader interprets only the dozen instructions a state dict needs, and its "calls"
are four known names that build inert records. No name is ever imported, nothing is ever called: a file that asks for
more is refused with what it asked for.

Bounds: the directory of the zip and the pickle at most 64 MiB each, no compressed entry, no overlap, all within the
file.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft_to_trtllm.file_hash import open_regular
from peft_to_trtllm.tensor_file import STORAGE, TENSOR_LIMIT, FileProblem, Tensor, TensorFile

_LIMIT = 64 << 20
_MOST_STEPS = 64 * TENSOR_LIMIT // 2
"""Instructions; torch.save writes about 45 for a tensor, and no known adapter has half of TENSOR_LIMIT."""

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_CALLS = frozenset({"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"})


@dataclass(frozen=True, slots=True)
class _Name:
    """A name the pickle mentions; it stays a text."""

    text: str


@dataclass(frozen=True, slots=True)
class _Stored:
    """A storage: the zip entry data/<key>."""

    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor: part of a storage."""

    stored: _Stored
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def open_torch_zip(path: Path) -> TensorFile:
    """Open an adapter_model.bin as a file of tensors.

    Raises:
        FileProblem: not torch's zip, a pickle that wants more than tensors, entries out of bounds.
        OSError: the file cannot be opened.
    """
    descriptor = open_regular(path)
    try:
        entries = _entries(descriptor)
        pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise _unsafe("the zip has no data.pkl of torch.save")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in entries and _content(descriptor, entries[f"{root}byteorder"]).strip() != b"little":
            raise _unsafe("its byte order is not little-endian")
        state = _Machine(_content(descriptor, entries[pickles[0]])).run()
        return TensorFile(path, descriptor, _tensors(state, entries, root))
    except BaseException:
        os.close(descriptor)
        raise


def _unsafe(what: str) -> FileProblem:
    return FileProblem(f"adapter_model.bin (pickle): {what}; save the adapter as safetensors", "pickle")


def _entries(descriptor: int) -> dict[str, tuple[int, int]]:
    """Entry name -> (first byte, bytes), every entry checked."""
    size = os.fstat(descriptor).st_size
    _check_directory(descriptor, size)
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file, zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise _unsafe(f"not a readable zip: {error}") from None
    entries: dict[str, tuple[int, int]] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise _unsafe(
                f"zip entry {info.filename[:80]!r} is compressed or encrypted, torch.save stores entries plainly"
            )
        header = os.pread(descriptor, 30, info.header_offset)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise _unsafe(f"zip entry {info.filename[:80]!r} has no header: truncated or corrupt")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        begin = info.header_offset + 30 + name_length + extra_length
        if info.header_offset < end or begin + info.file_size > size or info.filename in entries:
            raise _unsafe(f"zip entry {info.filename[:80]!r} overlaps another, or the end of the file")
        end = begin + info.file_size
        entries[info.filename] = (begin, info.file_size)
    return entries


def _check_directory(descriptor: int, size: int) -> None:
    """Bound the zip's directory before anything parses it."""
    if os.pread(descriptor, 4, 0) != b"PK\x03\x04":
        raise _unsafe("not a zip: written by an old torch.save or not by it at all, or truncated")
    tail = os.pread(descriptor, 22, max(0, size - 22))
    if len(tail) < 22 or tail[:4] != b"PK\x05\x06":
        raise _unsafe("the end of the zip is missing: truncated or corrupt")
    count, length = struct.unpack("<HI", tail[10:16])
    if count == 0xFFFF or length == 0xFFFFFFFF:
        locator = os.pread(descriptor, 20, max(0, size - 42))
        at = struct.unpack("<Q", locator[8:16])[0] if locator[:4] == b"PK\x06\x07" else size
        record = os.pread(descriptor, 56, at) if at < size else b""
        if len(record) < 56:
            raise _unsafe("the end of the zip is corrupt")
        count, length = struct.unpack("<QQ", record[32:48])
    if count > TENSOR_LIMIT or length > _LIMIT:
        raise _unsafe(f"the zip has {count} entries in a directory of {length} bytes: too large")


def _content(descriptor: int, entry: tuple[int, int]) -> bytes:
    begin, length = entry
    if length > _LIMIT:
        raise _unsafe(f"a pickle of {length} bytes, at most {_LIMIT} are read")
    return os.pread(descriptor, length, begin)


def _tensors(state: Any, entries: Mapping[str, tuple[int, int]], root: str) -> dict[str, Tensor]:
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise _unsafe("it does not hold a dictionary of tensors")
    return {name: _tensor(name, view, entries, root) for name, view in state.items()}


def _tensor(name: str, view: Any, entries: Mapping[str, tuple[int, int]], root: str) -> Tensor:
    if not isinstance(view, _View):
        raise _unsafe(f"{name[:120]!r} is not a tensor")
    entry = entries.get(f"{root}data/{view.stored.key}")
    item = STORAGE[view.stored.dtype].itemsize
    nbytes, plain = item, []
    for side in reversed(view.shape):
        plain.append(nbytes // item)
        nbytes *= side
    strides = tuple(reversed(plain))
    contiguous = all(s == p or n <= 1 for s, p, n in zip(view.stride, strides, view.shape, strict=True))
    if entry is None or view.offset * item + nbytes > entry[1]:
        raise _unsafe(f"{name[:120]!r} reaches beyond its storage: truncated or corrupt")
    if nbytes and not contiguous:
        raise _unsafe(f"{name[:120]!r} is a view that is not contiguous")
    return Tensor(name, view.stored.dtype, view.shape, entry[0] + view.offset * item, nbytes)


class _Machine:
    """The pickle machine with inert values: texts, numbers, tuples, dictionaries and the records above."""

    def __init__(self, program: bytes) -> None:
        self._program = program
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The value the pickle describes."""
        try:
            for steps, (opcode, argument, _) in enumerate(pickletools.genops(self._program)):
                if steps > _MOST_STEPS:
                    raise _unsafe(f"a pickle of more than {_MOST_STEPS} instructions")
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except FileProblem:
            raise
        except (ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError, struct.error) as error:
            raise _unsafe(f"the pickle is corrupt ({type(error).__name__})") from None
        raise _unsafe("the pickle has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in _LITERALS:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_allowed(argument))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_call(stack.pop(), arguments))
        elif name == "BUILD":
            stack.pop()  # attributes of the dictionary (`_metadata`), nothing of the tensors
            if not isinstance(stack[-1], dict):
                raise _unsafe("it sets attributes of something that is no dictionary")
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "SETITEMS", "APPENDS"):
            self._collect(name)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], key, value)
        elif name != "PROTO":
            raise _unsafe(f"the pickle uses {name}, which a dictionary of tensors does not need: unsafe")

    def _collect(self, name: str) -> None:
        stack = self._stack
        mark = self._marks.pop()
        items = stack[mark:]
        del stack[mark:]
        if name == "TUPLE":
            stack.append(tuple(items))
        elif name == "APPENDS":
            stack[-1].extend(items)
        else:
            for key, value in zip(items[::2], items[1::2], strict=True):
                _set(stack[-1], key, value)


_CONSTANTS: Mapping[str, Any] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "NONE": lambda: None,
}
_LITERALS = frozenset({"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})


def _allowed(text: str) -> _Name:
    module, _, name = text.partition(" ")
    if text in _CALLS or (module == "torch" and name in _STORAGES):
        return _Name(text)
    raise _unsafe(
        f"the pickle asks for {text.replace(' ', '.')[:120]!r}, which is no part of a tensor: unsafe, not loaded"
    )


def _storage(reference: Any) -> _Stored:
    kind, name, key, _, _ = reference
    if kind != "storage" or not isinstance(name, _Name) or not isinstance(key, str):
        raise _unsafe("it refers to something that is no storage")
    return _Stored(key, _STORAGES[name.text.partition(" ")[2]])


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise _unsafe("it calls something that is no name")
    if function.text == "collections OrderedDict" and not arguments:
        return {}
    if function.text == "torch._utils _rebuild_parameter":
        return arguments[0]
    if function.text != "torch._utils _rebuild_tensor_v2":
        raise _unsafe(f"it calls {function.text.replace(' ', '.')}")
    stored, offset, shape, stride = arguments[:4]
    good = isinstance(stored, _Stored) and len(shape) == len(stride) <= 8
    sizes = (offset, *shape, *stride) if good else ()
    if not good or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise _unsafe("a tensor in it has an impossible shape")
    return _View(stored, offset, tuple(shape), tuple(stride))


def _set(mapping: Any, key: Any, value: Any) -> None:
    if not isinstance(mapping, dict) or not isinstance(key, str) or key in mapping:
        # a key is a text before it is hashed: hashing tuples nested a million deep ends the process
        raise _unsafe("it sets an item twice, of something that is no dictionary, or under a key that is no text")
    mapping[key] = value
