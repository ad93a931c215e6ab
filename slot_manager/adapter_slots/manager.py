"""The shell around the slot machine: one lock, one timer, effects as tasks of one event loop.

Any thread may post an event: the machine answers under the lock (microseconds), so a resident adapter costs a request
no change of thread. Effects that touch the world run in the manager's own event loop, in the order the machine gave
them, and every Promote and Touch ends in exactly one event, whatever goes wrong. Grants and refusals are told to the
lease's owner after the lock is released.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from adapter_slots.disk import DiskTier
from adapter_slots.errors import (
    AdapterFailed,
    AdapterRejected,
    BadRequest,
    Draining,
    EngineFull,
    EngineMiss,
    EventRefused,
    LeaseRunning,
    NoRoom,
    SlotError,
    TierError,
    UnknownAdapter,
)
from adapter_slots.events import (
    Acquired,
    Added,
    Effect,
    Event,
    Evict,
    EvictAsked,
    Grant,
    Missed,
    Pinned,
    Promote,
    Promoted,
    PromoteFailed,
    Reap,
    Reason,
    Refuse,
    Released,
    Removed,
    Ticked,
    Tier,
    Touch,
    Touched,
    Unpinned,
)
from adapter_slots.machine import SlotMachine
from adapter_slots.metrics import Metrics, deliver
from adapter_slots.mover import Mover
from adapter_slots.ports import Clock, Engine, MetricSink
from adapter_slots.registry import Entry, Registry
from adapter_slots.status import status_of

log = structlog.get_logger("adapter_slots")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who waits for a lease. Called once, from any thread; must not block."""

    granted: Callable[[Grant], None]
    refused: Callable[[SlotError], None]


class SlotManager:
    """Runs one slot machine against the real tiers. `start` before use, `close` at the end."""

    def __init__(
        self,
        machine: SlotMachine,
        registry: Registry,
        disk: DiskTier,
        engine: Engine,
        *,
        metrics: MetricSink | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._mover = Mover(disk, engine)
        self._sink = metrics
        self._clock = clock
        self._metrics = Metrics()
        self._lock = threading.Lock()
        self._owners: dict[str, Owner] = {}
        self._added: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="adapter-slots", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._armed: tuple[float, asyncio.TimerHandle] | None = None
        self._closing = False

    # --- life

    def start(self) -> None:
        """Start the event loop's thread."""
        self._thread.start()
        self._loop.call_soon_threadsafe(self._housekeeping)

    def close(self) -> None:
        """Refuse what waits, stop moves, free shared memory; returns when the loop has ended."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            waiting = [owner for lease, owner in self._owners.items() if not self._machine.leases[lease].granted]
        for owner in waiting:
            owner.refused(Draining("the slot manager is stopping"))
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)

    # --- leases

    def acquire(self, name: str, lease: str, owner: Owner, *, wait_s: float, hold_s: float) -> None:
        """Ask for an adapter by name. `owner` hears of it once; a resident adapter is granted before this returns.

        Raises:
            SlotError: unknown adapter, a bundle that does not fit, a lease id that is running, a closing manager.
        """
        digest = self._known(self._registry.resolve(name))
        now = self._clock()
        self._post(Acquired(digest, lease, now + wait_s, hold_s), owner=(lease, owner))

    def release(self, lease: str) -> bool:
        """A lease ended, or is given up. False if it was not running (it may have been reaped)."""
        try:
            self._post(Released(lease))
        except BadRequest:
            return False
        return True

    def missed(self, name: str) -> None:
        """A request learnt that the engine had forgotten the adapter."""
        self._post(Missed(self._known(self._registry.resolve(name))))

    def name_of_task(self, task_id: int) -> str:
        """Adapter name of a task id, for clients that speak ids. Raises UnknownAdapter."""
        for entry in self._registry.entries.values():
            if self._mover.task_id(entry) == task_id:
                return entry.name
        raise UnknownAdapter(f"no adapter has task id {task_id}")

    # --- operators

    def pin(self, name: str) -> None:
        """Hold an adapter in a slot until `unpin`. Raises SlotError."""
        self._post(Pinned(self._known(self._registry.resolve(name))))

    def unpin(self, name: str) -> None:
        """End a pin. Raises SlotError."""
        self._post(Unpinned(self._known(self._registry.resolve(name))))

    def evict(self, name: str) -> None:
        """Take an adapter out of its slot. Raises SlotError if it is held or not in a slot."""
        self._post(EvictAsked(self._known(self._registry.resolve(name))))

    def status(self) -> dict[str, Any]:
        """What is where, as plain data."""
        with self._lock:
            return status_of(self._machine, self._registry, self._clock())

    # --- events

    def _post(self, event: Event, owner: tuple[str, Owner] | None = None) -> None:
        told: list[tuple[Owner, Grant | Refuse]] = []
        with self._lock:
            if self._closing:
                raise Draining("the slot manager is stopping")
            try:
                effects = self._machine.handle(event, self._clock())
            except EventRefused as refusal:
                raise _refused(event, refusal) from None
            if owner is not None:
                self._owners[owner[0]] = owner[1]
            elif isinstance(event, Released):
                self._owners.pop(event.lease, None)
            self._metrics.observe(event, effects)
            for effect in effects:
                self._carry_out(effect, told)
            self._rearm(self._machine.next_deadline())
        for someone, effect in told:
            if isinstance(effect, Grant):
                someone.granted(effect)
            else:
                someone.refused(_refusal(effect, self._name(effect.adapter)))

    def _carry_out(self, effect: Effect, told: list[tuple[Owner, Grant | Refuse]]) -> None:
        match effect:
            case Grant(lease=lease):
                told.append((self._owners[lease], effect))
            case Refuse(lease=lease):
                told.append((self._owners.pop(lease), effect))
            case Reap(lease=lease, adapter=adapter):
                self._owners.pop(lease, None)
                log.warning("lease reaped", lease=lease, adapter=self._name(adapter), digest=adapter)
            case Promote(adapter=adapter, tier=tier):
                self._spawn(self._promote(adapter, tier))
            case Touch(adapter=adapter):
                self._spawn(self._touch(adapter))
            case Evict(adapter=adapter, tier=tier, reason=reason):
                log.info("evicted", adapter=self._name(adapter), digest=adapter, tier=tier.name, reason=reason.value)
                if tier is Tier.HOST:
                    self._spawn(self._mover.leave_host(adapter))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    # --- effects

    async def _promote(self, digest: str, tier: Tier) -> None:
        started = self._clock()
        try:
            await (self._mover.to_host(digest) if tier is Tier.HOST else self._mover.to_slot(digest))
            event: Event = Promoted(digest, tier)
        except TierError as error:
            lost = isinstance(error, EngineFull) and error.lost_idle
            event = PromoteFailed(digest, tier, str(error), transient=error.transient, engine_lost_idle=lost)
        except Exception as error:  # noqa: BLE001 - rule 6: every move ends in exactly one event
            event = PromoteFailed(digest, tier, f"{type(error).__name__}: {error}")
        seconds = self._clock() - started
        with self._lock:
            self._metrics.promoted(tier, seconds)
        fields = {"adapter": self._name(digest), "digest": digest, "tier": tier.name, "seconds": round(seconds, 4)}
        if isinstance(event, PromoteFailed):
            log.error("promotion failed", why=event.why, **fields)
        else:
            log.info("promoted", **fields)
        self._post_quietly(event)

    async def _touch(self, digest: str) -> None:
        missed = False
        try:
            await self._mover.touch(digest)
        except EngineMiss:
            missed = True
        except Exception as error:  # noqa: BLE001 - rule 6; what is wrong with the engine shows at the next bind
            log.warning("touch failed", adapter=self._name(digest), digest=digest, why=str(error))
        self._post_quietly(Touched(digest, missed=missed))

    # --- time

    def _rearm(self, deadline: float | None) -> None:
        if deadline is not None and (self._armed is None or deadline < self._armed[0]):
            self._loop.call_soon_threadsafe(self._arm, deadline)

    def _arm(self, deadline: float) -> None:
        if self._armed is not None:
            if self._armed[0] <= deadline:
                return
            self._armed[1].cancel()
        delay = max(0.0, deadline - self._clock())
        self._armed = (deadline, self._loop.call_later(delay, self._on_timer))

    def _on_timer(self) -> None:
        self._armed = None
        self._post_quietly(Ticked())
        with self._lock:
            self._rearm(self._machine.next_deadline())

    def _housekeeping(self) -> None:
        """Once a tick, whatever the machine does: registry, metrics."""
        was_broken = self._registry.problem
        if self._registry.refresh():
            self._forget_old_versions()
        if self._registry.problem and self._registry.problem != was_broken:
            log.error("registry broken, the last good one stays", why=self._registry.problem)
        if self._sink is not None:
            with self._lock:
                self._metrics.measure(self._machine)
                sums, gauges = self._metrics.take()
            deliver(self._sink, sums, gauges)
        if not self._closing:
            self._loop.call_later(self._machine.config.tick_s, self._housekeeping)

    # --- small things

    def _known(self, entry: Entry) -> str:
        """Digest of an entry, made known to the machine on first use."""
        if entry.digest not in self._added:
            self._post(self._mover.open(entry))
            self._added.add(entry.digest)
        return entry.digest

    def _forget_old_versions(self) -> None:
        current = {entry.digest for entry in self._registry.entries.values()}
        for digest in self._added - current:
            self._added.discard(digest)
            self._post_quietly(Removed(digest))

    def _name(self, digest: str) -> str:
        adapter = self._machine.adapters.get(digest)
        return adapter.name if adapter else digest[:12]

    def _post_quietly(self, event: Event) -> None:
        try:
            self._post(event)
        except SlotError as error:
            log.debug("event not taken", event_type=type(event).__name__, why=str(error))

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _stop(self) -> None:
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._mover.close()


def _refused(event: Event, refusal: EventRefused) -> SlotError:
    match event:
        case Acquired():
            return LeaseRunning(str(refusal))
        case Added(name=name):
            return AdapterRejected(f"adapter {name!r}: {refusal}", adapter=name)
        case _:
            return BadRequest(str(refusal))


def _refusal(effect: Refuse, name: str) -> SlotError:
    text = f"adapter {name!r}: {effect.why}"
    if effect.reason in (Reason.DEADLINE, Reason.TOO_LARGE):
        return NoRoom(text, adapter=name)
    if effect.reason is Reason.REMOVED:
        return UnknownAdapter(text, adapter=name)
    return AdapterFailed(text, adapter=name)
