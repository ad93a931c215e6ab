"""HOST -> SLOT of a large adapter: how long a bind takes, and what it does to streams that run meanwhile.

    python bench/bind.py [--rounds 9]

Two rank-64 adapters on all modules of SmolLM2-135M (114 MB each, padding included) take turns in the one slot of a real
Triton whose engine can hold one of them, so every bind carries all bytes. Printed: the bind's median against one memcpy
of the same bytes in the same run (goal <= 3; a bind ends with one generated token), and the gaps between the tokens of
a base stream, p50 and p99, with and without binds beside it (goal < 10 % more).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from adapter_slots.registry import publish
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.store import cache_folder
from lora_slots.client import Client
from lora_slots.embedded import Prepared, ensure_engine, running
from lora_slots.stack import TritonServer
from trtllm_lora import (
    LLAMA_MODULES,
    MODULES,
    Bundle,
    BundleFacts,
    CacheGeometry,
    EngineShape,
    Row,
    dims,
    pack,
    write_bundle,
)

PROMPT = "Once upon a time"


def large_bundle(engine: Path, parent: Path, seed: int) -> Bundle:
    """A rank-64 adapter of random weights on every module."""
    shape = EngineShape.from_engine_config(engine)
    chance = np.random.default_rng(seed)
    rows = []
    for layer in range(shape.num_layers):
        for name in LLAMA_MODULES:
            d_in, d_out = dims(name, shape)
            a = chance.standard_normal((64, d_in), dtype=np.float32) * np.float32(1e-3)
            b = chance.standard_normal((d_out, 64), dtype=np.float32) * np.float32(1e-3)
            rows.append(Row(MODULES[name].id, layer, a, b))
    weights, config = pack(rows, "float32")
    return write_bundle(parent, weights, config, BundleFacts(f"large-{seed}", "float32"))


class Stream:
    """A base stream that measures the gaps between its tokens."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.gaps_ms: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with Client(self._url) as client:
            while not self._stop.is_set():
                last = None
                for _ in client.stream(PROMPT, max_tokens=400, end_id=-1):
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps_ms.append((now - last) * 1e3)
                    last = now
                    if self._stop.is_set():
                        break

    def end(self) -> tuple[float, float]:
        """p50 and p99 of the gaps, in milliseconds."""
        self._stop.set()
        self._thread.join()
        return statistics.median(self.gaps_ms), statistics.quantiles(self.gaps_ms, n=100)[98]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    base = ensure_base_model()
    engine = ensure_engine(base, cache_folder(None) / "engines", lambda *_: None)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        bundles = [large_bundle(engine, home / "bundles", seed) for seed in (1, 2)]
        for bundle in bundles:
            publish(home / "adapters.yaml", bundle)
        geometry = CacheGeometry.of(EngineShape.from_engine_config(engine))
        pages = geometry.max_pages_for(bundles[0].config()[0].tolist())
        # the engine holds one of the two: each bind sends all bytes, whatever was there before
        cache = {
            "lora_cache_host_memory_bytes": str(
                max(pages * geometry.page_bytes, geometry.min_slots * geometry.slot_bytes)
            )
        }
        router = {"num_slots": "1", "min_residency_s": "0", "verify_s": "1000"}
        with running(Prepared(base, engine, home / "adapters.yaml"), router=router, engine=cache) as server:
            measure(server, np.array(bundles[0].weights()), options.rounds)


def measure(server: TritonServer, source: np.ndarray[Any, Any], rounds: int) -> None:
    """Binds against copies of the same bytes, then a stream alone and a stream beside binds."""
    target = np.empty_like(source)
    with Client(server.grpc_url) as client:

        def bind(i: int) -> float:
            name = f"large-{1 + i % 2}"
            client.operate("warm", adapter=name)
            return float(client.operate("explain", adapter=name)["last_load_s"]["SLOT"]) * 1e3

        for i in range(4):
            bind(i)
        binds, copies = [], []
        for i in range(rounds):
            began = time.perf_counter()
            np.copyto(target, source)
            copies.append((time.perf_counter() - began) * 1e3)
            binds.append(bind(i))
        copy, median = statistics.median(copies), statistics.median(binds)
        print(f"{source.nbytes / 1e6:.0f} MB: bind {median:.1f} ms, memcpy {copy:.1f} ms, ratio {median / copy:.1f}")
        for label, busy in (("alone", False), ("with a bind a second", True), ("alone", False)):
            stream, until = Stream(server.grpc_url), time.monotonic() + 10
            while time.monotonic() < until:
                if busy:
                    bind(rounds := rounds + 1)
                time.sleep(1)  # the rate of binds is what is being set here
            p50, p99 = stream.end()
            print(f"stream {label}: gap p50 {p50:.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    main()
