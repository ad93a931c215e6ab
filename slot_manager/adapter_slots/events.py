"""What can happen to the slot machine (events, past tense) and what it asks for (effects, imperative).

`adapter` is always a bundle digest, `lease` the id of one running request, times are seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Tier(IntEnum):
    """Where the nearest copy of an adapter is; a copy above implies a copy below."""

    REMOTE = 0
    DISK = 1
    HOST = 2
    SLOT = 3


class Reason(Enum):
    """Why a lease was refused, or a copy evicted: the label in metrics and logs."""

    DEADLINE = "deadline"
    COLD = "cold"
    FAILED = "failed"
    TOO_LARGE = "too_large"
    CONFLICT = "conflict"
    NO_SLOT = "no_slot"
    DRAINING = "draining"
    IDLE = "idle"
    WATERMARK = "watermark"
    BIND = "bind"
    ROOM = "room"
    OPERATOR = "operator"
    MISS = "miss"
    REMOVED = "removed"


# --- events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """What the machine must know of a bundle before it can be moved above DISK."""

    task_id: int
    pages: int
    """Pages it takes in the engine's LoRA cache (`CacheGeometry.max_pages_for`)."""
    num_bytes: int
    """Bytes it takes in HOST."""


@dataclass(frozen=True, slots=True)
class Added:
    """The registry has a new adapter. With facts its bundle is on DISK, without it is REMOTE."""

    adapter: str
    name: str
    facts: Facts | None = None
    pool: str | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """The registry dropped an adapter. Running leases end in peace."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Acquired:
    """A request wants the adapter in a slot."""

    adapter: str
    lease: str
    wait_until: float
    """Refuse the lease if it was not granted by then."""
    hold_s: float
    """Reap the lease this long after it was granted, should nobody report its end."""
    waits: bool = True
    """False: a cold adapter is refused at once, with the time it is expected to take, and warmed meanwhile."""


@dataclass(frozen=True, slots=True)
class Released:
    """A lease ended: its request is over, or it was given up while it waited."""

    lease: str


@dataclass(frozen=True, slots=True)
class Pinned:
    """An operator wants the adapter in a slot until it is unpinned."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Unpinned:
    """The operator's hold is over."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Warmed:
    """Somebody wants the adapter in a slot once, without a lease."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The manager grants nothing new any more (on), or does again (off)."""

    on: bool = True


@dataclass(frozen=True, slots=True)
class EvictAsked:
    """An operator wants the adapter out of its slot now."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Promoted:
    """A Promote ended well: the adapter is in that tier. `facts` come with DISK."""

    adapter: str
    tier: Tier
    facts: Facts | None = None


@dataclass(frozen=True, slots=True)
class PromoteFailed:
    """A Promote ended badly."""

    adapter: str
    tier: Tier
    why: str
    transient: bool = False
    """Waiting leases stay, and the move is tried again after a back-off; else they are refused with `why`."""
    gone: bool = False
    """The copy on DISK is gone: it has to be brought from REMOTE again."""
    short_bytes: int = 0
    """Bytes of HOST that would have to go first: it is fuller than its bound says, others use the same memory."""
    engine_lost_idle: bool = False
    """The engine evicted every idle adapter before it failed (trtllm-lora rule: `pageIds.has_value()`)."""


@dataclass(frozen=True, slots=True)
class Touched:
    """A Touch ended. `missed`: the engine did not hold the adapter any more. `failed`: nobody knows."""

    adapter: str
    missed: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Missed:
    """A request found that the engine had forgotten the adapter (an engine miss)."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """The engine may have been restarted: look at every slot now."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """The time that `next_deadline` named has come."""


Event = (
    Added
    | Removed
    | Acquired
    | Released
    | Pinned
    | Unpinned
    | Warmed
    | Drained
    | EvictAsked
    | Promoted
    | PromoteFailed
    | Touched
    | Missed
    | Doubted
    | Ticked
)

# --- effects --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Promote:
    """Copy the adapter into `tier` from the tier below. Ends in exactly one Promoted or PromoteFailed."""

    adapter: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Touch:
    """Make the engine see the adapter's task id once (one token). Ends in exactly one Touched."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop the copy in `tier`. Cannot fail. From SLOT there is nothing to send: the engine's own LRU reclaims."""

    adapter: str
    tier: Tier
    reason: Reason


@dataclass(frozen=True, slots=True)
class Grant:
    """The lease may run under `task_id`; it ends with one Released."""

    lease: str
    adapter: str
    task_id: int
    found_in: Tier
    """Tier of the adapter when the lease was acquired: SLOT is a hit."""
    waited_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """The lease will not be granted."""

    lease: str
    adapter: str
    reason: Reason
    why: str
    retry_after_s: float | None = None
    """When asking again is worth it, where that can be said."""


@dataclass(frozen=True, slots=True)
class Reap:
    """A granted lease was taken back: nobody reported its end in time."""

    lease: str
    adapter: str


Effect = Promote | Touch | Evict | Grant | Refuse | Reap
