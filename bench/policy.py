"""Hit rates of eviction policies on synthetic traffic, in a budget of cache pages with mixed ranks.

    python bench/policy.py [--requests 20000] [--plot bench/policy.svg]

LRU and GDSF are the classes the slot machine uses; Belady knows the future (it evicts what is needed last) and is the
bound nobody can beat. Traces: Zipf with alpha 0.8, 1.0, 1.2; drifting (the popular set moves every tenth of the trace);
bursty (a tenant asks forty times in a row, then is silent). 200 adapters of 1, 2 or 4 pages, 32 pages.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from adapter_slots.policy import POLICIES, Policy
from adapter_slots.records import Adapter

ADAPTERS, BUDGET = 200, 32


def make_adapters() -> list[Adapter]:
    """Adapters of ranks 8, 16 and 32: one, two and four pages."""
    chance = random.Random(5)
    made = []
    for i in range(ADAPTERS):
        pages = chance.choice((1, 2, 4))
        made.append(Adapter(f"d{i}", f"a{i}", pages=pages, num_bytes=pages * 10_000_000))
    return made


def zipf(alpha: float, length: int, seed: int = 1) -> list[int]:
    """Adapter numbers by popularity."""
    chance = random.Random(seed)
    return chance.choices(range(ADAPTERS), [1 / (i + 1) ** alpha for i in range(ADAPTERS)], k=length)


def drifting(length: int) -> list[int]:
    """Zipf 1.0 whose ranking is rotated ten times."""
    step = length // 10
    return [(number + 20 * (i // step)) % ADAPTERS for i, number in enumerate(zipf(1.0, length, seed=2))]


def bursty(length: int) -> list[int]:
    """Bursts of forty over a Zipf 0.8 background."""
    chance, trace = random.Random(3), list[int]()
    while len(trace) < length:
        if chance.random() < 0.02:
            trace += [chance.randrange(ADAPTERS)] * 40
        else:
            trace += zipf(0.8, 1, seed=chance.randrange(2**31))
    return trace[:length]


def hit_rate(policy: Policy, trace: Sequence[int]) -> float:
    """Share of requests whose adapter was resident."""
    adapters, resident, used, hits = make_adapters(), dict[int, Adapter](), 0, 0
    for now, number in enumerate(trace):
        adapter = adapters[number]
        if number in resident:
            hits += 1
        else:
            while used + adapter.pages > BUDGET:
                victim = policy.victim(resident.values())
                assert victim is not None
                used -= victim.pages
                del resident[int(victim.name[1:])]
            resident[number] = adapter
            used += adapter.pages
        adapter.last_used, adapter.uses = float(now), adapter.uses + 1
        policy.used(adapter)
    return hits / len(trace)


def _distance(uses: Sequence[int], now: int) -> int:
    return uses[0] - now if uses else 10**9


def belady(trace: Sequence[int]) -> float:
    """The clairvoyant: evict the one whose next use is farthest away, per page."""
    adapters, resident, used, hits = make_adapters(), set[int](), 0, 0
    uses: dict[int, list[int]] = {}
    for now, number in enumerate(trace):
        uses.setdefault(number, []).append(now)
    for now, number in enumerate(trace):
        uses[number].pop(0)
        if number in resident:
            hits += 1
            continue
        while used + adapters[number].pages > BUDGET:
            victim = max(resident, key=lambda n: _distance(uses[n], now) * adapters[n].pages)
            resident.remove(victim)
            used -= adapters[victim].pages
        resident.add(number)
        used += adapters[number].pages
    return hits / len(trace)


def plot(rows: Iterable[tuple[str, dict[str, float]]], file: Path) -> None:
    """A bar chart as SVG, by hand: three bars a trace."""
    rows, colours = list(rows), {"lru": "#4c78a8", "gdsf": "#f58518", "belady": "#bab0ac"}
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{60 + 130 * len(rows)}" height="260" font-size="12">']
    for i, (name, rates) in enumerate(rows):
        for j, (policy, rate) in enumerate(rates.items()):
            height, x = 200 * rate, 40 + 130 * i + 32 * j
            parts.append(
                f'<rect x="{x}" y="{220 - height:.0f}" width="28" height="{height:.0f}" fill="{colours[policy]}"/>'
            )
            parts.append(f'<text x="{x}" y="{215 - height:.0f}">{rate:.2f}</text>')
        parts.append(f'<text x="{40 + 130 * i}" y="240">{name}</text>')
    parts += [f'<text x="{40 + 80 * i}" y="16" fill="{c}">{p}</text>' for i, (p, c) in enumerate(colours.items())]
    file.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main() -> None:
    """Print the table, and draw it if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    traces = {f"zipf {alpha}": zipf(alpha, options.requests) for alpha in (0.8, 1.0, 1.2)}
    traces |= {"drifting": drifting(options.requests), "bursty": bursty(options.requests)}
    rows = []
    print(f"{'hit rate':<10} {'lru':>6} {'gdsf':>6} {'belady':>7}")
    for name, trace in traces.items():
        rates = {key: hit_rate(make(), trace) for key, make in POLICIES.items()} | {"belady": belady(trace)}
        rows.append((name, rates))
        print(f"{name:<10} {rates['lru']:6.3f} {rates['gdsf']:6.3f} {rates['belady']:7.3f}")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
