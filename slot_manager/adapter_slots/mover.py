"""Carries adapters between tiers: the I/O behind Promote, Touch and Evict. Coroutines of the manager's event loop."""

from __future__ import annotations

import asyncio
import os

import structlog

from adapter_slots import host
from adapter_slots.disk import DiskTier
from adapter_slots.errors import TierError
from adapter_slots.events import Added
from adapter_slots.host import Region
from adapter_slots.ports import Engine
from adapter_slots.registry import Entry
from trtllm_lora import Bundle

log = structlog.get_logger("adapter_slots")


class Mover:
    """Knows the open bundles and the shared-memory regions of one manager."""

    def __init__(self, disk: DiskTier, engine: Engine) -> None:
        self._disk = disk
        self._engine = engine
        self._bundles: dict[str, Bundle] = {}
        self._regions: dict[str, Region] = {}
        self._count = 0

    def open(self, entry: Entry) -> Added:
        """Open an entry's bundle and say what the machine must know of it. Raises AdapterRejected."""
        bundle = self._disk.open(entry)
        self._bundles[entry.digest] = bundle
        return Added(entry.digest, entry.name, bundle.task_id, self._disk.pages(bundle), host.region_bytes(bundle))

    def task_id(self, entry: Entry) -> int:
        """Task id of an entry, read from its bundle if it is not open yet. Raises AdapterRejected."""
        bundle = self._bundles.get(entry.digest) or self._disk.open(entry)
        return bundle.task_id

    async def to_host(self, digest: str) -> None:
        """DISK -> HOST: verify the bundle once, copy it into shared memory, let Triton map it. Raises TierError."""
        bundle = self._bundles[digest]
        self._count += 1
        name = f"lora-slots-{os.getpid()}-{self._count}-{digest[:12]}"
        await asyncio.to_thread(self._disk.verify, bundle)
        region = await asyncio.to_thread(host.load, bundle, name)
        try:
            await self._engine.register(region)
        finally:
            host.forget_name(region)
        self._regions[digest] = region

    async def to_slot(self, digest: str) -> None:
        """HOST -> SLOT: bind. Raises TierError."""
        await self._engine.bind(self._bundles[digest].task_id, self._regions[digest])

    async def touch(self, digest: str) -> None:
        """One token under the adapter's task id. Raises EngineMiss or another TierError."""
        await self._engine.touch(self._bundles[digest].task_id)

    async def leave_host(self, digest: str) -> None:
        """Unmap the adapter's region. Cannot fail: what goes wrong is logged."""
        region = self._regions.pop(digest)
        try:
            await self._engine.unregister(region)
        except TierError as error:
            log.warning("shared memory stays mapped", region=region.name, why=str(error))

    async def close(self) -> None:
        """Unmap everything and close the connection."""
        for digest in list(self._regions):
            await self.leave_host(digest)
        await self._engine.close()
