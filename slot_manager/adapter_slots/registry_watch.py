"""Keeps the machine in step with the registry: who left it, who is superseded, who shall be pinned.

A superseded version is let go a tick later, and not before its waiting requests have been granted: a new version must
not cost a request that named the old one a moment ago its answer.
"""

from __future__ import annotations

from typing import Protocol

import structlog

from adapter_slots.catalog import Catalog
from adapter_slots.errors import SlotError
from adapter_slots.events import Added, Event, Pinned, Removed, Unpinned
from adapter_slots.pins import Pins
from adapter_slots.registry import Registry

log = structlog.get_logger("adapter_slots")


class Machine(Protocol):
    """What is asked of the manager around the machine."""

    def known(self, name: str) -> str:
        """Digest of a name, made known to the machine. Raises SlotError."""

    def post(self, event: Event) -> None:
        """Give the machine an event. Raises SlotError."""

    def is_waited_for(self, digest: str) -> bool:
        """Whether requests wait for it."""


class RegistryWatch:
    """One manager's eye on its registry. `look` blocks; the rest is quick, and for the manager's event loop."""

    def __init__(self, registry: Registry, catalog: Catalog, pins: Pins, machine: Machine) -> None:
        self._registry = registry
        self._catalog = catalog
        self._pins = pins
        self._machine = machine
        self._due = 0.0
        self._problem: str | None = None
        self._superseded: set[str] = set()
        """To be let go at the next turn."""

    def is_due(self, now: float) -> bool:
        """Whether to look again at `now` (seconds); if so, the next look is due an interval later."""
        if now < self._due:
            return False
        self._due = now + self._registry.interval_s
        return True

    def look(self) -> bool:
        """Read the registry if it changed, in a thread of the caller's: True if `renew` has something to do."""
        return self._registry.refresh()

    def tell_problem(self) -> None:
        """Log a registry that broke since the last look."""
        if self._registry.problem and self._registry.problem != self._problem:
            log.error("registry broken, the last good one stays", why=self._registry.problem)
        self._problem = self._registry.problem

    def turn(self) -> None:
        """Once a tick: let go what was superseded before."""
        for digest in list(self._superseded):
            if self._catalog.leads_to(digest):
                self._superseded.discard(digest)
            elif not self._machine.is_waited_for(digest):
                self._superseded.discard(digest)
                self._remove(digest)

    def renew(self) -> None:
        """The registry was read anew."""
        renewal = self._catalog.changed()
        for entry in renewal.relabelled:
            self._quietly(Added(entry.digest, self._catalog.label(entry), None, entry.pool))
            self._catalog.relabelled(entry)
        for digest in renewal.gone:
            self._superseded.discard(digest)
            self._remove(digest)
        self._superseded.update(renewal.superseded)
        self.repin()

    def repin(self) -> None:
        """Bring pins in step: with the registry's `pinned`, and operators' pins with the versions of their names."""
        change = self._pins.repinning(self._registry.entries, self._machine.known)
        refused = dict(change.refused)
        for digest in change.unpin:
            self._quietly(Unpinned(digest))
            self._pins.let_go(digest)
        for digest, name in change.pin.items():
            try:
                self._machine.post(Pinned(digest))
                self._pins.held(digest)
            except SlotError as error:
                refused[name] = str(error)
        for name, why in refused.items():
            if self._pins.refused.get(name) != why:
                log.error("not pinned", adapter=name, why=why)
        self._pins.refused = refused

    def _remove(self, digest: str) -> None:
        self._quietly(Removed(digest))
        self._catalog.forget(digest)
        self._pins.let_go(digest)

    def _quietly(self, event: Event) -> None:
        try:
            self._machine.post(event)
        except SlotError as error:
            log.debug("event not taken", event_type=type(event).__name__, why=str(error))
