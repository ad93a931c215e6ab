"""Starting the LoRA caches: sizes, the runtime's log lines and refusals, and the prefetch directory.

Source: `peftCacheManager.cpp` (constructor, `prefetchLoraWeights`). On a CPU the "device" is the memory that is left
after weights and KV cache.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from reference_engine.errors import StartupRefused
from reference_engine.lora_store import LoraStore
from reference_engine.settings import Settings
from trtllm_lora import MAX_TASK_ID, CacheError, CacheGeometry, EngineShape, GeometryError
from trtllm_lora.tensors import STORAGE

log = logging.getLogger(__name__)

WEIGHTS_FILES = ("model.lora_weights.npy",)
CONFIG_FILES = ("model.lora_config.npy", "model.lora_keys.npy")
READABLE = ("?", "u1", "i1", "i4", "i8", "f2", "f4")
"""numpy types the runtime's `loadNpy` knows; bfloat16 (`|V2`) is not among them."""


def start_lora(shape: EngineShape, settings: Settings) -> LoraStore | None:
    """The LoRA caches of an engine; None if it was built without LoRA.

    Raises:
        StartupRefused: the caches cannot hold one adapter of the largest size, or the prefetch directory does not fit.
    """
    if not shape.lora_enabled:
        if shape.lora_plugin is not None:
            log.warning("lora_plugin enabled, but no lora module enabled: setting useLoraPlugin to false")
        return None
    geometry = CacheGeometry.of(shape, optimal_rank=settings.optimal_rank, max_rank=settings.max_rank)
    device_bytes = int(settings.device_fraction * available_bytes())
    try:
        pages = [_pages(geometry, settings.host_bytes, "host"), _pages(geometry, device_bytes, "device")]
    except GeometryError as error:
        raise StartupRefused(str(error)) from None
    log.info("Max LoRA size is %d", geometry.max_lora_elements)
    for name, count in zip(("host", "device"), pages, strict=True):
        held = count * geometry.slots_per_page * geometry.page_width // geometry.max_lora_elements
        log.info("LoRA %s Cache can hold %d max sized LoRAs", name, held)
    store = LoraStore(geometry, *pages)
    if settings.prefetch_dir is not None:
        _prefetch(store, settings.prefetch_dir, shape.dtype)
    return store


def available_bytes() -> int:
    """Memory that programs can still have, page cache included; what is free without it may be next to nothing."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _pages(geometry: CacheGeometry, size: int, name: str) -> int:
    count = geometry.num_pages(size, name)
    log.info("Using %d bytes for LoRA %s cache", size // geometry.slot_bytes * geometry.slot_bytes, name)
    return count


def _prefetch(store: LoraStore, directory: Path, dtype: str) -> None:
    """Load `<directory>/<task id>/`: pinned until each one's first request ends, as in the runtime."""
    if not directory.is_dir():
        log.warning("lora_prefetch_dir %s does not exist: nothing is prefetched", directory)
        return
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        if not (folder.name.isascii() and folder.name.isdigit()):
            log.warning("lora task name %s is invalid, skipping to load lora weight from this folder.", folder.name)
            continue
        if int(folder.name) > MAX_TASK_ID:
            raise StartupRefused(f"lora_prefetch_dir: {folder.name} is out of range of a 32-bit task id (stoi)")
        weights, config = (_load(folder, names) for names in (WEIGHTS_FILES, CONFIG_FILES))
        if weights.dtype != STORAGE[dtype]:
            # the runtime checks nothing here and then answers like the base model (tensorrtllm_backend#791)
            raise StartupRefused(f"{folder}: weights are {weights.dtype}, the engine is {dtype}")
        try:
            store.preload(
                int(folder.name),
                weights.reshape(weights.shape[-2:]),
                config.reshape(config.shape[-2:]).astype(np.int32),
            )
        except (CacheError, GeometryError) as error:
            raise StartupRefused(f"Error storing task={folder.name} in PEFT cache -- {error}") from None


def _load(folder: Path, names: tuple[str, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    file = next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
    try:
        array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise StartupRefused(f"{file}: {error}") from None
    kind = array.dtype.str[1:]
    if kind not in READABLE:
        raise StartupRefused(f"{file}: numpy data type '{kind}' not supported")
    return array
