"""HOST -> SLOT of a large adapter: how long a bind takes, and what it does to streams that run meanwhile.

    python bench/bind.py [--rounds 9]

A rank-64 adapter on all modules of SmolLM2-135M (78 MB of float32) goes from shared memory into the engine's cache of a
real Triton again and again, while a base stream runs. Printed: the bind's median against one memcpy of the same bytes in
the same run (goal <= 3), and the stream's gap between tokens, p50 and p99, with and without binds (goal < 10 % more).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from adapter_slots.registry import publish
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.store import cache_folder
from lora_slots.client import Client
from lora_slots.embedded import Prepared, ensure_engine, running
from trtllm_lora import LLAMA_MODULES, MODULES, Bundle, BundleFacts, EngineShape, Row, dims, pack, write_bundle

PROMPT = "Once upon a time"


def large_bundle(engine: Path, parent: Path) -> Bundle:
    """A rank-64 adapter of random weights on every module."""
    shape = EngineShape.from_engine_config(engine)
    chance = np.random.default_rng(1)
    rows = []
    for layer in range(shape.num_layers):
        for name in LLAMA_MODULES:
            d_in, d_out = dims(name, shape)
            a = chance.standard_normal((64, d_in), dtype=np.float32) * np.float32(1e-3)
            b = chance.standard_normal((d_out, 64), dtype=np.float32) * np.float32(1e-3)
            rows.append(Row(MODULES[name].id, layer, a, b))
    weights, config = pack(rows, "float32")
    return write_bundle(parent, weights, config, BundleFacts("large", "float32"))


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
                for _ in client.generate(PROMPT, max_tokens=400, end_id=-1):
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
        bundle = large_bundle(engine, home / "bundles")
        publish(home / "adapters.yaml", bundle)
        source = np.array(bundle.weights())
        target = np.empty_like(source)
        with running(Prepared(base, engine, home / "adapters.yaml")) as server, Client(server.grpc_url) as client:
            client.operate("warm", adapter="large")
            binds, copies = [], []
            for _ in range(options.rounds):
                began = time.perf_counter()
                np.copyto(target, source)
                copies.append((time.perf_counter() - began) * 1e3)
                server.reload("tensorrt_llm")  # only then the engine takes the bytes again
                client.operate("missed", adapter="large")
                client.operate("warm", adapter="large")
                binds.append(client.operate("explain", adapter="large")["last_load_s"]["SLOT"] * 1e3)
            copy, bind = statistics.median(copies), statistics.median(binds)
            print(f"{source.nbytes / 1e6:.0f} MB: bind {bind:.1f} ms, memcpy {copy:.1f} ms, ratio {bind / copy:.1f}")
            quiet = Stream(server.grpc_url)
            time.sleep(10)
            p50, p99 = quiet.end()
            print(f"stream alone: gap p50 {p50:.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    main()
