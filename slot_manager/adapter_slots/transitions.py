"""The life of an adapter as data: docs/slot-states.md is drawn from it, and a test holds the machine to it.

A state is where the adapter is and where it is moving. Pins, leases and waiters are not states: they hold an adapter
where it is. A step is what the machine does (an effect: Promote, Evict) or hears (an event: Promoted, PromoteFailed, or
Gone, which is a PromoteFailed with `gone`); Drain and Resume are seen by nobody but new leases.
"""

from __future__ import annotations

from dataclasses import dataclass

from adapter_slots.records import Adapter


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: in `state`, by `step`, to `to`."""

    state: str
    step: str
    to: str
    when: str


TRANSITIONS = (
    Transition("REMOTE", "Promote", "REMOTE→DISK", "somebody wants it, and fewer than `max_host_moves` run"),
    Transition("REMOTE→DISK", "Promoted", "DISK", "its bundle is on disk and whole"),
    Transition("REMOTE→DISK", "PromoteFailed", "REMOTE", "the store or the disk refused; back-off runs"),
    Transition("DISK", "Promote", "DISK→HOST", "somebody wants it, and HOST has room or can make some"),
    Transition("DISK→HOST", "Promoted", "HOST", "its bytes lie in shared memory that Triton has mapped"),
    Transition("DISK→HOST", "PromoteFailed", "DISK", "a wrong byte, no shared memory, no Triton; back-off runs"),
    Transition("DISK→HOST", "Gone", "REMOTE", "the disk made room for another adapter meanwhile; it is fetched again"),
    Transition("HOST", "Promote", "HOST→SLOT", "first in line, and a slot and its pages are free or can be made free"),
    Transition("HOST", "Evict", "DISK", "HOST needs room, or it was removed; not while held"),
    Transition("HOST→SLOT", "Promoted", "SLOT", "the engine answered the bind; everybody who waited is granted"),
    Transition("HOST→SLOT", "PromoteFailed", "HOST", "the engine refused or is not there; back-off runs"),
    Transition("SLOT", "Evict", "HOST", "idle, watermark, bind (another needs room), operator, miss, removed"),
    Transition("SLOT", "Drain", "SLOT draining", "another adapter waited `max_wait_s`; no new leases here"),
    Transition("SLOT draining", "Resume", "SLOT", "nobody else waits any more"),
    Transition("SLOT draining", "Evict", "HOST", "its leases have ended, or the engine had lost it"),
)


def state_of(adapter: Adapter) -> str:
    """The adapter's state, in the words of the table."""
    if adapter.moving is not None:
        return f"{adapter.tier.name}→{adapter.moving.name}"
    return f"{adapter.tier.name} draining" if adapter.draining else adapter.tier.name
