"""Everything the embedded stack needs before Triton starts: base model, engine, bundles, registry, model repository.

All of it lives in the cache (`base/`, `engines/`, `adapters/`); each step is skipped if its result stands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.registry import FILE_NAME, Entry, publish
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.store import cache_folder
from lora_slots.errors import UsageError
from trtllm_lora import Bundle

Progress = Callable[[str, int, int], object]
ENGINE_DTYPE = "float32"
"""The reference engine computes in float32, so that its answers are those of transformers and PEFT."""
MAX_LORA_RANK = 64


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where the parts of the embedded stack are."""

    base: Path
    engine: Path
    registry: Path
    entries: tuple[Entry, ...]


def prepare(adapters: Mapping[str, Path], *, cache: Path | None = None, progress: Progress) -> Prepared:
    """Bring the base model, build the reference engine, convert `adapters` (name -> PEFT directory) and publish them.

    Raises the typed errors of the parts; what was finished before stays usable.
    """
    missing = [f"{name}: {path}" for name, path in adapters.items() if not path.is_dir()]
    if missing:
        raise UsageError(f"no such adapter folder: {', '.join(missing)}")
    base = ensure_base_model(cache, progress)
    engine = ensure_engine(base, cache_folder(cache) / "engines", progress)
    home = cache_folder(cache) / "adapters"
    entries = []
    for done, (name, path) in enumerate(adapters.items()):
        progress("convert", done, len(adapters))
        entries.append(publish(home / FILE_NAME, _convert(path, base, home / "bundles"), name))
    progress("convert", len(adapters), len(adapters))
    return Prepared(base, engine, home / FILE_NAME, tuple(entries))


def ensure_engine(base: Path, engines: Path, progress: Progress) -> Path:
    """The reference engine of a base model, built if it is missing or broken."""
    from reference_engine import EngineDirectoryError, build_engine, open_engine

    facts = {"dtype": ENGINE_DTYPE, "max_lora_rank": MAX_LORA_RANK, "base": _stamp(base)}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    engine = engines / f"{base.name}-{ENGINE_DTYPE}-{key}"
    try:
        open_engine(engine)
    except EngineDirectoryError:
        build_engine(
            base,
            engine,
            dtype=ENGINE_DTYPE,
            max_lora_rank=MAX_LORA_RANK,
            wrote=lambda done, total: progress("engine", done, total),
        )
    return engine


def _convert(adapter: Path, base: Path, bundles: Path) -> Bundle:
    from peft_to_trtllm import convert

    return convert(adapter, base=base, out=bundles, dtype=ENGINE_DTYPE)


def _stamp(base: Path) -> list[object]:
    file = base / "model.safetensors"
    stat = file.stat()
    return [str(base.resolve()), stat.st_size, stat.st_mtime_ns]
