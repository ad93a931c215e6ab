"""Cost of a decision: acquire and release on a resident adapter, in the machine and through the manager.

    python bench/slots.py

Printed: microseconds for one acquire+release, p50 and p99, with 10^2 to 10^5 known adapters (it must be flat), and
memory and start-up of 10,000 known adapters.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc

from adapter_slots.events import Acquired, Added, Facts, Promoted, Released, Tier
from adapter_slots.machine import SlotMachine
from adapter_slots.records import MachineConfig

ROUNDS = 20_000
RESIDENT = 32


def warm_machine(known: int) -> SlotMachine:
    """A machine that knows this many adapters and has 32 in slots."""
    config = MachineConfig(num_slots=RESIDENT, cache_pages=4 * RESIDENT, host_bytes=10**12, max_host_moves=64)
    machine = SlotMachine(config)
    for i in range(known):
        machine.handle(Added(f"digest-{i}", f"adapter-{i}", Facts(i + 1, 2, 10**8)), 0.0)
    for i in range(RESIDENT):
        machine.handle(Acquired(f"digest-{i}", f"warm-{i}", 1e9, 1e9), 0.0)
        machine.handle(Promoted(f"digest-{i}", Tier.HOST), 0.0)
        machine.handle(Promoted(f"digest-{i}", Tier.SLOT), 0.0)
        machine.handle(Released(f"warm-{i}"), 0.0)
    return machine


def decision_us(machine: SlotMachine) -> tuple[float, float]:
    """p50 and p99 of acquire + release."""
    times = []
    for i in range(ROUNDS):
        digest, lease, now = f"digest-{i % RESIDENT}", f"lease-{i}", i * 1e-3
        began = time.perf_counter()
        machine.handle(Acquired(digest, lease, now + 30, 30.0), now)
        machine.handle(Released(lease), now)
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    """Print the table."""
    print(f"{'known adapters':<16} {'p50 us':>8} {'p99 us':>8}")
    for known in (100, 1_000, 10_000, 100_000):
        p50, p99 = decision_us(warm_machine(known))
        print(f"{known:<16} {p50:8.1f} {p99:8.1f}")
    tracemalloc.start()
    began = time.perf_counter()
    kept = warm_machine(10_000)
    seconds = time.perf_counter() - began
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    print(f"{len(kept.adapters):,} known adapters: {megabytes:.0f} MB, {seconds:.2f} s (traced)")


if __name__ == "__main__":
    main()
