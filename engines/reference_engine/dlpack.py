"""Reading a bfloat16 tensor that Triton's Python backend gives out as DLPack only: numpy has no such type.

The layout is DLPack's `DLTensor` (dlpack.h, ABI version 0): data, device, ndim, dtype, shape, strides, byte offset.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

_BFLOAT, _BITS, _CPU = 4, 16, (1, 3)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def bfloat16_bits(capsule: object, owner: object) -> npt.NDArray[np.uint16]:
    """A dense bfloat16 CPU tensor as `uint16` bit patterns, in place: `owner`, whose memory it is, lives as long.

    Raises:
        ValueError: another type, another device, or not one dense block.
    """
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    shape = tuple(tensor.shape[: tensor.ndim])
    dense = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    strided = bool(tensor.strides) and tuple(tensor.strides[: tensor.ndim]) != dense
    if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, _BITS, 1) or tensor.device_type not in _CPU or strided:
        raise ValueError("a dense bfloat16 tensor in CPU memory is expected")
    raw = (ctypes.c_uint16 * int(np.prod(shape))).from_address(tensor.data + tensor.byte_offset)
    raw.owner = owner  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(raw), np.uint16).reshape(shape)
