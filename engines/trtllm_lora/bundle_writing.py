"""Writing a bundle: nothing is visible under its name until it is whole and on disk (rule B8).

`write_bundle` takes whole arrays. A converter that writes rows as they come uses the parts: `write_array`,
`manifest_of`, `publish_folder`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=parent))
    except OSError as error:
        raise BundleError(f"{parent}: cannot be written: {error.strerror}") from None
    try:
        void = np.dtype("V2") if facts.dtype == "bfloat16" else weights.dtype
        files = {
            WEIGHTS_FILE: write_array(temporary / WEIGHTS_FILE, weights.view(void)),
            CONFIG_FILE: write_array(temporary / CONFIG_FILE, config.astype("<i4", copy=False)),
        }
        manifest = manifest_of(facts, weights, config, files)
        write_bytes(temporary / MANIFEST_FILE, canonical_json(manifest, indent=1))
        fsync_folder(temporary)
        return publish_folder(temporary, parent / manifest["digest"], manifest)
    except OSError as error:
        raise BundleError(f"{parent}: writing the bundle failed: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
    """Give a finished folder its name; a bundle of that digest that is there already is kept and returned."""
    try:
        temporary.rename(final)
    except OSError:
        if not (final / MANIFEST_FILE).is_file():
            raise
        return open_bundle(final)  # the same content was there before us
    final.chmod(0o755)
    fsync_folder(final.parent)
    return Bundle(final, manifest)


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


def fsync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
