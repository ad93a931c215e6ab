"""The capacity plan: what one GPU's memory holds, and which `lora_cache_*` and KV parameters to write down.

Order of things on a GPU, from `peftCacheManager.cpp` and the executor: the engine is loaded; the KV cache takes
`kv_cache_free_gpu_mem_fraction` of what is free then; the LoRA device cache takes `lora_cache_gpu_memory_fraction` of
what is free after that. Pages are the engine's own (geometry.py); a page is never shared by two adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trtllm_lora.errors import ContractError, GeometryError
from trtllm_lora.fleet import Fleet, cached_bytes, group_of_rank
from trtllm_lora.geometry import CacheGeometry, ceil_div
from trtllm_lora.memory import RUNTIME_BYTES, TOKENS_PER_BLOCK, EngineMemory, engine_memory
from trtllm_lora.profile import EngineProfile
from trtllm_lora.serving_rules import LEAST_LEFT

HEADROOM = 0.05
"""Share of the free memory left alone: fragmentation and what the assumptions missed."""
STARVING = 0.25
"""A LoRA device cache above this share of the free memory is told to starve the KV cache."""
USUAL_RANKS = (4, 8, 16, 32, 64, 128, 256)


class PlanError(ContractError):
    """There is no plan: the message says what does not fit, and what would."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a plan is asked for."""

    profile: EngineProfile
    fleet: Fleet
    gpu_bytes: int
    slots: int
    """Adapters in the engine's working set."""
    pinned: int = 0
    """Of them, adapters that never leave: those of `pins`, then the most asked for."""
    context: int = 2048
    """Tokens (prompt and answer) a stream usually holds."""
    runtime_bytes: int = RUNTIME_BYTES
    pins: tuple[str, ...] = ()
    """The pinned adapters that were named."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """How many adapters of one rank, alone, the planned caches hold."""

    rank: int
    pages: int
    num_bytes: int
    """Bytes of one adapter's weights."""
    fill: float
    """Share of its pages' bytes that it uses."""
    host_fit: int
    device_fit: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Recommended parameters and what they give. Bytes per GPU; tokens over the whole engine."""

    gpu_bytes: int
    memory: EngineMemory
    geometry: CacheGeometry
    optimal_rank: int
    max_rank: int
    slots: int
    pages_needed: int
    """Pages of the `slots` largest adapters: what the working set takes at worst."""
    host_bytes: int
    host_pages: int
    device_bytes: int
    device_pages: int
    kv_fraction: float
    lora_fraction: float
    kv_bytes: int
    headroom_bytes: int
    kv_tokens: int
    streams: int
    """Streams of the usual context that the KV cache holds, max_batch_size at most."""
    full_streams: int
    """Streams of max_seq_len tokens."""
    configured_pages: int
    """Pages that the profile's own `lora_host_memory` and ranks would give; 0 if the engine would not start."""
    ranks: tuple[RankRow, ...]
    warnings: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, str]:
        """Parameters of `tensorrt_llm` to set."""
        return {
            "kv_cache_free_gpu_mem_fraction": f"{self.kv_fraction:.3f}",
            "lora_cache_gpu_memory_fraction": f"{self.lora_fraction:.4f}",
            "lora_cache_host_memory_bytes": str(self.host_bytes),
            "lora_cache_optimal_adapter_size": str(self.optimal_rank),
            "lora_cache_max_adapter_size": str(self.max_rank),
        }


def make_plan(wish: Wish) -> Plan:
    """The plan for a wish.

    Raises:
        PlanError: the weights, or one adapter, do not fit the GPU; or more are pinned than there can be.
    """
    profile, memory = wish.profile, engine_memory(wish.profile, runtime_bytes=wish.runtime_bytes)
    free = wish.gpu_bytes - memory.fixed
    if free <= 0:
        raise PlanError(
            f"{profile.name} takes {_gib(memory.fixed)} before its caches, the GPU has {_gib(wish.gpu_bytes)}: "
            "raise tensor_parallel, quantise, or take a larger GPU"
        )
    slots = _slots(wish)
    max_rank = profile.serving.lora_max_rank or profile.lora.max_rank
    geometry, optimal, needed = _best_geometry(wish, slots, max_rank)
    pages = max(needed, ceil_div(geometry.min_slots, geometry.slots_per_page))
    cache_bytes = pages * geometry.page_bytes
    kv_fraction, lora_fraction = _fractions(profile, free, cache_bytes)
    kv_bytes = int(free * kv_fraction)
    device_bytes = int((free - kv_bytes) * lora_fraction)
    try:
        device_pages = geometry.num_pages(device_bytes, "device")
    except GeometryError as error:
        raise PlanError(
            f"{error}: {_gib(free)} are free beside the engine, the cache needs {_gib(cache_bytes)}"
        ) from None
    kv_tokens = kv_bytes // memory.kv_bytes_per_token // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    batch = profile.engine.max_batch_size
    plan = Plan(
        gpu_bytes=wish.gpu_bytes,
        memory=memory,
        geometry=geometry,
        optimal_rank=optimal,
        max_rank=max_rank,
        slots=slots,
        pages_needed=needed,
        host_bytes=cache_bytes,
        host_pages=geometry.num_pages(cache_bytes),
        device_bytes=device_pages * geometry.page_bytes,
        device_pages=device_pages,
        kv_fraction=kv_fraction,
        lora_fraction=lora_fraction,
        kv_bytes=kv_bytes,
        headroom_bytes=free - kv_bytes - device_pages * geometry.page_bytes,
        kv_tokens=kv_tokens,
        streams=min(batch, kv_tokens // _blocks(wish.context)),
        full_streams=min(batch, kv_tokens // _blocks(profile.engine.max_seq_len)),
        configured_pages=_configured_pages(profile),
        ranks=(),
        warnings=(),
    )
    return _finish(plan, wish, free)


def _slots(wish: Wish) -> int:
    """Slots that are used at all; pins as the slot manager takes them, up to all slots and no further."""
    if wish.pinned > wish.fleet.count:
        raise PlanError(f"{wish.pinned} adapters cannot be pinned: there are {wish.fleet.count}")
    if wish.pinned > wish.slots:
        raise PlanError(f"{wish.pinned} adapters cannot be pinned in {wish.slots} slots: the slot manager refuses it")
    return min(wish.slots, wish.fleet.count)


def worst_pages(fleet: Fleet, geometry: CacheGeometry, slots: int) -> int:
    """Pages of the `slots` largest adapters. Raises GeometryError if one cannot be put at all."""
    total, left = 0, slots
    for pages, count in sorted(fleet.pages(geometry), reverse=True):
        total, left = total + pages * min(count, left), left - min(count, left)
    return total


def _best_geometry(wish: Wish, slots: int, max_rank: int) -> tuple[CacheGeometry, int, int]:
    """Geometry, optimal rank and pages with the fewest bytes; pages sized for a rank waste nothing on that rank."""
    shape = wish.profile.shape()
    candidates = sorted({min(rank, max_rank) for rank in (*wish.fleet.ranks, wish.profile.serving.lora_optimal_rank)})
    best: tuple[int, CacheGeometry, int, int] | None = None
    for optimal in candidates:
        geometry = CacheGeometry.of(shape, optimal_rank=optimal, max_rank=max_rank)
        try:
            needed = worst_pages(wish.fleet, geometry, slots)
        except GeometryError as error:
            raise PlanError(str(error)) from None
        size = needed * geometry.page_bytes
        if best is None or size < best[0]:
            best = (size, geometry, optimal, needed)
    assert best is not None  # noqa: S101 - the profile's own rank is always a candidate
    return best[1:]


def _fractions(profile: EngineProfile, free: int, cache_bytes: int) -> tuple[float, float]:
    """KV and LoRA fractions: the profile's where it says them, else such that cache and headroom are left."""
    kv = profile.serving.kv_cache_fraction
    if kv is None:
        kv = math.floor((1 - HEADROOM - cache_bytes / free) * 1000) / 1000
        if kv <= 0:
            raise PlanError(
                f"the LoRA cache of {_gib(cache_bytes)} leaves nothing of {_gib(free)} for the KV cache: "
                "fewer slots, lower ranks, or a larger GPU"
            )
    lora = profile.serving.lora_gpu_fraction
    if lora is None:
        left = free - int(free * kv)
        lora = min(math.ceil(cache_bytes / left * 10000 + 1) / 10000, 0.9999)
    return kv, lora


def _configured_pages(profile: EngineProfile) -> int:
    try:
        return profile.geometry().num_pages(profile.serving.lora_host_memory)
    except GeometryError:
        return 0


def _finish(plan: Plan, wish: Wish, free: int) -> Plan:
    rows = tuple(_rank_rows(plan, wish))
    return replace(plan, ranks=rows, warnings=tuple(_warnings(plan, wish, free)))


def _rank_rows(plan: Plan, wish: Wish) -> Iterator[RankRow]:
    shape = wish.profile.shape()
    ranks = {rank for rank in (*USUAL_RANKS, *wish.fleet.ranks) if rank <= shape.max_lora_rank}
    for rank in sorted(ranks):
        group = group_of_rank(1, rank, shape)
        ((pages, _),) = Fleet((group,)).pages(plan.geometry)
        fill = cached_bytes(group, shape) / (pages * plan.geometry.page_bytes * shape.pp_size)
        yield RankRow(rank, pages, group.num_bytes, fill, plan.host_pages // pages, plan.device_pages // pages)


def _warnings(plan: Plan, wish: Wish, free: int) -> Iterator[str]:
    profile, geometry = wish.profile, plan.geometry
    if plan.device_bytes > STARVING * free:
        yield (
            f"adapters starve the KV cache: the LoRA device cache takes {plan.device_bytes / free:.0%} of what is free "
            "beside the engine; fewer slots or lower ranks give it back"
        )
    if plan.streams < profile.engine.max_batch_size:
        yield (
            f"the KV cache holds {plan.streams} streams of {wish.context} tokens, fewer than max_batch_size "
            f"{profile.engine.max_batch_size}"
        )
    if plan.device_pages < plan.pages_needed:
        yield (
            f"the device cache has {plan.device_pages} pages, {plan.slots} adapters need {plan.pages_needed}: requests "
            "wait, although their adapter is in a slot; raise lora_gpu_fraction"
        )
    if plan.headroom_bytes < LEAST_LEFT * free:
        yield f"only {_gib(max(0, plan.headroom_bytes))} are left for fragmentation; lower kv_cache_fraction"
    if wish.pinned >= plan.slots and wish.fleet.count > plan.slots:
        yield f"{wish.pinned} pinned adapters fill all {plan.slots} slots: the others can never be served"
    yield from _configured_warnings(plan, wish)
    ranks = wish.fleet.ranks
    waste = 1 - _fill(wish.fleet, geometry)
    if len(ranks) > 1 and waste > 0.4:
        yield f"mixed ranks {', '.join(map(str, ranks))}: {waste:.0%} of the pages' bytes stay empty"


def _configured_warnings(plan: Plan, wish: Wish) -> Iterator[str]:
    profile, pages = wish.profile, plan.configured_pages
    size = profile.serving.lora_host_memory
    if not pages:
        yield f"the engine would not start with the profile's lora_host_memory of {size} bytes"
        return
    own = profile.geometry()
    needed = worst_pages(wish.fleet, own, plan.slots)
    if needed > pages:
        room = pages // max(count for count, _ in wish.fleet.pages(own))
        what = "holds no adapter of the largest kind" if not room else f"holds {room} of the largest adapters"
        yield (
            f"the profile's lora_host_memory of {size} bytes is {pages} pages and {what}, the {plan.slots} slots need "
            f"{needed}: while they are busy, one more gets `Cache is full. There are no done tasks to evict` "
            f"(tensorrtllm_backend#559); write {plan.host_bytes}"
        )


def _fill(fleet: Fleet, geometry: CacheGeometry) -> float:
    """Share of the bytes of all the adapters' pages that they use."""
    shape = geometry.shape
    used = sum(group.count * cached_bytes(group, shape) for group in fleet.groups)
    pages = sum(pages * count for pages, count in fleet.pages(geometry))
    return used / (pages * geometry.page_bytes * shape.pp_size)


def _blocks(tokens: int) -> int:
    return ceil_div(tokens, TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
