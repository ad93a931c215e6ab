"""The engine's LoRA cache with its weights: what was pushed is what is used.

Rules (the accounting is `trtllm_lora.EngineCache`, held to the runtime's recorded traces):
1. An adapter's rows are copied once into pages of its own, by the runtime's walk: a row never straddles two pages.
2. A request makes its task in progress when it is fetched; the last request of a task that ends marks it done.
3. An id that is resident keeps its weights, whatever comes with the request.
4. An evicted task's pages are given back at once; a miss is told with the runtime's text, unprefixed.
5. The device cache only counts: on a CPU its copy of an adapter is the place in the step's stack (lora_stack.py). It
   holds requests back as the runtime's capacity scheduler does: pages of the distinct tasks of running requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from reference_engine.errors import RequestRefused, fetching
from trtllm_lora import MODULE_BY_ID, CacheError, CacheGeometry, EngineCache, GeometryError, Row
from trtllm_lora.geometry import ceil_div
from trtllm_lora.modules import local_dims
from trtllm_lora.tensors import STORAGE, Array, IntArray

_CACHE_FILE = "cpp/tensorrt_llm/runtime/loraCache.cpp"


class LoraStore:
    """Host and device LoRA cache of one engine. Used by the engine's loop only; holds no lock."""

    def __init__(self, geometry: CacheGeometry, host_pages: int, device_pages: int) -> None:
        self._geometry = geometry
        self.host, self.device = EngineCache(host_pages), EngineCache(device_pages)
        self._rows: dict[int, tuple[Row, ...]] = {}
        self._active: Counter[int] = Counter()

    def admit(self, task: int, weights: Array | None, config: IntArray | None) -> None:
        """Make a fetched request's task in progress, storing the weights (`[rows, width]`) if it is not resident.

        Raises:
            RequestRefused: a miss, or no room; with the executor's text.
        """
        if task not in self.host and (weights is None or config is None):
            raise RequestRefused(f"LoRA task {task} not found in cache. Please send LoRA weights with request")
        if task in self.host:
            self.host.bump(task)
        else:
            assert weights is not None and config is not None  # noqa: S101 (told to the type checker)
            self._put(task, weights, config)
        self._active[task] += 1

    def preload(self, task: int, weights: Array, config: IntArray) -> None:
        """Put an adapter of the prefetch directory: in progress until its first request ends.

        Raises:
            CacheError, GeometryError: no room, or rows that do not fit a page.
        """
        pages = self._geometry.pages_for(config.tolist())
        self.host.put(task, pages)
        self._rows[task] = self._store(weights, config)

    def release(self, task: int) -> None:
        """A request of the task ended, however it ended."""
        self._active[task] -= 1
        if self._active[task] == 0:
            del self._active[task]
            self.host.mark_done(task)
            self.device.mark_done(task)

    def bring(self, task: int, running: Iterable[int]) -> bool:
        """Copy a task to the device cache, if its pages carry it beside the tasks of the running requests."""
        tasks = {task, *running}
        if sum(self.host.pages_of(held) for held in tasks) > self.device.num_pages:
            return False
        try:
            self.host.copy_to(self.device, task)
        except CacheError:  # the rest is held by tasks whose next request waits; that one will free them
            return False
        return True

    def rows(self, task: int) -> tuple[Row, ...]:
        """The rows of a resident task, as views of its pages."""
        return self._rows[task]

    def _put(self, task: int, weights: Array, config: IntArray) -> None:
        try:
            pages = self._geometry.pages_for(config.tolist())
            if pages > self.device.num_pages:
                # the runtime's capacity scheduler would let such a request wait for ever
                raise GeometryError(f"{pages} pages are needed, the device cache has {self.device.num_pages}")
            evicted = self.host.put(task, pages)
        except CacheError as error:
            self._forget(error.evicted)
            text = str(error)
            if text.startswith("Assertion failed"):
                text = f"[TensorRT-LLM][ERROR] {text}"
            raise RequestRefused(_not_stored(task, f"{text} ({_CACHE_FILE})")) from None
        except GeometryError as error:
            raise RequestRefused(_not_stored(task, str(error))) from None
        self._forget(evicted)
        self._rows[task] = self._store(weights, config)

    def _forget(self, tasks: Iterable[int]) -> None:
        for task in tasks:
            del self._rows[task]

    def _store(self, weights: Array, config: IntArray) -> tuple[Row, ...]:
        """Copy rows into fresh pages and return views of them."""
        geometry = self._geometry
        kind = STORAGE[geometry.shape.dtype]
        size = geometry.slots_per_page * geometry.page_width
        # zeros of this size come from the operating system untouched: only what is written takes memory
        page, used, rows = np.zeros(size, kind), 0, []
        for values, entry in zip(weights, config.tolist(), strict=True):
            module_id, layer, rank = entry[:3]
            d_in, d_out = local_dims(MODULE_BY_ID[module_id].name, geometry.shape)
            ends = rank * d_in, rank * (d_in + d_out)
            total = ends[1] + (d_out if len(entry) > 3 and entry[3] else 0)
            slots = ceil_div(total, geometry.page_width)
            if used + slots > geometry.slots_per_page:
                page, used = np.zeros(size, kind), 0
            begin = used * geometry.page_width
            view = page[begin : begin + total]
            view[:] = values[:total]
            used += slots
            rows.append(_row(module_id, layer, view, rank, ends))
        return tuple(rows)


def _row(module_id: int, layer: int, view: npt.NDArray[np.generic], rank: int, ends: tuple[int, int]) -> Row:
    a, b = view[: ends[0]].reshape(rank, -1), view[ends[0] : ends[1]].reshape(-1, rank)
    return Row(module_id, layer, a, b, view[ends[1] :] if view.size > ends[1] else None)


def _not_stored(task: int, cause: str) -> str:
    return fetching(f"Error storing task={task} in PEFT cache -- {cause}")
