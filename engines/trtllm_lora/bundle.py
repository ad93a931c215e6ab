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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_lora.arrays import load_array
from trtllm_lora.errors import BundleError
from trtllm_lora.files import sha256_of
from trtllm_lora.task_id import is_task_id_of
from trtllm_lora.tensors import STORAGE, Array, IntArray

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
MANIFEST_FILE = "bundle.json"


LABELS = ("adapter", "tool", "digest", "task_id", "signature")
"""Manifest keys that say nothing of the content, and are no part of the digest."""


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """What a converter knows of an adapter beside its tensors. All but the labels is part of the digest."""

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
    def signature(self) -> object:
        """The signature of its digest (`trtllm_lora.signing`), not verified; None if it has none (rule B9)."""
        return self.manifest.get("signature")

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
        wrong = [
            name for name, entry in self.manifest["files"].items() if file_sha256(self.path / name) != entry["sha256"]
        ]
        if wrong:
            raise BundleError(f"{self.path}: {', '.join(sorted(wrong))} differ from the manifest's sha256 (rule B7)")

    def _map(self, name: str) -> Array:
        array, why = load_array(self.path / name)
        if why:
            raise BundleError(f"{self.path / name}: not a readable array: {why}")
        return np.asarray(array)


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
    if not parent.is_dir():
        raise BundleError(f"{parent}: no such directory")
    if len(found) != 1:
        raise BundleError(f"{parent}: one bundle expected, {len(found)} found")
    return open_bundle(found[0])


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Digest of a manifest: sha256 of its canonical JSON without the keys of LABELS (rule B5)."""
    content = {key: value for key, value in manifest.items() if key not in LABELS}
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _manifest_problems(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    missing = [key for key in ("digest", "task_id", "adapter", "dtype", "files") if key not in manifest]
    if missing:
        return [f"{MANIFEST_FILE} lacks {', '.join(missing)} (rule B3)"]
    problems = []
    if digest_of(manifest) != manifest["digest"]:
        problems.append("the manifest was changed after it was written: its digest is another (rule B5)")
    elif not is_task_id_of(manifest["digest"], manifest["task_id"]):
        problems.append(f"task_id {manifest['task_id']!r} is not made from the digest (rule B6)")
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


def canonical_json(value: Any, indent: int | None = None) -> bytes:
    """JSON with sorted keys and characters as they are; without `indent` no blanks either (rule B5)."""
    separators = (",", ":") if indent is None else (",", ": ")
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=separators, indent=indent)
    return text.encode()


def file_sha256(file: Path) -> str:
    """Hex sha256 of a file. Raises BundleError."""
    try:
        return sha256_of(file)
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}") from None
