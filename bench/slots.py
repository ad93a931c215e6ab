"""Cost of a decision: acquire and release on a resident adapter, in the machine; and a start with 10,000 adapters.

    python bench/slots.py

Printed: microseconds for one acquire+release, p50 and p99, with 10^2 to 10^5 known adapters (it must be flat; goal
p50 < 20, p99 < 50). Then what a start with 10,000 adapters costs (goal < 2 s, < 100 MB): `adapters.yaml` of so many is
read by a process that has done nothing else, and every one is made known to a machine, as its first request would do.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from adapter_slots.events import Acquired, Added, Facts, Promoted, Released, Tier
from adapter_slots.machine import SlotMachine
from adapter_slots.records import MachineConfig
from adapter_slots.registry import Registry

ROUNDS = 20_000
RESIDENT = 32
KNOWN = 10_000


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
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapters.yaml"
        write_registry(file)
        subprocess.run([sys.executable, __file__, "--start", str(file)], check=True)
    print(f"load {os.getloadavg()[0]:.1f}")


def write_registry(file: Path) -> None:
    """A registry of 10,000 bundles in an object store."""
    lines = ["schema: 1", "adapters:"]
    for i in range(KNOWN):
        digest = hashlib.sha256(str(i).encode()).hexdigest()
        lines += [
            f"  adapter-{i}:",
            "    versions:",
            f"    - {{version: 1, digest: {digest}, path: s3://adapters/bundles/{digest}}}",
        ]
    file.write_text("\n".join(lines) + "\n")


def start(file: Path) -> None:
    """Read the registry, make all known; what that took."""
    before, began = resident_mb(), time.perf_counter()
    registry = Registry(file)
    read, read_mb = time.perf_counter() - began, resident_mb() - before
    machine = SlotMachine(MachineConfig(num_slots=RESIDENT, cache_pages=4 * RESIDENT, host_bytes=10**12))
    for entry in registry.entries.values():
        machine.handle(Added(entry.digest, entry.name, None, entry.pool), 0.0)
    known, known_mb = time.perf_counter() - began, resident_mb() - before
    print(
        f"{len(machine.adapters):,} adapters: registry read in {read:.2f} s, {read_mb:.0f} MB; all known to the "
        f"machine after {known:.2f} s, {known_mb:.0f} MB (resident memory; {before:.0f} MB before)"
    )


def resident_mb() -> float:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        start(Path(sys.argv[2]))
    else:
        main()
