"""Rules of a profile about serving: the LoRA caches, shares of the memory, the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtllm_lora.errors import ContractError
from trtllm_lora.geometry import CacheGeometry, ceil_div
from trtllm_lora.modules import local_dims
from trtllm_lora.profile import Engine, Lora, Model, shape_of
from trtllm_lora.profile_rule import Found, RuleTable, Values
from trtllm_lora.shape import EngineShape

LEAST_LEFT = 0.02
"""Share of the free memory that should be left beside both caches, for fragmentation and what was assumed."""
TABLE = RuleTable()

_CACHE = ("lora.max_rank", "serving.lora_max_rank", "serving.lora_optimal_rank", "serving.lora_host_memory")


@TABLE.rule(
    "cache-rank",
    *_CACHE,
    says="`serving.lora_max_rank` ≥ `lora.max_rank`",
    why="requests are checked by the one, pages are sized by the other: a larger row is written past its page "
    "(`peftCacheManager.cpp`)",
)
def _cache_rank(v: Values) -> Iterator[Found]:
    rank, largest, shape = v["lora.max_rank"], v["serving.lora_max_rank"], _shape(v)
    if shape is None or largest is None or largest >= rank:
        return
    geometry = CacheGeometry.of(shape, optimal_rank=v["serving.lora_optimal_rank"], max_rank=largest)
    widest = max(shape.lora_modules, key=lambda name: sum(local_dims(name, shape)))
    slots = ceil_div(rank * sum(local_dims(widest, shape)), geometry.page_width)
    over = ", and is written past its page" if slots > geometry.slots_per_page else ""
    yield (
        "serving.lora_max_rank",
        f"{largest} is below lora.max_rank {rank}: the engine accepts rank {rank}, whose row of {widest} takes "
        f"{slots} slots of {geometry.page_width} values while a page has {geometry.slots_per_page}{over}",
        f"write {rank}",
    )


@TABLE.rule(
    "cache-memory",
    *_CACHE,
    says="`lora_host_memory` holds one adapter of the largest size",
    why="with less the engine does not start",
)
def _cache_memory(v: Values) -> Iterator[Found]:
    shape = _shape(v)
    if shape is None:
        return
    largest = v["lora.max_rank"] if v["serving.lora_max_rank"] is None else v["serving.lora_max_rank"]
    geometry = CacheGeometry.of(shape, optimal_rank=v["serving.lora_optimal_rank"], max_rank=largest)
    try:
        geometry.num_pages(v["serving.lora_host_memory"])
    except ContractError as error:
        need = ceil_div(geometry.min_slots * geometry.slot_bytes, 2**20)
        yield "serving.lora_host_memory", f"the engine would not start: {error}", f"write at least {need}MiB"


@TABLE.rule(
    "cache-shares",
    "serving.kv_cache_fraction",
    "serving.lora_gpu_fraction",
    says="shares of the two caches that leave at least 2 % of the free memory",
    why="the LoRA cache takes its share of what the KV cache leaves, and fragments need room",
    warning=True,
)
def _cache_shares(v: Values) -> Iterator[Found]:
    kv, lora = v["serving.kv_cache_fraction"], v["serving.lora_gpu_fraction"]
    if kv is None or lora is None:
        return
    left = (1 - kv) * (1 - lora)
    if left < LEAST_LEFT:
        what = (
            f"{lora} of what kv_cache_fraction {kv} leaves: {left:.1%} of the free memory are left for everything else"
        )
        most = int((1 - LEAST_LEFT / (1 - kv)) * 100) / 100
        instead = (
            f"write at most {most}" if most > 0 else f"write a kv_cache_fraction of at most {1 - 2 * LEAST_LEFT:g}"
        )
        yield "serving.lora_gpu_fraction", what, f"{instead}, or leave both out (`lora-slots plan` sizes them)"


@TABLE.rule(
    "tokenizer",
    "folder",
    "model.tokenizer",
    says="a `tokenizer` that is a directory here, with a tokenizer.json",
    why="the text steps read it where they run; relative to the profile",
    warning=True,
)
def _tokenizer(v: Values) -> Iterator[Found]:
    name = v["model.tokenizer"]
    if name is None:
        return
    folder = Path(v["folder"]) / name
    if not (folder / "tokenizer.json").is_file():
        why = "has no tokenizer.json" if folder.is_dir() else "is no directory on this machine"
        yield (
            "model.tokenizer",
            f"{name[:200]} {why}",
            "write one that has it, or leave it out: the model's own is used",
        )


def _shape(v: Values) -> EngineShape | None:
    """The engine shape, if everything it needs is right."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "engine": {}, "lora": {}}
    for place, value in v.items():
        section, _, name = place.partition(".")
        if section in sections:
            sections[section][name] = value
    try:
        shape = shape_of(Model(**sections["model"]), Engine(**sections["engine"]), Lora(**sections["lora"]))
    except ValueError:  # pydantic's: something is missing
        return None
    except ContractError:  # unknown modules: told by their own rule
        return None
    return shape if shape.lora_enabled else None
