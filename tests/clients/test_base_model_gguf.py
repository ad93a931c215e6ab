"""The GGUF reader on files written here, byte by byte."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_slots.base_model import GgufError
from lora_slots.base_model.gguf import Gguf
from lora_slots.base_model.huggingface import split_rotary

F32, F16, Q4_1, Q8_0, Q6_K = 0, 1, 3, 8, 14


def text(value: str) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_file(tensors: dict[str, tuple[tuple[int, ...], int, bytes]], pairs: bytes = b"", num_pairs: int = 0) -> bytes:
    """A GGUF version 3 file of (row-major shape, type, bytes) tensors, each aligned to 32."""
    table, data = b"", b""
    for name, (shape, kind, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        table += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        table += struct.pack("<IQ", kind, len(data))
        data += raw
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), num_pairs) + pairs + table
    return header + b"\0" * (-len(header) % 32) + data


def test_q4_1_is_nibble_times_scale_plus_minimum() -> None:
    """Low nibbles are the first sixteen values, high ones the last; float32 throughout, two roundings."""
    rng = np.random.default_rng(3)
    heads = rng.standard_normal((6, 2)).astype(np.float16)
    nibbles = rng.integers(0, 16, (6, 32), np.uint8)
    raw = b"".join(
        head.tobytes() + (values[:16] | values[16:] << 4).tobytes() for head, values in zip(heads, nibbles, strict=True)
    )
    expected = [
        [np.float32(value) * np.float32(head[0]) + np.float32(head[1]) for value in values]
        for head, values in zip(heads, nibbles, strict=True)
    ]
    found = Gguf(gguf_file({"w": ((2, 96), Q4_1, raw)})).read("w")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(np.reshape(np.array(expected, np.float32), (2, 96)), found)


def test_q8_0_is_int8_times_scale() -> None:
    """Every value is its int8 times its block's scale, -128 included."""
    values = np.arange(-128, -64, dtype=np.int8).reshape(2, 32)
    scales = np.array([0.1, -3.0], np.float16)
    raw = b"".join(scale.tobytes() + row.tobytes() for scale, row in zip(scales, values, strict=True))
    expected = values.astype(np.float32) * scales.astype(np.float32)[:, None]
    np.testing.assert_array_equal(expected.reshape(1, 64), Gguf(gguf_file({"w": ((1, 64), Q8_0, raw)})).read("w"))


@pytest.mark.parametrize(("kind", "dtype"), [(F32, "<f4"), (F16, "<f2")])
def test_plain_floats_come_out_in_row_major_order(kind: int, dtype: str) -> None:
    """F32 and F16 tensors keep their values, and a shape is the reverse of the file's."""
    values = np.arange(6, dtype=dtype).reshape(2, 3)
    np.testing.assert_array_equal(values, Gguf(gguf_file({"w": ((2, 3), kind, values.tobytes())})).read("w"))


def test_an_unknown_type_is_refused_by_name() -> None:
    """Q6_K is not guessed at; the message names tensor and type."""
    with pytest.raises(GgufError, match=r"blk\.0\.w is of type Q6_K; only F32, F16, Q4_1, Q8_0"):
        Gguf(gguf_file({"blk.0.w": ((256,), Q6_K, bytes(210))}))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\3\4 a zip", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (gguf_file({"w": ((33,), Q8_0, bytes(34))}), "does not divide"),
        (gguf_file({"w": ((4,), F32, bytes(15))}), "cut off"),
        (gguf_file({}, text("k") + struct.pack("<I", 99), 1), "metadata type 99"),
        (gguf_file({}, text("general.alignment") + struct.pack("<II", 4, 0), 1), "alignment"),
    ],
)
def test_broken_files_are_refused_with_a_reason(data: bytes, says: str) -> None:
    """Each way to be wrong has its own words."""
    with pytest.raises(GgufError, match=says):
        Gguf(data)


WHOLE = gguf_file(
    {"a": ((2, 32), Q4_1, bytes(40)), "b": ((3,), F32, bytes(12))},
    text("names") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz"),
    1,
)


@given(cut=st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_refused(cut: int) -> None:
    """No prefix of a file passes for the file."""
    with pytest.raises(GgufError):
        Gguf(WHOLE[:cut])


@given(at=st.integers(0, len(WHOLE) - 1), value=st.integers(0, 255))
@settings(max_examples=300)
def test_one_wrong_byte_is_read_or_refused(at: int, value: int) -> None:
    """Whatever byte is changed, the reader either reads every tensor or raises its own error."""
    data = bytearray(WHOLE)
    data[at] = value
    try:
        gguf = Gguf(bytes(data))
    except GgufError:
        return
    for name in gguf.tensors:
        gguf.read(name)


def test_split_rotary_undoes_the_interleaving() -> None:
    """Rows 0, 2, 4, … of a head become its first half, rows 1, 3, 5, … its second, head by head."""
    rows = np.arange(16, dtype=np.float32)[:, None]
    expected = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert split_rotary(rows, 2)[:, 0].tolist() == expected
