"""A load by NVIDIA's `aiperf` on the gateway: chat streams of the three example adapters, round robin.

    python bench/aiperf.py [--aiperf PATH] [--requests 48] [--concurrency 6]

The embedded stack (the 135M model on the CPU) with a gateway before it, both on ports of their own; `aiperf profile`
is a client like any other. Printed are the figures that matter, out of its profile_export_aiperf.json, and how many
answers each adapter gave, out of the gateway's own log. aiperf is no dependency of ours: it is 1.2 GB and lives in an
environment of its own; where there is none this says how to make one, and ends with 0. Exit code 1: aiperf failed, or
wrote nothing that can be read. 3: requests failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes.gateways import gateway

from lora_slots import examples
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.store import cache_folder
from lora_slots.embedded import Prepared, ensure_engine, publish_adapters, running

EXPORT = "profile_export_aiperf.json"
GET = "python3 -m venv ~/aiperf && ~/aiperf/bin/pip install aiperf  (1.2 GB), then --aiperf ~/aiperf/bin/aiperf"
FIGURES = {
    "request_count": "requests answered",
    "output_token_throughput": "tokens, all streams",
    "request_throughput": "requests",
    "time_to_first_token": "first token",
    "inter_token_latency": "between tokens",
    "request_latency": "whole answer",
}
"""Metric of aiperf's -> our words."""
FAILED = 3


def command(program: str, url: str, base: Path, out: Path, requests: int, concurrency: int) -> list[str]:
    """What is run. The tokenizer is the base's own, so that nothing is fetched from a hub."""
    models = ["-m", ",".join(examples.adapters()), "--model-selection-strategy", "round_robin"]
    kind = ["--endpoint-type", "chat", "--streaming", "--url", url, "--tokenizer", str(base)]
    load = ["--concurrency", str(concurrency), "--request-count", str(requests), "--isl", "40", "--osl", "24"]
    return [program, "profile", *models, *kind, *load, "--artifact-dir", str(out), "--ui", "none"]


def errors_of(document: Mapping[str, Any]) -> int:
    """How many requests failed. aiperf leaves the metric out where none did."""
    return int((document.get("error_request_count") or {"avg": 0})["avg"])


def answered(log: Path) -> Counter[str]:
    """Adapter -> its answers, by the gateway's log."""
    entries = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if '"adapter"' in line)
    return Counter(entry["adapter"].partition("@")[0] for entry in entries if entry.get("status") == 200)


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure that is there: the median and p99 where aiperf has them, else the one value."""
    for name, words in FIGURES.items():
        found = document.get(name)
        if not found:
            continue
        values = [f"{found[key]:.1f} ({key})" for key in ("p50", "p99") if key in found] or [f"{found['avg']:.1f}"]
        yield f"{words:<20} {', '.join(values)} {found['unit']}"


def export_of(folder: Path) -> Mapping[str, Any]:
    """What aiperf wrote; it may have made a folder for the run. Raises ValueError: no such file, or no JSON."""
    found = sorted(folder.rglob(EXPORT))
    if len(found) != 1:
        raise ValueError(f"aiperf ended well but {len(found)} {EXPORT} are under {folder}; one was to be written")
    document = json.loads(found[0].read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not {"request_count", "error_request_count"} & document.keys():
        raise ValueError(f"{found[0]}: no request_count in it; this script reads what aiperf 0.13 writes")
    return document


def measure(program: str, requests: int, concurrency: int) -> int:
    """Serve, load, print; the exit code."""
    with tempfile.TemporaryDirectory() as name:
        ended, by_adapter = load(program, Path(name), requests, concurrency)
        return told(ended, Path(name) / "aiperf", by_adapter)


def load(program: str, home: Path, requests: int, concurrency: int) -> tuple[int, Counter[str]]:
    """Serve, and let aiperf ask; its exit code, and the answers of each adapter. It writes into `home`/aiperf."""
    base = ensure_base_model()
    engine = ensure_engine(base, cache_folder(None) / "engines", lambda *_: None)
    registry = publish_adapters(examples.adapters(), base, home, lambda *_: None)
    with running(Prepared(base, engine, registry)) as server, gateway(server.grpc_url, home / "log") as door:
        words = command(program, door.url, base, home / "aiperf", requests, concurrency)
        # its own environment: nothing of ours on its path
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(words, cwd=home, env=clean, stdout=sys.stderr, check=False).returncode
        return ended, answered(door.log)


def told(ended: int, folder: Path, by_adapter: Mapping[str, int]) -> int:
    """Print what aiperf wrote into `folder`, or how it failed; our exit code."""
    if ended:
        print(f"aiperf ended with {ended}; its own words are above", file=sys.stderr)
        return 1
    try:
        document = export_of(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"aiperf {document.get('aiperf_version', '(no version said)')}, load {os.getloadavg()[0]:.1f}")
    print("\n".join(lines(document)))
    print(f"{'answers of each':<20} {', '.join(f'{name} {by_adapter[name]}' for name in examples.adapters())}")
    failed = errors_of(document)
    print(f"{'requests failed':<20} {failed}")
    return FAILED if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or say how aiperf is to be had; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", metavar="PATH", help="the program; default: aiperf on PATH")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=6)
    options = parser.parse_args(arguments)
    program = shutil.which(options.aiperf or "aiperf")
    if program is None and options.aiperf:
        parser.error(f"--aiperf {options.aiperf}: no such program")
    if program is None:
        print(f"skipped: no aiperf on PATH; to get it: {GET}")
        return 0
    return measure(program, options.requests, options.concurrency)


if __name__ == "__main__":
    sys.exit(main())
