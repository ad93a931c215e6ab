"""Carries adapters between tiers: the I/O behind Promote, Touch and Evict. Coroutines of the manager's event loop.

Blocking work runs in threads; each hop has its own time limit, and a hop that is cancelled or out of time tells its
thread to stop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from adapter_slots import host
from adapter_slots.admission import Claims, Terms, admit, claims_of
from adapter_slots.disk import DiskTier
from adapter_slots.errors import (
    AdapterRejected,
    BundleGone,
    ConversionFailed,
    EngineFull,
    EngineMiss,
    HostFull,
    MoveRejected,
    NotAdmitted,
    StoreUnavailable,
    TierError,
)
from adapter_slots.events import Facts, Promoted, PromoteFailed, Tier, Touched
from adapter_slots.host import Loaded, Region
from adapter_slots.ports import Engine
from adapter_slots.registry import Entry
from adapter_slots.store import ADAPTER_CONFIG, Stores, Transfer
from trtllm_lora import Bundle

log = structlog.get_logger("adapter_slots")


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds a hop may take."""

    to_disk_s: float = 120.0
    to_host_s: float = 30.0


class Mover:
    """Knows the open bundles and the shared-memory regions of one manager."""

    def __init__(
        self, disk: DiskTier, engine: Engine, stores: Stores, limits: Limits, terms: Callable[[], Terms] = Terms
    ) -> None:
        """`terms` says what is asked of every adapter now."""
        self._disk = disk
        self._engine = engine
        self._stores = stores
        self._limits = limits
        self._terms = terms
        self._entries: dict[str, Entry] = {}
        self._bundles: dict[str, Bundle] = {}
        self._regions: dict[str, Region] = {}
        self._refused: dict[str, AdapterRejected] = {}
        self._arrived: dict[str, tuple[int, int]] = {}
        self._count = 0
        if left := host.sweep():
            log.warning("shared memory that a killed process left was removed", regions=left)

    def know(self, entry: Entry) -> Facts | None:
        """Take an entry in; its facts if its bundle is on this machine already.

        Raises:
            NotAdmitted: another base, or no good signature. AdapterRejected: the bundle is here and does not fit the
            engine, or is broken.
        """
        admit(entry, None, self._terms())
        self._entries[entry.digest] = entry
        self._refused.pop(entry.digest, None)
        if not self._disk.has(entry.digest) and (entry.is_remote or (Path(entry.path) / ADAPTER_CONFIG).is_file()):
            return None
        try:
            return self._open(entry)
        except NotAdmitted:
            # the copy here may be older than a signature that the store has; nothing is fetched if it has none either
            if not entry.is_remote or not self._disk.remove(entry.digest):
                raise
            return None

    def refusal(self, digest: str) -> AdapterRejected | None:
        """Why an adapter cannot be served as it is, found when it came from REMOTE, if its last move failed of that."""
        return self._refused.get(digest)

    def arrived(self, digest: str) -> tuple[int, int] | None:
        """(bytes that have arrived, bytes in all) of an adapter on its way to DISK."""
        return self._arrived.get(digest)

    def disk(self) -> dict[str, object] | None:
        """What the directory behind DISK has and had, as plain data; None without one."""
        return self._disk.about()

    async def move(self, digest: str, tier: Tier) -> Promoted | PromoteFailed:
        """Promote an adapter; whatever goes wrong is in the one event that comes back."""
        try:
            if tier is Tier.DISK:
                return Promoted(digest, tier, await self.to_disk(digest))
            await (self.to_host(digest) if tier is Tier.HOST else self.to_slot(digest))
            return Promoted(digest, tier)
        except TierError as error:
            lost = isinstance(error, EngineFull) and error.lost_idle
            gone, short = isinstance(error, BundleGone), error.short_bytes if isinstance(error, HostFull) else 0
            return PromoteFailed(digest, tier, str(error), error.transient, gone, short, engine_lost_idle=lost)
        except Exception as error:  # noqa: BLE001 - every move ends in exactly one event
            return PromoteFailed(digest, tier, f"{type(error).__name__}: {error}")

    async def look(self, digest: str) -> Touched:
        """Touch an adapter: does the engine hold it? Ends in exactly one event."""
        try:
            await self._engine.touch(self._bundles[digest].task_id)
        except EngineMiss:
            return Touched(digest, missed=True)
        except Exception:  # noqa: BLE001 - what is wrong with the engine shows at the next bind
            return Touched(digest, failed=True)
        return Touched(digest)

    async def to_disk(self, digest: str) -> Facts:
        """REMOTE -> DISK: fetch, check every byte, convert a raw adapter. Raises TierError."""
        entry = self._entries[digest]

        def arrived(done: int, total: int) -> None:
            if not transfer.cancelled.is_set():
                self._arrived[digest] = (done, total)

        transfer = Transfer(progress=arrived)

        def check(claims: Claims) -> None:
            admit(entry, claims, self._terms())

        work = asyncio.to_thread(self._disk.add, digest, self._stores.source(entry.path), transfer, check)
        self._refused.pop(digest, None)
        try:
            async with asyncio.timeout(self._limits.to_disk_s):
                await work
            return await asyncio.to_thread(self._open, entry)
        except TimeoutError:
            raise StoreUnavailable(f"{entry.path}: not here within {self._limits.to_disk_s} s") from None
        except ConversionFailed as error:
            self._refused[digest] = AdapterRejected(f"adapter {entry.name!r}: {error}", adapter=entry.name)
            raise
        except AdapterRejected as error:
            self._refused[digest] = error
            raise MoveRejected(str(error)) from None
        finally:
            transfer.cancelled.set()
            self._arrived.pop(digest, None)

    async def to_host(self, digest: str) -> None:
        """DISK -> HOST: verify the bundle once, copy it into shared memory, let Triton map it. Raises TierError."""
        entry, bundle = self._entries[digest], self._bundles[digest]
        if not bundle.path.is_dir():
            raise BundleGone(f"{entry.name}: its bundle left the disk")
        self._count += 1
        name = f"{host.PREFIX}{os.getpid()}-{self._count}-{digest[:12]}"
        over = threading.Event()
        made: list[Loaded] = []  # a move that is given up in the moment its thread ends does not get the result
        try:
            async with asyncio.timeout(self._limits.to_host_s):
                loaded = await asyncio.to_thread(self._load, digest, bundle, name, over, made)
                await self._engine.register(loaded.region)
        except TimeoutError:
            raise TierError(f"{entry.name}: not in shared memory within {self._limits.to_host_s} s") from None
        finally:
            over.set()
            for each in made:
                each.file.close()
            host.forget_name(name)
        self._regions[digest] = loaded.region

    async def to_slot(self, digest: str) -> None:
        """HOST -> SLOT: bind. Raises TierError."""
        await self._engine.bind(self._bundles[digest].task_id, self._regions[digest])

    async def engine_ready(self) -> bool:
        """Whether the engine takes requests."""
        return await self._engine.ready()

    async def leave_host(self, digest: str) -> None:
        """Unmap the adapter's region. Cannot fail: what goes wrong is logged."""
        region = self._regions.pop(digest)
        try:
            await self._engine.unregister(region)
        except TierError as error:
            log.warning("shared memory stays mapped", region=region.name, why=str(error))

    async def close(self) -> None:
        """Unmap everything and close the connections."""
        for digest in list(self._regions):
            await self.leave_host(digest)
        await self._engine.close()
        await asyncio.to_thread(self._stores.close)
        self._disk.close()

    def _open(self, entry: Entry) -> Facts:
        bundle = self._disk.open(entry)
        admit(entry, claims_of(bundle.manifest, entry.digest), self._terms())
        self._bundles[entry.digest] = bundle
        return Facts(bundle.task_id, self._disk.pages(bundle), host.region_bytes(bundle))

    def _load(self, digest: str, bundle: Bundle, name: str, over: threading.Event, made: list[Loaded]) -> Loaded:
        with self._disk.in_use(digest):
            loaded = load_checked(self._disk, bundle, name)
        made.append(loaded)
        if over.is_set():  # nobody waits any more: a thread outlives the move that was given up
            loaded.file.close()
            host.forget_name(name)
        return loaded


def load_checked(disk: DiskTier, bundle: Bundle, name: str) -> Loaded:
    """Copy a bundle into shared memory while every byte of it is checked, unless this process did that before.

    Raises:
        BundleBroken: some file is not what the manifest says. Other TierErrors as `host.load` has them.
    """
    with ThreadPoolExecutor(1, "check") as other:
        checking = other.submit(disk.verify, bundle)
        try:
            loaded = host.load(bundle, name)
        except TierError:
            checking.result()  # a broken bundle is the better reason
            raise
        try:
            checking.result()
        except TierError:
            loaded.file.close()
            host.forget_name(name)
            raise
    return loaded
