"""An engine in memory for the manager's unit tests: the real cache's rules, faults on demand.

The real thing behind a real Triton is used in tests/e2e; here the point is what the manager does when things go wrong.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from adapter_slots.errors import EngineFull, EngineMiss
from adapter_slots.host import Region
from trtllm_lora import CacheError, EngineCache


class MemoryEngine:
    """`adapter_slots.ports.Engine` over an EngineCache; every adapter takes one page."""

    def __init__(self, pages: int = 8) -> None:
        self.cache = EngineCache(pages)
        self.binds: Counter[int] = Counter()
        self.touches: Counter[int] = Counter()
        self.registered: set[str] = set()
        self.fail_bind: list[Exception] = []
        """Raised by the next binds, first one first."""
        self.hold = asyncio.Event()
        """Binds wait for it; set it to let them pass."""
        self.hold.set()
        self.closed = False

    async def ready(self) -> bool:
        """Always."""
        return True

    async def register(self, region: Region) -> None:
        """Remember the region."""
        self.registered.add(region.name)

    async def unregister(self, region: Region) -> None:
        """Forget the region."""
        self.registered.remove(region.name)

    async def bind(self, task_id: int, region: Region) -> None:
        """Put the task, as a request with weights does."""
        assert region.name in self.registered
        await self.hold.wait()
        self.binds[task_id] += 1
        if self.fail_bind:
            raise self.fail_bind.pop(0)
        try:
            self.cache.put(task_id, 1)
        except CacheError as error:
            raise EngineFull(str(error), lost_idle=bool(error.evicted)) from None
        self.cache.mark_done(task_id)

    async def touch(self, task_id: int) -> None:
        """A request with the id alone."""
        self.touches[task_id] += 1
        if task_id not in self.cache:
            raise EngineMiss(f"LoRA task {task_id} not found in cache. Please send LoRA weights with request")
        self.cache.bump(task_id)
        self.cache.mark_done(task_id)

    async def close(self) -> None:
        """End."""
        self.closed = True
