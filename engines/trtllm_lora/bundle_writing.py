"""Writing a bundle: nothing is visible under its name until it is whole and on disk (rule B8).

`write_bundle` takes whole arrays. A converter that writes rows as they come uses the parts: `write_array`,
`manifest_of`, `publish_folder`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_lora.bundle import (
    CONFIG_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Bundle,
    BundleFacts,
    canonical_json,
    digest_of,
    file_sha256,
    open_bundle,
)
from trtllm_lora.errors import BundleError
from trtllm_lora.files import fsync_path
from trtllm_lora.task_id import task_id_for
from trtllm_lora.tensors import STORAGE, Array, IntArray


def write_bundle(parent: Path, weights: Array, config: IntArray, facts: BundleFacts) -> Bundle:
    """Write a bundle below `parent`; nothing is visible under its name until it is whole and on disk.

    A bundle of the same digest that is already there is kept and returned.

    Args:
        weights: [1, rows, width] in the storage type of `facts.dtype`.
        config: [1, rows, 3 or 4] int32.

    Raises:
        BundleError: the disk refused (full, read-only), or the arrays are not of the format.
    """
    _check_arrays(weights, config, facts.dtype)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = WritingFolder(parent)
        folder.make()
    except OSError as error:
        raise BundleError(f"{parent}: cannot be written: {error.strerror}") from None
    temporary = folder.path
    try:
        void = np.dtype("V2") if facts.dtype == "bfloat16" else weights.dtype
        files = {
            WEIGHTS_FILE: write_array(temporary / WEIGHTS_FILE, weights.view(void)),
            CONFIG_FILE: write_array(temporary / CONFIG_FILE, config.astype("<i4", copy=False)),
        }
        manifest = manifest_of(facts, weights, config, files)
        write_bytes(temporary / MANIFEST_FILE, canonical_json(manifest, indent=1))
        fsync_path(temporary)
        return publish_folder(temporary, parent / manifest["digest"], manifest)
    except OSError as error:
        raise BundleError(f"{parent}: writing the bundle failed: {error.strerror or error}") from None
    finally:
        folder.remove()


def manifest_of(facts: BundleFacts, weights: Array, config: IntArray, files: dict[str, Any]) -> dict[str, Any]:
    """The whole manifest (rule B3); of `weights` only the shape counts."""
    table = config.reshape(config.shape[-2:])
    content = {
        "format_version": FORMAT_VERSION,
        **asdict(facts),
        "rows": int(weights.shape[1]),
        "width": int(weights.shape[2]),
        "config_columns": int(config.shape[2]),
        "ranks": sorted({int(rank) for rank in table[:, 2]}),
        "files": files,
    }
    content = json.loads(canonical_json(content))  # tuples become lists: what is hashed is what is read back
    digest = digest_of(content)
    return {**content, "digest": digest, "task_id": task_id_for(digest)}


def write_array(file: Path, array: Array) -> dict[str, Any]:
    """Write a `.npy` and wait until it is on disk; its entry in the manifest's `files`."""
    # numpy spells a void type as '|V2' and a little-endian one as '<f2': the headers TensorRT-LLM's tools write
    with file.open("wb") as out:
        np.save(out, np.ascontiguousarray(array), allow_pickle=False)
        out.flush()
        os.fsync(out.fileno())
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def write_bytes(file: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def publish_folder(temporary: Path, final: Path, manifest: dict[str, Any]) -> Bundle:
    """Give a finished folder its name.

    A bundle of that digest that is there already is kept and returned if every byte of it is right (the same content
    was there before us), and replaced if it is damaged.
    """
    try:
        temporary.rename(final)
    except OSError:
        if not any((final / name).exists() for name in (MANIFEST_FILE, WEIGHTS_FILE, CONFIG_FILE)):
            raise
        if whole := _whole_bundle(final):
            return whole
        aside = temporary.with_name(f"{_PREFIX}{os.urandom(8).hex()}")  # swept by the next run if this one dies
        final.rename(aside)
        try:
            temporary.rename(final)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    final.chmod(0o755)
    fsync_path(final.parent)
    return Bundle(final, manifest)


def set_signature(bundle: Bundle, signature: str) -> Bundle:
    """Write a signature into a bundle's manifest, in one step; nothing of its content changes (rule B9).

    Raises:
        BundleError: the manifest cannot be written.
    """
    manifest = {**bundle.manifest, "signature": signature}
    temporary = bundle.path / f".{MANIFEST_FILE}-{os.urandom(8).hex()}"
    try:
        try:
            write_bytes(temporary, canonical_json(manifest, indent=1))
            temporary.replace(bundle.path / MANIFEST_FILE)
            fsync_path(bundle.path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BundleError(f"{bundle.path}: cannot be written: {error.strerror}") from None
    return Bundle(bundle.path, manifest)


def _whole_bundle(path: Path) -> Bundle | None:
    try:
        bundle = open_bundle(path)
        bundle.verify()
    except BundleError:
        return None
    return bundle


_PREFIX = ".writing-"


class WritingFolder:
    """A folder of a bundle under way, beside its final place, locked as long as its writer lives.

    The lock is how a later run tells what a killed one left behind from what another is writing: the system gives it
    back when a process ends, however it ends.
    """

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{_PREFIX}{os.urandom(8).hex()}"
        self._lock: int | None = None

    def make(self) -> None:
        """Make the folder, and remove what runs that died left beside it.

        Raises:
            OSError: the parent is not there, or cannot be written.
        """
        _sweep(self.path.parent)
        while self._lock is None:
            self.path.mkdir()
            self._lock = _locked(self.path)
            if self._lock is None:  # another run took it for a dead one's in the moment before it was locked
                self.path = self.path.with_name(f"{_PREFIX}{os.urandom(8).hex()}")

    def remove(self) -> None:
        """Remove the folder, if it is still there, and give the lock back."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int | None:
    """Descriptor that holds the folder's lock; None if another process holds it, or took the folder away."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS) and folder.is_dir():
            return descriptor  # a file system without locks: nobody can take this folder for a dead one's either
    os.close(descriptor)
    return None


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # being written, or nobody can tell
        finally:
            os.close(descriptor)


def _check_arrays(weights: Array, config: IntArray, dtype: str) -> None:
    problems = []
    if weights.ndim != 3 or weights.shape[0] != 1 or weights.dtype != STORAGE[dtype]:
        problems.append(f"lora_weights must be [1, rows, width] {dtype}, found {weights.shape} {weights.dtype}")
    if config.ndim != 3 or config.shape[0] != 1 or config.shape[2] not in (3, 4) or config.dtype != np.int32:
        problems.append(f"lora_config must be [1, rows, 3 or 4] int32, found {config.shape} {config.dtype}")
    if not problems and weights.shape[1] != config.shape[1]:
        problems.append(f"lora_weights has {weights.shape[1]} rows, lora_config {config.shape[1]}")
    if problems:
        raise BundleError("; ".join(problems) + " (rule B4)")
