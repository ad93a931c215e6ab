"""What the slot machine remembers: its configuration, one record per adapter, one per lease."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from adapter_slots.events import Tier
from adapter_slots.pools import NO_POOLS, Pools

STORY_LENGTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When adapters leave and are looked at: what an operator sets and the machine obeys. Seconds."""

    idle_s: float = 300.0
    """Evict from SLOT what nobody leased for this long."""
    low_watermark: int | None = None
    """On a tick, evict idle adapters until at most this many slots are used; None: only `idle_s` counts."""
    min_idle_s: float = 10.0
    """The watermark leaves alone what was used more recently than this."""
    max_wait_s: float = 5.0
    """An adapter that waited this long makes another one drain."""
    min_residency_s: float = 0.5
    """An adapter stays in its slot this long before another may have it: bounds the swap rate."""
    tick_s: float = 1.0
    refresh_s: float = 60.0
    """Touch an idle pinned adapter this often, so that the engine keeps it fresh."""
    verify_s: float = 5.0
    """On a tick, touch the adapter the engine was seen to hold longest ago, if that is this long."""


@dataclass(frozen=True, slots=True)
class MachineConfig(Timing):
    """Bounds and times of one working set. Seconds unless the name says otherwise."""

    num_slots: int
    """Adapters in the engine's working set at most."""
    cache_pages: int
    """Pages of the engine's LoRA cache: the smaller of host and device, over all ranks."""
    host_bytes: int
    """Bytes of adapters in HOST at most."""
    pools: Pools = NO_POOLS
    """Slots reserved for groups of adapters."""
    report_margin_s: float = 0.25
    """How late, at most, an end report is believed to arrive here, and a granted request at the engine."""
    max_host_moves: int = 4
    """Promotions to DISK and HOST that run at one time."""
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0

    @property
    def watermark(self) -> int:
        """Slots that may stay used after a tick."""
        return self.num_slots if self.low_watermark is None else self.low_watermark

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be at least {least}, found {value}"
            for name, value, least in (
                ("num_slots", self.num_slots, 1),
                ("cache_pages", self.cache_pages, 1),
                ("host_bytes", self.host_bytes, 1),
                ("tick_s", self.tick_s, 0.001),
                ("watermark", self.watermark, 0),
            )
            if value < least
        ]
        wrong += self.pools.problems(self.num_slots)
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter (one digest): where it is, who holds it, what happened to it."""

    digest: str
    name: str
    pool: str | None = None
    task_id: int = 0
    """0 until its facts are known (not before it was on DISK)."""
    pages: int = 0
    num_bytes: int = 0
    tier: Tier = Tier.REMOTE
    moving: Tier | None = None
    """The tier it is being promoted to."""
    pinned: bool = False
    warming: bool = False
    """Wanted in a slot once."""
    touching: bool = False
    draining: bool = False
    """Takes no new lease: it leaves its slot for one that waited too long."""
    removed: bool = False
    leases: set[str] = field(default_factory=set)
    waiting: dict[str, None] = field(default_factory=dict)
    """Leases that wait, in order of arrival."""
    last_used: float = 0.0
    uses: int = 0
    """Leases granted."""
    priority: float = 0.0
    """The policy's own note."""
    bound_at: float = 0.0
    move_began: float = 0.0
    move_s: dict[Tier, float] = field(default_factory=dict)
    """Seconds of its last promotion to each tier."""
    leased_since: float = 0.0
    """When it last went from no running lease to one."""
    done_at: float = 0.0
    """When its last request in the engine ended."""
    touch_began: float = 0.0
    touched_at: float = -1.0
    """When its last good touch began: the engine saw it after that."""
    retry_at: float = 0.0
    """No promotion before this time: back-off after a failure."""
    retries: bool = False
    """The last failure was transient: leases wait while it is tried again."""
    failures: int = 0
    failure: str = ""
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def held(self) -> bool:
        """Leased, pinned, moving, touched or waited for: may not be evicted. (Waiters do not hold a drained one.)"""
        return bool(
            self.leases
            or self.pinned
            or self.moving is not None
            or self.touching
            or ((self.waiting or self.warming) and not self.draining)
        )

    @property
    def seen_at(self) -> float:
        """When the engine was last known to hold it."""
        return max(self.done_at, self.touched_at, self.leased_since)

    @property
    def rebind_s(self) -> float:
        """Seconds its last promotions took, all tiers together."""
        return sum(self.move_s.values())

    @property
    def holders(self) -> str:
        """Who holds it, in words."""
        words = [f"{len(self.leases)} leases"] if self.leases else []
        words += [f"{len(self.waiting)} waiting"] if self.waiting else []
        words += ["pinned"] if self.pinned else []
        words += ["being warmed"] if self.warming else []
        words += [f"moving to {self.moving.name}"] if self.moving is not None else []
        return ", ".join(words + (["being touched"] if self.touching else []))

    def tell(self, now: float, text: str) -> None:
        """Add a line to the adapter's story."""
        self.story.append((now, text))


@dataclass(slots=True, eq=False)
class Lease:
    """One request's hold, from acquired to released."""

    id: str
    adapter: str
    acquired_at: float
    found_in: Tier
    wait_until: float
    hold_s: float
    granted: bool = False
    until: float = 0.0
    """When a granted lease is reaped."""
