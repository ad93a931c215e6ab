"""HOST: adapters in POSIX shared memory, laid out so that a bind moves no bytes through gRPC.

A region holds `lora_weights`, then `lora_config`. Its name is taken away as soon as Triton has mapped it: from then on
Triton's mapping is the copy, and nothing is left in /dev/shm, whatever ends this process. Until then its file is
locked by the process that fills it, so that one whose process was killed is known for what it is (`sweep`).
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from adapter_slots.errors import BundleBroken, HostFull, TierError
from trtllm_lora import Bundle, BundleError
from trtllm_lora.bundle import WEIGHTS_FILE

SHM = Path("/dev/shm")  # noqa: S108 - where shm_open keeps its names on Linux; Triton opens by that name
PREFIX = "lora-host-"
"""Of the names of all regions, and of no other file there."""
KEPT_FREE = 16 * 2**20
"""Bytes of shared memory that are left to others, beside as many as the adapter has: Triton hands tensors to its Python
models through the same file system, the CPU engine's weights too, and a full one ends the server by SIGBUS."""
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """A region that still has its name: `file` keeps it locked until it is closed."""

    region: Region
    file: IO[bytes]


def region_bytes(bundle: Bundle) -> int:
    """Bytes a bundle takes in HOST."""
    weights, config = bundle.weights(), bundle.config()
    return _aligned(weights.nbytes) + config.nbytes


def load(bundle: Bundle, name: str) -> Loaded:
    """Copy a bundle into a new shared-memory region (blocking; one memcpy). The name begins with `PREFIX`.

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
        _check_room(total, total)
        file = _new_file(path)
        try:
            # copied in the kernel: no page is faulted in here, a full tmpfs is an error and not a SIGBUS, and so is a
            # bundle that shrinks meanwhile
            _send(bundle.path / WEIGHTS_FILE, weights.nbytes, file.fileno())
            os.pwrite(file.fileno(), config.tobytes(), offset)
            _check_room(0, total)  # others, and other adapters on their way, may have taken it meanwhile
        except (OSError, TierError):
            path.unlink(missing_ok=True)
            file.close()
            raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise HostFull(f"shared memory has no room for {total} bytes", total) from None
        raise TierError(f"shared memory {path}: {error.strerror}") from None
    region = Region(
        name=name,
        dtype=bundle.dtype,
        num_bytes=total,
        weights_shape=weights.shape,
        weights_bytes=weights.nbytes,
        config_shape=config.shape,
        config_offset=offset,
        config_bytes=config.nbytes,
    )
    return Loaded(region, file)


def sweep() -> list[str]:
    """Remove the files of processes that were killed while they filled them; returns their names."""
    gone = []
    for path in SHM.glob(f"{PREFIX}*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:
            continue  # somebody fills it, or it went by itself, or it is another user's
        gone.append(path.name)
    return gone


def _check_room(more: int, adapter: int) -> None:
    """Raise HostFull unless so many bytes more leave enough to others."""
    stat = os.statvfs(SHM)
    free = stat.f_bavail * stat.f_frsize
    short = more + adapter + KEPT_FREE - free
    if stat.f_blocks and short > 0:
        raise HostFull(
            f"shared memory has no room for {adapter} bytes: {free} of {stat.f_blocks * stat.f_frsize} are free, and "
            f"{adapter + KEPT_FREE} must stay so",
            short,
        )


def _new_file(path: Path) -> IO[bytes]:
    """A new file that this process holds the lock of."""
    while True:
        file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # swept before it was locked


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
