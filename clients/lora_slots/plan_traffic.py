"""Whose requests a forecast runs: a log's or a guess's, each for an adapter of the fleet with its own pages and bytes.

A log's names mean what the registry says: an alias shares its requests out by weight, `adapter@N` is that version.
Names that it does not have are left out, as a server answers them NOT_FOUND, and told. Where the adapters are in words,
nothing says which is which: the log's names get the fleet's kinds in turn.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from adapter_slots.errors import EventRefused
from adapter_slots.records import MachineConfig
from lora_slots.fleet_source import Source
from lora_slots.plan_report import shared_memory_bytes
from lora_slots.refusals import Refused
from lora_slots.simulation import Forecast, Kind, forecast
from lora_slots.traffic import Request, ZipfGuess, with_new_tenants
from trtllm_lora.fleet import Fleet
from trtllm_lora.plan import Plan, PlanError, Wish

TOLD = 5
"""Unknown names told; the rest is counted."""
PRECISION = 0.03
"""A guess is run until its hit rate is known to so much, at 95 %."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests for adapters of the fleet, in order of time."""

    requests: Sequence[Request]
    source: str
    """In words."""
    notes: tuple[str, ...] = ()
    """What of it was left out."""
    is_guess: bool = False
    adapters: Sequence[str] = ()
    """Of a guess: also those that none of its requests is for."""

    def forecast(self, wish: Wish, plan: Plan) -> Forecast:
        """What the planned working set meets of it.

        Raises:
            PlanError: the slot manager refuses the pins.
        """
        new = [name for group in wish.fleet.groups if group.is_new for name in group.names]
        asked = list(dict.fromkeys(request.adapter for request in self.requests))
        requests = with_new_tenants(self.requests, new, self.adapters or asked)
        pins = _pins(wish, requests)
        kinds = _kinds(wish, plan, [*asked, *pins])
        used = dict.fromkeys([*pins, *asked, *new])  # who is neither asked for nor pinned changes nothing
        config = MachineConfig(
            num_slots=plan.slots,
            cache_pages=min(plan.host_pages, plan.device_pages),
            host_bytes=shared_memory_bytes(wish, plan),
        )
        precision = PRECISION if self.is_guess else None
        try:
            return forecast(
                config,
                {name: kinds[name] for name in used},
                requests,
                pins=pins,
                source=self.source,
                precision=precision,
            )
        except EventRefused as error:
            raise PlanError(f"the slot manager refuses the pins: {error}") from None


def guessed(guess: ZipfGuess, fleet: Fleet) -> Traffic:
    """A guess for a fleet: which adapters are popular has nothing to do with their rank."""
    names = list(fleet.names) or [f"adapter-{i}" for i in range(fleet.count)]
    random.Random(1).shuffle(names)  # noqa: S311 - the same for the same fleet
    source = f"a guess, Zipf {guess.alpha:g}, {guess.per_second:g} requests a second"
    return Traffic(guess.requests(names), source, is_guess=True, adapters=names)


def logged(requests: Sequence[Request], source: Source, name: str) -> Traffic:
    """The requests of a log, for the adapters that its names mean.

    Raises:
        Refused: it asks for none of the adapters.
    """
    if not source.fleet.names:
        return Traffic(requests, name)
    draws, known = random.Random(1), dict[str, str | None]()  # noqa: S311 - shares out an alias' requests
    found: list[Request] = []
    unknown = Counter[str]()
    shared = source.content.aliases if source.content else {}
    for request in requests:
        asked = request.adapter
        if asked in shared:
            found.append(replace(request, adapter=source.named(asked, draws.random())))
            continue
        if asked not in known:
            known[asked] = source.named(asked) if source.knows(asked) else None
        if (adapter := known[asked]) is None:
            unknown[asked] += 1
        else:
            found.append(replace(request, adapter=adapter))
    if not unknown:
        return Traffic(found, name)
    first = ", ".join(list(unknown)[:TOLD]) + (", …" if len(unknown) > TOLD else "")
    told = f"{name}: {unknown.total()} of {len(requests)} requests ask for names that no adapter has ({first})"
    if not found:
        raise Refused(told)
    return Traffic(found, name, (f"{told}: they are left out, as a server answers them NOT_FOUND",))


def _pins(wish: Wish, requests: Iterable[Request]) -> list[str]:
    """Those that were named, then the most asked for, then any of the fleet."""
    if not wish.pinned:
        return []
    asked = (name for name, _ in Counter(request.adapter for request in requests).most_common())
    others = wish.fleet.names or [f"never asked for {i}" for i in range(wish.pinned)]
    return list(dict.fromkeys([*wish.pins, *asked, *others]))[: wish.pinned]


def _kinds(wish: Wish, plan: Plan, asked: Sequence[str]) -> Mapping[str, Kind]:
    """Each adapter's own pages and bytes by its name; for names that are nobody's, the unnamed ones' in turn."""
    pages = wish.fleet.pages(plan.geometry)
    groups = [
        (Kind(of_one, group.num_bytes), group) for (of_one, _), group in zip(pages, wish.fleet.groups, strict=True)
    ]
    kinds = {name: kind for kind, group in groups for name in group.names}
    nameless = [kind for kind, group in groups if not group.names for _ in range(group.count)]
    random.Random(1).shuffle(nameless)  # noqa: S311 - the same for the same fleet
    dealt = (name for name in dict.fromkeys(asked) if name not in kinds)
    kinds.update((name, nameless[i % len(nameless)]) for i, name in enumerate(dealt))
    return kinds
