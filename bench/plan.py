"""How long a plan takes: `python bench/plan.py [--adapters 10000] [--log-lines 20000]`. Goal: less than 1 s for 10,000.

Llama-3.1-8B, adapters on all modules and layers, 32 slots. Printed, the median of five, page cache warm: a plan from
words (four kinds), from a folder of bundles of four kinds, and from one in which no two bundles have equal rows; then
the command as a whole process, processor and wall time, also from a registry, with a guess and with a log (5 requests a
second over 200 adapters, Zipf): the least of three.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lora_slots.fleet_source import from_bundles
from lora_slots.traffic import ZipfGuess
from trtllm_lora.fleet import Fleet, parse_fleet
from trtllm_lora.plan import Wish, make_plan
from trtllm_lora.profile import load_profile

PROFILE = Path(__file__).parents[1] / "engines" / "profiles" / "llama-3.1-8b.yaml"
RANKS, RUNS = (8, 16, 32, 64), 5


def make_bundles(folder: Path, count: int, *, equal: bool) -> None:
    """Folders with a `lora_config` each: one rank for all rows, or a rank drawn for each row."""
    chance = random.Random(1)
    for number in range(count):
        one = chance.choice(RANKS)
        rows = [(m, layer, one if equal else chance.choice(RANKS)) for layer in range(32) for m in range(1, 8)]
        (folder / str(number)).mkdir(parents=True)
        np.save(folder / str(number) / "model.lora_config.npy", np.array([rows], np.int32))


def make_registry(file: Path, count: int) -> None:
    """Adapters in a store, on all modules, a rank drawn for each."""
    chance = random.Random(1)
    modules = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    lines = ["schema: 1", "adapters:"]
    for number in range(count):
        lines += [f"  tenant-{number}:", "    versions:", "    - version: 1", f"      digest: d{number:063x}"]
        lines += [f"      path: s3://models/{number}", f"      rank: {chance.choice(RANKS)}"]
        lines += [f"      target_modules: {modules}"]
    file.write_text("\n".join(lines))


def make_log(file: Path, count: int) -> None:
    """Requests for adapters of the registry."""
    requests = ZipfGuess(per_second=5.0, count=count).requests([f"tenant-{number}" for number in range(200)])
    lines = [json.dumps({"time": r.at, "adapter": r.adapter, "seconds": r.seconds}) for r in requests]
    file.write_text("\n".join(lines))


def run_command(name: str, *words: str) -> None:
    """Run `lora-slots plan` and print what it took."""
    command = [str(Path(sys.executable).with_name("lora-slots")), "plan", str(PROFILE), *words, "--json"]
    took: list[tuple[float, float]] = []
    for _ in range(3):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        took.append((cpu, time.perf_counter() - began))
    cpu, wall = min(took)
    print(f"{'the command, ' + name:<42} CPU {cpu:7.2f} s   wall {wall:7.2f} s   load {os.getloadavg()[0]:.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--log-lines", type=int, default=20_000)
    arguments = parser.parse_args()
    count = arguments.adapters
    profile = load_profile(PROFILE)
    shape = profile.shape()
    words = f"{count // 2}x8,{count // 4}x16,{count // 8}x32,{count - count // 2 - count // 4 - count // 8}x64"

    def report(name: str, fleet_of: Callable[[], Fleet]) -> None:
        times: list[tuple[float, float]] = []
        for _ in range(RUNS):
            began = time.perf_counter()
            fleet = fleet_of()
            middle = time.perf_counter()
            make_plan(Wish(profile, fleet, 80 * 2**30, 32))
            times.append((middle - began, time.perf_counter() - middle))
        reading, planning = (statistics.median(values) for values in zip(*times, strict=True))
        print(f"{name:<42} read {reading:6.3f} s   plan {planning:6.3f} s")

    with tempfile.TemporaryDirectory() as scratch:
        four, all_different = Path(scratch) / "four", Path(scratch) / "different"
        make_bundles(four, count, equal=True)
        make_bundles(all_different, count, equal=False)
        report(f"{count} adapters in words, four kinds", lambda: parse_fleet(words, shape))
        report(f"{count} bundles of four kinds", lambda: from_bundles(four, shape).fleet)
        report(f"{count} bundles, all different", lambda: from_bundles(all_different, shape).fleet)
        registry, log = Path(scratch) / "adapters.yaml", Path(scratch) / "log.jsonl"
        make_registry(registry, count)
        make_log(log, arguments.log_lines)
        run_command("in words", "--fleet", words)
        run_command("bundles of four kinds", "--bundles", str(four))
        run_command("a registry", "--adapters", str(registry))
        run_command("a guess", "--fleet", f"{count}x16", "--zipf", "1")
        run_command(f"a log of {arguments.log_lines} lines", "--adapters", str(registry), "--log", str(log))


if __name__ == "__main__":
    main()
