"""The bundle: one adapter converted for one engine, as a directory named by its digest.

    <digest>/
      model.lora_weights.npy   [1, rows, width]  <f4, <f2 or |V2 (bfloat16), C order
      model.lora_config.npy    [1, rows, 3 or 4] <i4
      bundle.json              the manifest

The two arrays are byte for byte what TensorRT-LLM's own tools write, so a float16 bundle can be a
`lora_prefetch_dir/<task id>` as it is. The format is specified in docs/bundle-format.md; errors quote its rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_lora.errors import BundleError
from trtllm_lora.task_id import task_id_for
from trtllm_lora.tensors import STORAGE, Array, IntArray

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
MANIFEST_FILE = "bundle.json"


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """What a converter knows of an adapter beside its tensors. Everything here is part of the digest."""

    adapter: str
    """Name of the adapter."""
    dtype: str
    """Engine dtype of the weights: float32, float16 or bfloat16."""
    base_model: str | None = None
    base_revision: str | None = None
    modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Module name -> (in, out), full dimensions: the engine shape the bundle fits."""
    num_layers: int | None = None
    """Layers of the base, where known."""
    tp_size: int = 1
    """Tensor-parallel size the fused ids (0, 18) are interleaved for; 1 fits every size without fused ids."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Module path -> scale that was multiplied into B."""
    source_sha256: Mapping[str, str] = field(default_factory=dict)
    """File name -> sha256 of the adapter's files."""
    tool: str = "lora-slots"
    """Name and version of the converter."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An open bundle. The arrays stay on disk until they are asked for, and are mapped, not read."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Hex sha256 over the manifest's content, never over time or path; also the directory's name."""
        return str(self.manifest["digest"])

    @property
    def task_id(self) -> int:
        """`lora_task_id` of this content."""
        return int(self.manifest["task_id"])

    @property
    def adapter(self) -> str:
        """Name the adapter was converted under."""
        return str(self.manifest["adapter"])

    @property
    def dtype(self) -> str:
        """Engine dtype of the weights."""
        return str(self.manifest["dtype"])

    @property
    def num_bytes(self) -> int:
        """Bytes of the two arrays on disk."""
        return sum(int(entry["bytes"]) for entry in self.manifest["files"].values())

    def weights(self) -> Array:
        """`lora_weights` [1, rows, width], mapped read-only; bfloat16 as `uint16` bit patterns."""
        return self._map(WEIGHTS_FILE).view(STORAGE[self.dtype])

    def config(self) -> IntArray:
        """`lora_config` [1, rows, 3 or 4] int32."""
        return np.asarray(self._map(CONFIG_FILE), dtype=np.int32)

    def verify(self) -> None:
        """Check every byte against the manifest's sha256.

        Raises:
            BundleError: names every file that differs.
        """
        wrong = [name for name, entry in self.manifest["files"].items() if _sha256(self.path / name) != entry["sha256"]]
        if wrong:
            raise BundleError(f"{self.path}: {', '.join(sorted(wrong))} differ from the manifest's sha256 (rule B7)")

    def _map(self, name: str) -> Array:
        try:
            array: Array = np.load(self.path / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise BundleError(f"{self.path / name}: not a readable array: {error}") from None
        return array


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
            WEIGHTS_FILE: _write_array(temporary / WEIGHTS_FILE, weights.view(void)),
            CONFIG_FILE: _write_array(temporary / CONFIG_FILE, config.astype("<i4", copy=False)),
        }
        manifest = _manifest(facts, weights, config, files)
        _write_bytes(temporary / MANIFEST_FILE, _canonical(manifest, indent=1))
        _fsync_directory(temporary)
        return _publish(temporary, parent / manifest["digest"], manifest)
    except OSError as error:
        raise BundleError(f"{parent}: writing the bundle failed: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_bundle(path: Path) -> Bundle:
    """Open a bundle directory and check its manifest and file sizes (not every byte: `Bundle.verify`).

    Raises:
        BundleError: not a bundle, another format version, a file missing or of another size, a digest that is
            not the manifest's own.
    """
    file = path / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{path}: no bundle here ({MANIFEST_FILE}: {error.strerror})") from None
    except ValueError as error:
        raise BundleError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version") if isinstance(manifest, dict) else type(manifest).__name__
        raise BundleError(f"{file}: bundle format {found!r}, this program reads {FORMAT_VERSION} (rule B2)")
    problems = _manifest_problems(path, manifest)
    if problems:
        raise BundleError(f"{path}: " + "; ".join(problems))
    return Bundle(path, manifest)


def find_bundle(parent: Path) -> Bundle:
    """The one bundle below `parent`, or `parent` itself if it is a bundle.

    Raises:
        BundleError: none, or more than one.
    """
    if (parent / MANIFEST_FILE).is_file():
        return open_bundle(parent)
    found = sorted(file.parent for file in parent.glob(f"*/{MANIFEST_FILE}"))
    if len(found) != 1:
        raise BundleError(f"{parent}: one bundle expected, {len(found)} found")
    return open_bundle(found[0])


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Digest of a manifest: sha256 of its canonical JSON without `digest`, `task_id` and `signature`."""
    content = {key: value for key, value in manifest.items() if key not in ("digest", "task_id", "signature")}
    return hashlib.sha256(_canonical(content)).hexdigest()


def _manifest(facts: BundleFacts, weights: Array, config: IntArray, files: dict[str, Any]) -> dict[str, Any]:
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
    content = json.loads(_canonical(content))  # tuples become lists: what is hashed is what is read back
    digest = digest_of(content)
    return {**content, "digest": digest, "task_id": task_id_for(digest)}


def _manifest_problems(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    missing = [key for key in ("digest", "task_id", "adapter", "dtype", "files") if key not in manifest]
    if missing:
        return [f"{MANIFEST_FILE} lacks {', '.join(missing)} (rule B3)"]
    problems = []
    if digest_of(manifest) != manifest["digest"]:
        problems.append("the manifest was changed after it was written: its digest is another (rule B5)")
    if manifest["dtype"] not in STORAGE:
        problems.append(f"dtype {manifest['dtype']!r} is none of {', '.join(STORAGE)} (rule B4)")
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        entry = manifest["files"].get(name)
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if entry is None or size is None:
            problems.append(f"{name} is missing (rule B1)")
        elif size != entry["bytes"]:
            problems.append(f"{name} has {size} bytes, the manifest says {entry['bytes']} (rule B7)")
    return problems


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


def _write_array(file: Path, array: Array) -> dict[str, Any]:
    # numpy spells a void type as '|V2' and a little-endian one as '<f2': the headers TensorRT-LLM's tools write
    with file.open("wb") as out:
        np.save(out, np.ascontiguousarray(array), allow_pickle=False)
        out.flush()
        os.fsync(out.fileno())
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _write_bytes(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _publish(temporary: Path, final: Path, manifest: dict[str, Any]) -> Bundle:
    try:
        temporary.rename(final)
    except OSError:
        if not (final / MANIFEST_FILE).is_file():
            raise
        return open_bundle(final)  # the same content was there before us
    final.chmod(0o755)
    _fsync_directory(final.parent)
    return Bundle(final, manifest)


def _canonical(value: Any, indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else (",", ": ")
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=separators, indent=indent)
    return text.encode()


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}") from None


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
