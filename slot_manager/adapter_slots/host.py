"""HOST: adapters in POSIX shared memory, laid out so that a bind moves no bytes through gRPC.

A region holds `lora_weights`, then `lora_config`. Its name is taken away as soon as Triton has mapped it: from then on
Triton's mapping is the copy, and nothing is left in /dev/shm, whatever ends this process.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.errors import BundleBroken, HostFull, TierError
from trtllm_lora import Bundle, BundleError
from trtllm_lora.bundle import WEIGHTS_FILE

SHM = Path("/dev/shm")  # noqa: S108 - where shm_open keeps its names on Linux; Triton opens by that name
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Region:
    """One adapter in shared memory, and how the engine finds its two tensors in it."""

    name: str
    """Name for Triton's registration; the shared-memory key is `/` + name."""
    dtype: str
    """Engine dtype of the weights: float32, float16 or bfloat16."""
    num_bytes: int
    weights_shape: tuple[int, ...]
    weights_bytes: int
    config_shape: tuple[int, ...]
    config_offset: int
    config_bytes: int


def region_bytes(bundle: Bundle) -> int:
    """Bytes a bundle takes in HOST."""
    weights, config = bundle.weights(), bundle.config()
    return _aligned(weights.nbytes) + config.nbytes


def load(bundle: Bundle, name: str) -> Region:
    """Copy a bundle into a new shared-memory region (blocking; one memcpy).

    Raises:
        HostFull: /dev/shm has no room. BundleBroken: the arrays cannot be read. TierError: anything else.
    """
    try:
        weights, config = bundle.weights(), bundle.config()
    except BundleError as error:
        raise BundleBroken(str(error)) from None
    offset = _aligned(weights.nbytes)
    total = offset + config.nbytes
    path = SHM / name
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # copied in the kernel: no page is faulted in here, a full tmpfs is an error and not a SIGBUS, and so is a
            # bundle that shrinks meanwhile
            _send(bundle.path / WEIGHTS_FILE, weights.nbytes, handle)
            os.pwrite(handle, config.tobytes(), offset)
        except (OSError, BundleBroken):
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise HostFull(f"shared memory has no room for {total} bytes") from None
        raise TierError(f"shared memory {path}: {error.strerror}") from None
    return Region(
        name=name,
        dtype=bundle.dtype,
        num_bytes=total,
        weights_shape=weights.shape,
        weights_bytes=weights.nbytes,
        config_shape=config.shape,
        config_offset=offset,
        config_bytes=config.nbytes,
    )


def _send(file: Path, length: int, handle: int) -> None:
    """The last `length` bytes of a file: the data of a .npy (rule B4)."""
    with file.open("rb", buffering=0) as source:
        start = os.fstat(source.fileno()).st_size - length
        while length:
            sent = os.sendfile(handle, source.fileno(), start, length)
            if not sent:
                raise BundleBroken(f"{file}: became shorter while it was read")
            start, length = start + sent, length - sent


def forget_name(name: str) -> None:
    """Take a region's name away, if there is one; mappings live on."""
    (SHM / name).unlink(missing_ok=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
