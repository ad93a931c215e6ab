"""Sizes of the engine's LoRA caches: page width, slots per page, pages in all, pages of one adapter.

Source: `peftCacheManager.cpp` (`getPageManagerConfig`, `getMaxNumSlots`) and `loraCache.cpp` (`determineNumPages`).
All arithmetic is integer; numbers are per tensor- and pipeline-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_lora.errors import GeometryError
from trtllm_lora.modules import MODULE_BY_ID, local_dims
from trtllm_lora.shape import ITEM_BYTES, EngineShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DEFAULT_OPTIMAL_RANK = 8
DEFAULT_MAX_RANK = 64
DEFAULT_HOST_BYTES = 2**30


def ceil_div(a: int, b: int) -> int:
    """Integer division, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Page layout of the LoRA caches of one rank of an engine."""

    shape: EngineShape
    page_width: int
    """Elements of one cache slot (the runtime's `pageWidth`)."""
    slots_per_page: int
    max_lora_elements: int
    """Elements of the "max sized LoRA" of the runtime's log."""

    @classmethod
    def of(
        cls, shape: EngineShape, *, optimal_rank: int = DEFAULT_OPTIMAL_RANK, max_rank: int = DEFAULT_MAX_RANK
    ) -> CacheGeometry:
        """Geometry for `lora_cache_optimal_adapter_size` and `lora_cache_max_adapter_size`.

        Raises:
            GeometryError: the engine has no LoRA modules.
        """
        if not shape.lora_enabled:
            raise GeometryError("this engine was built without LoRA: it has no LoRA cache")
        optimal, largest = min(optimal_rank, shape.max_lora_rank), min(max_rank, shape.max_lora_rank)
        sizes = [sum(local_dims(name, shape)) for name in shape.lora_modules]
        width, layers = min(sizes), shape.num_layers // shape.pp_size
        per_page = max(
            layers * sum(optimal * ceil_div(size, width) for size in sizes),
            ceil_div(largest * max(sizes), width),
        )
        return cls(shape, width, per_page, largest * sum(sizes) * layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one cache slot."""
        return self.page_width * ITEM_BYTES[self.shape.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.slots_per_page * self.slot_bytes

    @property
    def min_slots(self) -> int:
        """Slots without which the engine refuses to start (`minTotal`)."""
        return ceil_div(self.max_lora_elements, self.page_width)

    def num_pages(self, cache_bytes: int, cache: str = "host") -> int:
        """Pages a cache of this many bytes gets; rounds up, so it may use more memory than configured.

        Raises:
            GeometryError: with the runtime's own start-up text.
        """
        slots = cache_bytes // self.slot_bytes
        if slots < self.min_slots:
            raise GeometryError(
                f"Not enough space allocated to {cache} LoRA cache to hold 1 max sized LoRA {slots} < {self.min_slots}"
            )
        return ceil_div(slots, self.slots_per_page)

    def pages_for(self, config_rows: Iterable[Sequence[int]], pp_rank: int = 0) -> int:
        """Pages one adapter takes, by the runtime's walk over its `lora_config` rows (order matters).

        `config_rows` are rows of `[module id, layer, rank]` or `[module id, layer, rank, is_dora]`.
        A row never straddles two pages and a page is never shared by two adapters; the result is at least 1.

        Raises:
            GeometryError: a module the engine does not have, or a row larger than a page.
        """
        layers = self.shape.num_layers // self.shape.pp_size
        pages, used = 1, 0
        for entry in config_rows:
            module_id, layer, rank = int(entry[0]), int(entry[1]), int(entry[2])
            if layer // layers != pp_rank:
                continue
            module = MODULE_BY_ID.get(module_id)
            if module is None or module.name not in self.shape.lora_modules:
                raise GeometryError(f"module id {module_id} is not enabled in this engine")
            d_in, d_out = local_dims(module.name, self.shape)
            dora = len(entry) > 3 and bool(entry[3])
            slots = ceil_div(rank * (d_in + d_out) + (d_out if dora else 0), self.page_width)
            if slots > self.slots_per_page:
                raise GeometryError(
                    f"{module.name} of rank {rank} needs {slots} slots, a page has {self.slots_per_page}: "
                    f"raise lora_cache_max_adapter_size to the rank"
                )
            if used + slots > self.slots_per_page:
                pages, used = pages + 1, 0
            used += slots
        return pages

    def max_pages_for(self, config_rows: Sequence[Sequence[int]]) -> int:
        """Pages on the pipeline rank where this adapter takes most."""
        return max(self.pages_for(config_rows, pp_rank) for pp_rank in range(self.shape.pp_size))
