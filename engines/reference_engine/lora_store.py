"""The engine's LoRA cache with its weights: what was pushed is what is used.

Rules (the accounting is `trtllm_lora.EngineCache`, held to the runtime's recorded traces):
1. An adapter's rows are copied once into pages of its own (lora_pages.py). `stage` does that from any thread, before
   the loop fetches the request, so that running streams do not wait for it; what turns out not to be needed is let go.
2. A request makes its task in progress when it is fetched; the last request of a task that ends marks it done.
3. An id that is resident keeps its weights, whatever comes with the request.
4. An evicted task's pages are given back at once; a miss is told with the runtime's text, unprefixed.
5. The device cache only counts: on a CPU its copy of an adapter is the place in the step's stack (lora_stack.py). It
   holds requests back as the runtime's capacity scheduler does: pages of the distinct tasks of running requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from reference_engine.errors import RequestRefused, fetching
from reference_engine.lora_checks import check_lora_rows
from reference_engine.lora_pages import PageStore, Stored
from trtllm_lora import CacheError, CacheGeometry, EngineCache, GeometryError, Row
from trtllm_lora.tensors import Array, IntArray

_CACHE_FILE = "cpp/tensorrt_llm/runtime/loraCache.cpp"


class LoraStore:
    """Host and device LoRA cache of one engine. Used by the engine's loop only, `stage` aside; holds no lock."""

    def __init__(self, geometry: CacheGeometry, host_pages: int, device_pages: int) -> None:
        self._geometry = geometry
        self.host, self.device = EngineCache(host_pages), EngineCache(device_pages)
        self._pages = PageStore(geometry)
        self._stored: dict[int, Stored] = {}
        self._active: Counter[int] = Counter()

    def stage(self, task: int, weights: Array, config: IntArray) -> Stored | None:
        """Copy weights (`[rows, width]`) into pages ahead of `admit`; from any thread.

        None if the task seems to be resident, or if `admit` will refuse the weights.
        """
        if task in self._stored:
            return None
        try:
            check_lora_rows(weights, config, self._geometry.shape)
            if self._geometry.pages_for(config.tolist()) > self.device.num_pages:
                return None
        except (RequestRefused, GeometryError):
            return None
        return self._pages.store(weights, config)

    def admit(self, task: int, weights: Array | None, config: IntArray | None, staged: Stored | None = None) -> None:
        """Make a fetched request's task in progress, storing the weights (`[rows, width]`) if it is not resident.

        Raises:
            RequestRefused: a miss, no room, or weights that do not fit the engine; with the executor's text.
        """
        if staged is None:
            check_lora_rows(weights, config, self._geometry.shape)
        try:
            if task in self.host:
                self.host.bump(task)
            elif weights is None or config is None:
                raise RequestRefused(f"LoRA task {task} not found in cache. Please send LoRA weights with request")
            else:
                self._make_room(task, config)
                self._stored[task], staged = staged or self._pages.store(weights, config), None
        finally:
            if staged is not None:
                self._give_back(staged)
        self._active[task] += 1

    def preload(self, task: int, weights: Array, config: IntArray) -> None:
        """Put an adapter of the prefetch directory: in progress until its first request ends.

        Raises:
            CacheError, GeometryError: no room, or rows that do not fit a page.
        """
        pages = self._geometry.pages_for(config.tolist())
        self.host.put(task, pages)
        self._stored[task] = self._pages.store(weights, config)

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
        return self._stored[task].rows

    def _make_room(self, task: int, config: IntArray) -> None:
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

    def _forget(self, tasks: Iterable[int]) -> None:
        for task in tasks:
            self._give_back(self._stored.pop(task))

    def _give_back(self, stored: Stored) -> None:
        self._pages.give_back(stored, self.host.free_pages)


def _not_stored(task: int, cause: str) -> str:
    return fetching(f"Error storing task={task} in PEFT cache -- {cause}")
