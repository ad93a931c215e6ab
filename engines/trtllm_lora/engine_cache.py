"""The engine's LoRA cache, operation by operation, as the runtime's `loraCache.cpp` does it.

One class serves both sides: the reference engine keeps its adapters by it, and the slot manager mirrors the real
engine with it. It counts pages and holds no weights, so it is pure and cheap.

Rules (each held to the recorded traces of the real cache):
1. A task is *in progress* from `put` or `bump` until `mark_done`; only *done* tasks can be evicted.
2. The victim is the task that was marked done longest ago: least recently FINISHED, whatever the order of puts.
3. Free pages are taken first; nothing is evicted while enough are free.
4. `put` of a resident task is a `bump`: its new weights are ignored.
5. No done task at all: the put fails and nothing changes. Some, but not enough: ALL done tasks are evicted, then the
   put fails (a shadowed iterator in the runtime), and the freed pages stay free.
6. `copy_to` (host -> device) makes the task in progress on the host, also when the device then has no room.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Self

from trtllm_lora.errors import CacheError

NO_DONE_TASKS = "Cache is full. There are no done tasks to evict"
NOT_ENOUGH = "Assertion failed: pageIds.has_value()"


class TaskState(Enum):
    """What the cache knows of a task; the value is the letter of the recorded traces."""

    ABSENT = "."
    IN_PROGRESS = "p"
    DONE = "d"


class EngineCache:
    """Page accounting of one LoRA cache (host or device) of one engine rank.

    `num_pages` is the number of pages in all; tasks are `lora_task_id`s, their size is given in pages at `put`.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free_pages = num_pages
        self._pages: dict[int, int] = {}
        # oldest first: the order in which tasks were marked done is the order of eviction
        self._done: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, task: object) -> bool:
        return task in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def state(self, task: int) -> TaskState:
        """State of a task."""
        if task not in self._pages:
            return TaskState.ABSENT
        return TaskState.DONE if task in self._done else TaskState.IN_PROGRESS

    def pages_of(self, task: int) -> int:
        """Pages a resident task holds (KeyError if it is absent)."""
        return self._pages[task]

    def resident(self) -> tuple[int, ...]:
        """All tasks, in the order they were put."""
        return tuple(self._pages)

    def victims(self, pages: int) -> tuple[int, ...] | None:
        """Who would be evicted, in order, if a task of this many pages were put now; None if it cannot fit.

        Evicts nothing. `()` means that free pages are enough.
        """
        free, out = self.free_pages, []
        for task in self._done:
            if free >= pages:
                break
            out.append(task)
            free += self._pages[task]
        return tuple(out) if free >= pages else None

    def eviction_order(self) -> tuple[int, ...]:
        """The done tasks, next victim first."""
        return tuple(self._done)

    def put(self, task: int, pages: int) -> tuple[int, ...]:
        """Put a task (weights with the request); returns the tasks evicted for it.

        Raises:
            CacheError: no room, with the runtime's text; by rule 5 done tasks may be gone all the same
                (`error.evicted` names them).
        """
        if task in self._pages:
            self.bump(task)
            return ()
        evicted = self._claim(pages)
        self._pages[task] = pages
        self.free_pages -= pages
        return evicted

    def bump(self, task: int) -> None:
        """A request with the id only: the task is in progress again. A task that is absent is left absent."""
        self._done.pop(task, None)

    def mark_done(self, task: int) -> None:
        """The last request of the task ended. Tasks that are absent or already done are left as they are."""
        if task in self._pages and task not in self._done:
            self._done[task] = None

    def copy_to(self, device: Self, task: int) -> tuple[int, ...]:
        """Copy a host task to the device cache (`copyTask` with markDone=false); returns whom the device evicted.

        Raises:
            CacheError: the task is not here, or the device has no room.
        """
        if task not in self._pages:
            raise CacheError(f"can't move a missing task{task}")
        self.bump(task)
        try:
            return device.put(task, self._pages[task])
        except CacheError as error:
            raise CacheError(f"Couldn't claim pages during copyTask -- {error}", evicted=error.evicted) from None

    def drop(self, task: int) -> None:
        """Forget a task and free its pages: a put that failed while loading, or an engine that restarted."""
        self.free_pages += self._pages.pop(task, 0)
        self._done.pop(task, None)

    def _claim(self, pages: int) -> tuple[int, ...]:
        if self.free_pages >= pages:
            return ()
        if not self._done:
            raise CacheError(NO_DONE_TASKS)
        evicted = []
        while self._done and self.free_pages < pages:
            task, _ = self._done.popitem(last=False)
            self.free_pages += self._pages.pop(task)
            evicted.append(task)
        if self.free_pages < pages:
            raise CacheError(NOT_ENOUGH, evicted=tuple(evicted))
        return tuple(evicted)
