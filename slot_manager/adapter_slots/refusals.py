"""What a client is told when the machine refuses: reasons become typed errors, in this one place."""

from __future__ import annotations

from adapter_slots.errors import (
    AdapterCold,
    AdapterFailed,
    AdapterRejected,
    BadRequest,
    Draining,
    EventRefused,
    LeaseRunning,
    NoRoom,
    NoSlotEver,
    SlotError,
    UnknownAdapter,
)
from adapter_slots.events import Acquired, Added, Event, Reason, Refuse
from adapter_slots.records import Adapter

_ERRORS: dict[Reason, type[SlotError]] = {
    Reason.DEADLINE: NoRoom,
    Reason.TOO_LARGE: AdapterRejected,
    Reason.CONFLICT: AdapterRejected,
    Reason.NO_SLOT: NoSlotEver,
    Reason.COLD: AdapterCold,
    Reason.REMOVED: UnknownAdapter,
    Reason.DRAINING: Draining,
}
STORY_LINES = 5


def refused_event(event: Event, refusal: EventRefused) -> SlotError:
    """The error for an event that the machine did not take."""
    match event:
        case Acquired():
            return LeaseRunning(str(refusal))
        case Added(name=name):
            return AdapterRejected(f"adapter {name!r}: {refusal}", adapter=name)
        case _:
            return BadRequest(str(refusal))


def refused_lease(effect: Refuse, adapter: Adapter | None, name: str) -> SlotError:
    """The error for a lease that was not granted, with the end of the adapter's story.

    `name` is what was asked for: the machine knows one name of a content, and another one may be another tenant's.
    """
    story = tuple(text for _, text in list(adapter.story)[-STORY_LINES:]) if adapter else ()
    kind = _ERRORS.get(effect.reason, AdapterFailed)
    return kind(f"adapter {name!r}: {effect.why}", adapter=name, retry_after_s=effect.retry_after_s, story=story)
