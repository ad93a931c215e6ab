"""How long a capacity plan takes: `python bench/plan.py [--adapters 10000]`. Goal: less than a second for 10,000.

Llama-3.1-8B, adapters on all modules and layers, 32 slots. Printed, the median of five, page cache warm: a plan from
words (four kinds), from a folder of bundles of four kinds, and from one in which no two bundles have equal rows; then
the command as a whole process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lora_slots.fleet_source import from_bundles
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapters", type=int, default=10_000)
    count = parser.parse_args().adapters
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
        report(f"{count} bundles of four kinds", lambda: from_bundles(four, shape))
        report(f"{count} bundles, all different", lambda: from_bundles(all_different, shape))
        for name, source in (("in words", ("--fleet", words)), ("bundles of four kinds", ("--bundles", str(four)))):
            command = [str(Path(sys.executable).with_name("lora-slots")), "plan", str(PROFILE), *source, "--json"]
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            print(f"{'the command, ' + name:<42} {time.perf_counter() - began:11.3f} s")


if __name__ == "__main__":
    main()
