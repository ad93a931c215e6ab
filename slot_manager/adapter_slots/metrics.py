"""Counts what the machine did: a subscriber to (event, effects). Nothing is counted in the core.

Values are summed here and handed to the sink by `flush`, once a tick: a custom metric of Triton's Python backend costs
a round trip to the server, which has no place on the path of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from adapter_slots.events import (
    Effect,
    Event,
    Evict,
    Grant,
    Missed,
    Promote,
    PromoteFailed,
    Reap,
    Refuse,
    Tier,
    Touch,
    Touched,
)
from adapter_slots.machine import SlotMachine
from adapter_slots.ports import MetricSink


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family of docs/metrics.md."""

    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


FAMILIES: Mapping[str, Family] = {
    "lora_slots_leases_granted_total": Family(
        "counter", ("found_in",), "Leases granted, by tier when acquired (SLOT = hit)"
    ),
    "lora_slots_leases_refused_total": Family("counter", ("reason",), "Leases refused"),
    "lora_slots_leases_reaped_total": Family("counter", (), "Leases whose end nobody reported in time"),
    "lora_slots_wait_seconds_total": Family("counter", (), "Seconds that granted leases had waited"),
    "lora_slots_promotions_total": Family("counter", ("tier",), "Promotions started, by target tier; SLOT = binds"),
    "lora_slots_promotions_failed_total": Family("counter", ("tier",), "Promotions that failed"),
    "lora_slots_evictions_total": Family("counter", ("tier", "reason"), "Copies dropped"),
    "lora_slots_touches_total": Family("counter", (), "One-token requests that keep an adapter fresh in the engine"),
    "lora_slots_engine_misses_total": Family("counter", (), "The engine had forgotten an adapter that is in a slot"),
    "lora_slots_promote_seconds_total": Family("counter", ("tier",), "Seconds spent in promotions"),
    "lora_slots_adapters": Family("gauge", ("tier",), "Adapters by the highest tier they are in"),
    "lora_slots_slots": Family("gauge", (), "Slots there are"),
    "lora_slots_leases": Family("gauge", ("state",), "Leases now: running or waiting"),
    "lora_slots_pinned": Family("gauge", (), "Pinned adapters"),
    "lora_slots_adapter_failures_total": Family(
        "counter", ("adapter",), "Failed promotions by adapter, the rest as `other`"
    ),
    "vllm:lora_requests_info": Family(
        "gauge", ("max_lora", "running_lora_adapters", "waiting_lora_adapters"), "When it changed, seconds since 1970"
    ),
    "lora_slots_cache_pages_free": Family("gauge", (), "Pages the engine's LoRA cache has free, by the mirror"),
}

MAX_LABELS = 64
"""Adapters that get a label of their own in a family."""
LORA_INFO = "vllm:lora_requests_info"
"""The family by which routers made for vLLM find the instance that has an adapter."""
Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to publish at one moment."""

    sums: Mapping[Key, float]
    gauges: Mapping[Key, float]
    lora_info: Mapping[str, str]
    """Labels of LORA_INFO: adapters with running requests, adapters waited for, slots."""


class Metrics:
    """Sums since the last `take`. Call everything under the manager's lock."""

    def __init__(self) -> None:
        self._sums: Counter[Key] = Counter()
        self._labels: set[str] = set()

    def observe(self, event: Event, effects: list[Effect], machine: SlotMachine) -> None:
        """Count one event and its effects."""
        match event:
            case Missed() | Touched(missed=True):
                self._add("lora_slots_engine_misses_total")
            case PromoteFailed(tier=tier, adapter=adapter):
                self._add("lora_slots_promotions_failed_total", tier=tier.name)
                self._add("lora_slots_adapter_failures_total", adapter=self._label(machine, adapter))
        for effect in effects:
            match effect:
                case Grant(found_in=tier, waited_s=seconds):
                    self._add("lora_slots_leases_granted_total", found_in=tier.name)
                    self._add("lora_slots_wait_seconds_total", seconds)
                case Refuse(reason=reason):
                    self._add("lora_slots_leases_refused_total", reason=reason.value)
                case Reap():
                    self._add("lora_slots_leases_reaped_total")
                case Promote(tier=tier):
                    self._add("lora_slots_promotions_total", tier=tier.name)
                case Evict(tier=tier, reason=reason):
                    self._add("lora_slots_evictions_total", tier=tier.name, reason=reason.value)
                case Touch():
                    self._add("lora_slots_touches_total")

    def promoted(self, tier: Tier, seconds: float) -> None:
        """A promotion took this long."""
        self._add("lora_slots_promote_seconds_total", seconds, tier=tier.name)

    def _label(self, machine: SlotMachine, digest: str) -> str:
        """The adapter's name, as long as few were seen: labels must not grow with the fleet."""
        adapter = machine.adapters.get(digest)
        name = adapter.name if adapter else "other"
        if name in self._labels or len(self._labels) < MAX_LABELS:
            self._labels.add(name)
            return name
        return "other"

    def take(self, machine: SlotMachine) -> Found:
        """Sums since the last call, and the gauges as they are: hand them to a Publisher outside the lock."""
        sums, self._sums = self._sums, Counter()
        return Found(sums, _gauges(machine), _lora_info(machine))

    def _add(self, name: str, value: float = 1, **labels: str) -> None:
        self._sums[name, tuple(sorted(labels.items()))] += value  # type: ignore[assignment]


def _gauges(machine: SlotMachine) -> Mapping[Key, float]:
    tiers = Counter(adapter.tier for adapter in machine.adapters.values())
    running = sum(lease.granted for lease in machine.leases.values())
    return {
        **{("lora_slots_adapters", (("tier", tier.name),)): tiers[tier] for tier in Tier},
        ("lora_slots_leases", (("state", "running"),)): running,
        ("lora_slots_leases", (("state", "waiting"),)): len(machine.leases) - running,
        ("lora_slots_slots", ()): machine.config.num_slots,
        ("lora_slots_pinned", ()): sum(adapter.pinned for adapter in machine.adapters.values()),
        ("lora_slots_cache_pages_free", ()): machine.mirror.free_pages,
    }


def _lora_info(machine: SlotMachine) -> Mapping[str, str]:
    running = sorted(a.name for a in machine.adapters.values() if a.leases)[:MAX_LABELS]
    waiting = sorted(a.name for a in machine.adapters.values() if a.waiting)[:MAX_LABELS]
    return {
        "max_lora": str(machine.config.num_slots),
        "running_lora_adapters": ",".join(running),
        "waiting_lora_adapters": ",".join(waiting),
    }


class Publisher:
    """Hands what was found to a sink."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._info: Mapping[str, str] = {}

    def publish(self, found: Found, unix_s: float) -> None:
        """Add the sums, set the gauges; LORA_INFO has a new series, worth the time, when its labels change."""
        for (name, labels), value in found.sums.items():
            self._sink.series(name, dict(labels)).increment(value)
        for (name, labels), value in found.gauges.items():
            self._sink.series(name, dict(labels)).set(value)
        if found.lora_info != self._info:
            self._info = found.lora_info
            self._sink.only(LORA_INFO, found.lora_info).set(unix_s)
