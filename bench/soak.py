"""Ten minutes of load: 200 adapters over 8 slots, 16 clients, Zipf and then uniform.

    make soak        (python bench/soak.py [--seconds 300] [--adapters 200] [--slots 8] [--clients 16])

Every answer is compared with what transformers and peft give for that adapter. Printed: requests, wrong answers, engine
misses, the longest wait, evictions by reason, and memory at the beginning and the end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes.fleet import make_base, make_fleet
from fakes.soak import Outcome, soak

from lora_slots.embedded import Prepared, publish_adapters, running
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer
from reference_engine import build_engine


def metric(server: TritonServer, name: str) -> float:
    """Sum of a family."""
    with urllib.request.urlopen(server.metrics_url) as reply:  # noqa: S310 - loopback
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def report(name: str, outcome: Outcome, server: TritonServer) -> None:
    """Print one phase."""
    waits = sorted(outcome.waits_s)
    print(
        f"{name:<8} requests {outcome.requests}, wrong {len(outcome.wrong)}, errors {sum(outcome.errors.values())}, "
        f"engine misses {metric(server, 'lora_slots_engine_misses_total'):.0f}, "
        f"p50 {statistics.median(waits):.3f} s, p99 {waits[int(len(waits) * 0.99)]:.3f} s, longest {waits[-1]:.3f} s, "
        f"memory {outcome.resident_mb[1]:.0f} -> {outcome.resident_mb[-1]:.0f} MB"
    )
    for text, count in outcome.errors.most_common(3):
        print(f"         {count} x {text}")


def main() -> int:
    """Run both phases; exit code 1 if an answer was wrong or a request failed."""
    parser = argparse.ArgumentParser()
    for option, default in (("seconds", 300), ("adapters", 200), ("slots", 8), ("clients", 16)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        base = make_base(home)
        engine = build_engine(base, home / "engine", max_lora_rank=8, max_seq_len=512)
        fleet = make_fleet(base, home / "peft", options.adapters)
        registry = publish_adapters({m.name: m.path for m in fleet}, base, home, lambda *_: None)
        router = {"num_slots": str(options.slots), "idle_s": "30", "host_bytes": "4000000"}
        with running(Prepared(base, engine, registry), router=router) as server:
            bad = 0
            for name, zipf in (("zipf", True), ("uniform", False)):
                outcome = soak(
                    server, fleet, Tokenizer(base), seconds=options.seconds, clients=options.clients, zipf=zipf
                )
                report(name, outcome, server)
                bad += len(outcome.wrong) + sum(outcome.errors.values())
            print(f"evictions {metric(server, 'lora_slots_evictions_total'):.0f}, "
                  f"binds {metric(server, 'lora_slots_promotions_total'):.0f}")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
