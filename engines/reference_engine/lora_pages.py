"""The pages of the LoRA cache: an adapter's rows are copied into them once, and used from there.

Rules:
1. A row never straddles two pages, and two adapters never share one (the runtime's walk).
2. Pages of an adapter that left are used again: the first touch of fresh memory costs several times its copy.
3. What is kept is bounded: the pages of the cache, and those of one adapter of the largest size, which is copied
   before the cache makes room for it.

Any thread may copy: numpy lets go of Python's lock meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_lora import MODULE_BY_ID, CacheGeometry, Row
from trtllm_lora.geometry import ceil_div
from trtllm_lora.modules import local_dims
from trtllm_lora.tensors import STORAGE, Array, IntArray

Page = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Stored:
    """One adapter in pages of its own."""

    rows: tuple[Row, ...]
    """Views of the pages, in the order of `lora_config`."""
    pages: tuple[Page, ...]


class PageStore:
    """Makes pages, and takes them back. `spare` pages are kept beside those that the cache has free."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self._free: list[Page] = []
        self._spare = ceil_div(geometry.min_slots, geometry.slots_per_page)

    def store(self, weights: Array, config: IntArray) -> Stored:
        """Copy rows (`[rows, width]`, checked) into pages."""
        geometry, pages, rows = self._geometry, [self._take()], []
        used = 0
        for values, entry in zip(weights, config.tolist(), strict=True):
            module_id, layer, rank = entry[:3]
            d_in, d_out = local_dims(MODULE_BY_ID[module_id].name, geometry.shape)
            ends = rank * d_in, rank * (d_in + d_out)
            total = ends[1] + (d_out if len(entry) > 3 and entry[3] else 0)
            slots = ceil_div(total, geometry.page_width)
            if used + slots > geometry.slots_per_page:
                pages.append(self._take())
                used = 0
            begin = used * geometry.page_width
            view = pages[-1][begin : begin + total]
            view[:] = values[:total]
            used += slots
            rows.append(_row(module_id, layer, view, rank, ends))
        return Stored(tuple(rows), tuple(pages))

    def give_back(self, stored: Stored, free_pages: int) -> None:
        """Nobody uses an adapter's rows any more; the cache has so many pages free now."""
        keep = free_pages + self._spare - len(self._free)
        self._free.extend(stored.pages[: max(0, keep)])

    def _take(self) -> Page:
        try:
            return self._free.pop()
        except IndexError:
            size = self._geometry.slots_per_page * self._geometry.page_width
            return np.empty(size, STORAGE[self._geometry.shape.dtype])


def _row(module_id: int, layer: int, view: Page, rank: int, ends: tuple[int, int]) -> Row:
    a, b = view[: ends[0]].reshape(rank, -1), view[ends[0] : ends[1]].reshape(-1, rank)
    return Row(module_id, layer, a, b, view[ends[1] :] if view.size > ends[1] else None)
