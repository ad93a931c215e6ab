"""The shell around the slot machine: one lock, one timer, effects as tasks of one event loop.

Any thread may post an event: the machine answers under the lock (microseconds), so a resident adapter costs a request
no change of thread. Effects that touch the world run in the manager's own event loop, in the order the machine gave
them, and every Promote and Touch ends in exactly one event, whatever goes wrong. Grants and refusals are told to the
lease's owner after the lock is released.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from adapter_slots.catalog import Catalog
from adapter_slots.errors import (
    BadRequest,
    Draining,
    EventRefused,
    SlotError,
)
from adapter_slots.events import (
    Acquired,
    Added,
    Doubted,
    Drained,
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
    Ticked,
    Tier,
    Touch,
    Unpinned,
    Warmed,
)
from adapter_slots.loop_thread import LoopThread
from adapter_slots.machine import SlotMachine
from adapter_slots.metrics import Metrics, Publisher
from adapter_slots.mover import Mover
from adapter_slots.pins import Pins
from adapter_slots.ports import Clock, MetricSink
from adapter_slots.refusals import refused_event, refused_lease
from adapter_slots.registry import Entry, Registry
from adapter_slots.registry_watch import RegistryWatch
from adapter_slots.status import explain, status_of
from adapter_slots.warm_set import WarmSet, WarmSetFile

log = structlog.get_logger("adapter_slots")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who waits for a lease. Called once, from any thread; must not block."""

    granted: Callable[[Grant], None]
    refused: Callable[[SlotError], None]
    reaped: Callable[[], None] = lambda: None
    """The lease outlived its deadline, after it was granted."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A lease's owner, and the entry that was asked for."""

    owner: Owner
    entry: Entry


class SlotManager:
    """Runs one slot machine against the real tiers. `start` before use, `close` at the end."""

    def __init__(
        self,
        machine: SlotMachine,
        registry: Registry,
        mover: Mover,
        *,
        metrics: MetricSink | None = None,
        state_file: Path | None = None,
        remember_s: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """`state_file` keeps the warm set over restarts; refused names are remembered for `remember_s`."""
        self._machine = machine
        self._registry = registry
        self._mover = mover
        self._catalog = Catalog(registry, mover.know, forget_s=remember_s, clock=clock)
        self._pins = Pins()
        self._watch = RegistryWatch(registry, self._catalog, self._pins, self)
        self._looking = False
        self._publisher = Publisher(metrics) if metrics is not None else None
        self._warm_set = WarmSetFile(state_file)
        self._restoring = state_file is not None or any(entry.pinned for entry in registry.entries.values())
        self._clock = clock
        self._metrics = Metrics()
        self._lock = threading.Lock()
        self._owners: dict[str, _Asked] = {}
        self._loop = LoopThread("adapter-slots", clock, self._on_timer)
        self._closing = False

    # --- life

    def start(self) -> None:
        """Start the event loop's thread."""
        self._loop.start()
        self._loop.every(self._machine.config.tick_s, self._housekeeping)
        if self._restoring:
            self._loop.spawn(self._restore())

    def close(self) -> None:
        """Refuse what waits, stop moves, free shared memory; returns when the loop has ended."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            waiting = [asked for lease, asked in self._owners.items() if not self._machine.leases[lease].granted]
        for asked in waiting:
            asked.owner.refused(Draining("the slot manager is stopping"))
        self._loop.stop(self._mover.close())

    # --- leases

    def resolve(self, name: str, key: str | None = None) -> Entry:
        """The version that a request for an adapter, `adapter@version` or alias gets; raises SlotError.

        The same `key` (a session, a user) has the same version of an alias while its weights stay; without a key,
        chance decides.
        """
        return self._catalog.resolve(name, key, random.random())  # noqa: S311 - a share of requests, no secret

    def acquire(
        self, name: str | Entry, lease: str, owner: Owner, *, wait_s: float, hold_s: float, waits: bool = True
    ) -> None:
        """Ask for an adapter, as `resolve` found it or by name (an alias': its heaviest target). `owner` hears once.

        A resident adapter is granted before this returns. With `waits` false a cold adapter is refused at once
        (AdapterCold) and warmed meanwhile.

        Raises:
            SlotError: unknown adapter, a bundle that does not fit, a lease id that is running, a closing manager.
        """
        entry = name if isinstance(name, Entry) else self._catalog.resolve(name)
        digest = self._known(entry)
        now = self._clock()
        asked = _Asked(owner, entry)
        self._post(Acquired(digest, lease, now + wait_s, hold_s, waits), asked=(lease, asked))

    def release(self, lease: str) -> bool:
        """A lease ended, or is given up. False if it was not running (it may have been reaped)."""
        try:
            self._post(Released(lease))
        except BadRequest:
            return False
        return True

    def missed(self, name: str) -> None:
        """A request learnt that the engine had forgotten the adapter. Raises SlotError."""
        self._post(Missed(self.known(name)))

    def name_of_task(self, task_id: int) -> str:
        """Adapter name of a task id, for clients that speak ids. Raises UnknownAdapter."""
        return self._catalog.name_of_task(task_id)

    # --- operators

    def pin(self, name: str) -> None:
        """Hold an adapter in a slot until `unpin`. Raises SlotError."""
        digest = self.known(name)
        self._post(Pinned(digest))
        with self._lock:
            self._pins.asked(name, digest)

    def unpin(self, name: str) -> None:
        """End a pin. Raises SlotError; BadRequest if the registry holds it."""
        digest = self.known(name)
        self._pins.check_unpin(digest, self._registry.entries)
        self._post(Unpinned(digest))
        with self._lock:
            self._pins.unasked(digest)

    def evict(self, name: str) -> None:
        """Take an adapter out of its slot. Raises SlotError if it is held or not in a slot."""
        self._post(EvictAsked(self.known(name)))

    def warm(self, name: str) -> None:
        """Bring an adapter into a slot once, without waiting for it. Raises SlotError."""
        self._post(Warmed(self.known(name)))

    def verify(self) -> None:
        """Look at every slot: the engine may have been restarted."""
        self._post(Doubted())

    def drain(self, on: bool = True) -> None:
        """Grant nothing new (on), or again (off); running leases end in peace."""
        self._post(Drained(on))

    def status(self) -> dict[str, Any]:
        """What is where, as plain data."""
        with self._lock:
            about = {"restoring": self._restoring, "pins_refused": dict(self._pins.refused), "disk": self._mover.disk()}
            return {**status_of(self._machine, self._registry, self._clock()), **about}

    def explain(self, name: str) -> dict[str, Any]:
        """Everything known of one adapter. Raises UnknownAdapter."""
        entry, verdict = self._registry.resolve(name), "fits the engine"
        try:
            self._known(entry)
            refusal = self._mover.refusal(entry.digest)
            verdict = str(refusal) if refusal is not None else verdict
        except SlotError as error:
            verdict = str(error)
        with self._lock:
            told = explain(self._machine, entry, verdict, self._clock())
        return {**told, "arrived_bytes": self._mover.arrived(entry.digest)}

    # --- events

    def _post(self, event: Event, asked: tuple[str, _Asked] | None = None) -> None:
        told: list[tuple[_Asked, Grant | Refuse | Reap]] = []
        with self._lock:
            if self._closing:
                raise Draining("the slot manager is stopping")
            try:
                effects = self._machine.handle(event, self._clock())
            except EventRefused as refusal:
                raise refused_event(event, refusal) from None
            if asked is not None:
                self._owners[asked[0]] = asked[1]
            elif isinstance(event, Released):
                self._owners.pop(event.lease, None)
            self._metrics.observe(event, effects, self._machine)
            for effect in effects:
                self._carry_out(effect, told)
            self._loop.rearm(self._machine.next_deadline())
        for someone, effect in told:
            if isinstance(effect, Grant):
                someone.owner.granted(effect)
            elif isinstance(effect, Reap):
                someone.owner.reaped()
            else:
                why = self._mover.refusal(effect.adapter) if effect.reason is Reason.FAILED else None
                adapter = self._machine.adapters.get(effect.adapter)
                name, version = someone.entry.name, someone.entry.version
                someone.owner.refused(why.about(name, version) if why else refused_lease(effect, adapter, name))

    def _carry_out(self, effect: Effect, told: list[tuple[_Asked, Grant | Refuse | Reap]]) -> None:
        match effect:
            case Grant(lease=lease):
                told.append((self._owners[lease], effect))
                if effect.found_in is not Tier.SLOT:
                    self._log(log.info, "granted", effect.adapter, lease=lease, waited_s=round(effect.waited_s, 4))
            case Refuse(lease=lease):
                told.append((self._owners.pop(lease), effect))
                self._log(log.warning, "refused", effect.adapter, lease=lease, why=effect.why)
            case Reap(lease=lease, adapter=adapter):
                told.append((self._owners.pop(lease), effect))
                self._log(log.warning, "lease reaped", adapter, lease=lease)
            case Promote(adapter=adapter, tier=tier):
                self._loop.spawn(self._promote(adapter, tier))
            case Touch(adapter=adapter):
                self._loop.spawn(self._touch(adapter))
            case Evict(adapter=adapter, tier=tier, reason=reason):
                self._log(log.info, "evicted", adapter, tier=tier.name, reason=reason.value)
                if tier is Tier.HOST:
                    self._loop.spawn(self._mover.leave_host(adapter))

    # --- effects

    async def _promote(self, digest: str, tier: Tier) -> None:
        began = self._clock()
        event = await self._mover.move(digest, tier)
        if isinstance(event, Promoted) and event.facts is not None:
            self._catalog.learnt(digest, event.facts.task_id)
        seconds = self._clock() - began
        with self._lock:
            self._metrics.promoted(tier, seconds)
        if isinstance(event, PromoteFailed):
            self._log(log.error, "promotion failed", digest, tier=tier.name, seconds=round(seconds, 4), why=event.why)
        else:
            self._log(log.info, "promoted", digest, tier=tier.name, seconds=round(seconds, 4))
        self._post_quietly(event)

    async def _touch(self, digest: str) -> None:
        event = await self._mover.look(digest)
        if event.failed:
            self._log(log.warning, "touch failed", digest)
        self._post_quietly(event)

    async def _restore(self) -> None:
        """Bring back what was in slots before the restart, as soon as the engine answers."""
        saved = await asyncio.to_thread(self._warm_set.load)
        while not await self._mover.engine_ready():
            await asyncio.sleep(0.1)
        self._watch.repin()
        for name in saved.pinned:
            self._try(self.pin, name)
        for name in saved.recent[: self._machine.config.num_slots]:
            self._try(self.warm, name)
        self._restoring = False
        log.info("warm set restored", pinned=list(saved.pinned), recent=list(saved.recent))

    def _try(self, do: Callable[[str], None], name: str) -> None:
        try:
            do(name)
        except SlotError as error:
            log.warning("not restored", adapter=name, why=str(error))

    # --- time

    def _on_timer(self) -> None:
        self._post_quietly(Ticked())
        with self._lock:
            self._loop.rearm(self._machine.next_deadline())

    def _housekeeping(self) -> None:
        """Once a tick, whatever the machine does: registry, metrics."""
        self._watch.turn()
        if not self._looking and not self._closing and self._watch.is_due(self._clock()):
            self._looking = True
            self._loop.spawn(self._look())
        if not self._restoring:
            with self._lock:
                warm = WarmSet.of(self._machine.adapters.values(), self._pins.operator)
            if self._warm_set.is_new(warm):
                self._loop.spawn(asyncio.to_thread(self._warm_set.save, warm))
        if self._publisher is not None:
            with self._lock:
                found = self._metrics.take(self._machine)
            self._publisher.publish(found, time.time())

    async def _look(self) -> None:
        """Read the registry in a thread: thousands of entries take seconds, and requests are served meanwhile."""
        try:
            if await asyncio.to_thread(self._watch.look):
                self._watch.renew()
            self._watch.tell_problem()
        finally:
            self._looking = False

    # --- small things

    def known(self, name: str) -> str:
        """Digest of a name (an alias': its heaviest target), made known to the machine. Raises SlotError."""
        return self._known(self._catalog.resolve(name))

    def post(self, event: Event) -> None:
        """Give the machine an event that has no owner. Raises SlotError."""
        self._post(event)

    def is_waited_for(self, digest: str) -> bool:
        """Whether requests wait for an adapter."""
        with self._lock:
            adapter = self._machine.adapters.get(digest)
            return adapter is not None and bool(adapter.waiting)

    def _known(self, entry: Entry) -> str:
        """Digest of an entry, made known to the machine on first use. Raises AdapterRejected."""
        new, facts = self._catalog.first_use(entry)
        if new:
            self._post(Added(entry.digest, self._catalog.label(entry), facts, entry.pool))
            self._catalog.told(entry)
        return entry.digest

    def _log(self, write: Callable[..., Any], what: str, digest: str, **fields: Any) -> None:
        write(what, adapter=self._name(digest), digest=digest, **fields)

    def _name(self, digest: str) -> str:
        adapter = self._machine.adapters.get(digest)
        return adapter.name if adapter else digest[:12]

    def _post_quietly(self, event: Event) -> None:
        try:
            self._post(event)
        except SlotError as error:
            log.debug("event not taken", event_type=type(event).__name__, why=str(error))
