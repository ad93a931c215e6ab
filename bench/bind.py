"""HOST -> SLOT of a large adapter: how long a bind takes, and what it does to streams that run meanwhile.

    python bench/bind.py [--rounds 15] [--seconds 20]

Two rank-64 adapters on all modules of SmolLM2-135M (114 MB each, 78 without padding) take turns in the one slot of a
real Triton whose engine can hold one of them, so every bind carries all bytes. Printed, from one run and taking turns:
one memcpy of the same bytes, the bind, and a touch: a bind ends with one generated token, and so does a touch, which
carries no bytes. Goal: bind <= 3 memcpy. Then the gaps between the tokens of a base stream, p50 and p99, without and
with a bind a second beside it, in turns (goal < 10 % more); and a way from DISK beside reading the files (goal 1.2).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from adapter_slots import host
from adapter_slots.engine import TritonEngine
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

    def end(self) -> None:
        """Stop streaming."""
        self._stop.set()
        self._thread.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20, help="of stream, without binds and with them each")
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
        prepared = Prepared(base, engine, home / "adapters.yaml")
        with running(prepared, router=router, engine=cache) as server:
            measure(server, np.array(bundles[0].weights()), [b.task_id for b in bundles], options.rounds)
            beside_a_stream(server, options.seconds)
        one = str(host.region_bytes(bundles[0]))  # HOST holds one of the two: each bind comes from DISK
        with running(prepared, router={**router, "host_bytes": one}, engine=cache) as server:
            from_disk(server, bundles, options.rounds)


def from_disk(server: TritonServer, bundles: list[Bundle], rounds: int) -> None:
    """DISK -> HOST -> SLOT beside reading the same files, from the page cache; every byte was checked before."""
    times: dict[str, list[float]] = {"read": [], "HOST": [], "SLOT": []}
    with Client(server.grpc_url) as client:
        for i in range(rounds + 4):
            bundle, began = bundles[i % 2], time.perf_counter()
            for file in bundle.path.iterdir():
                file.read_bytes()
            times["read"].append((time.perf_counter() - began) * 1e3)
            client.operate("warm", adapter=bundle.adapter)
            loaded = client.operate("explain", adapter=bundle.adapter)["last_load_s"]
            for tier in ("HOST", "SLOT"):
                times[tier].append(float(loaded[tier]) * 1e3)
    read, to_host, to_slot = (statistics.median(found[4:]) for found in times.values())
    print(
        f"DISK -> SLOT: to HOST {to_host:.1f} ms, to SLOT {to_slot:.1f} ms, read() of the same files {read:.1f} ms; "
        f"{(to_host + to_slot) / read:.1f} times as long, to HOST alone {to_host / read:.1f}"
    )


def bind_ms(client: Client, i: int) -> float:
    """Bind one of the two adapters, by turns."""
    name = f"large-{1 + i % 2}"
    client.operate("warm", adapter=name)
    return float(client.operate("explain", adapter=name)["last_load_s"]["SLOT"]) * 1e3


def measure(server: TritonServer, source: np.ndarray[Any, Any], tasks: list[int], rounds: int) -> None:
    """Binds, touches and copies of the same bytes, by turns."""
    target = np.empty_like(source)
    times: dict[str, list[float]] = {"memcpy": [], "bind": [], "touch": []}
    with Client(server.grpc_url) as client, asyncio.Runner() as loop:
        engine = TritonEngine(server.grpc_url)
        for i in range(rounds + 4):
            began = time.perf_counter()
            np.copyto(target, source)
            copied = time.perf_counter()
            bind = bind_ms(client, i)
            touched = time.perf_counter()
            loop.run(engine.touch(tasks[i % 2]))
            if i >= 4:
                times["memcpy"].append((copied - began) * 1e3)
                times["bind"].append(bind)
                times["touch"].append((time.perf_counter() - touched) * 1e3)
        loop.run(engine.close())
    print(f"load {os.getloadavg()[0]:.1f}; {source.nbytes / 1e6:.0f} MB, {rounds} rounds")
    for how, of in (("median", statistics.median), ("least", min)):
        copy, bind, touch = (of(times[name]) for name in times)
        print(
            f"{how}: memcpy {copy:.1f} ms, bind {bind:.1f} ms, touch {touch:.1f} ms; bind is {bind / copy:.1f} memcpy, "
            f"without the token {(bind - touch) / copy:.1f}"
        )


def beside_a_stream(server: TritonServer, seconds: float) -> None:
    """A stream alone and a stream beside binds, by turns of two seconds."""
    gaps: dict[bool, list[float]] = {False: [], True: []}
    with Client(server.grpc_url) as client:
        stream, count, binds = Stream(server.grpc_url), 0, 0
        until = time.monotonic() + 2 * seconds
        while time.monotonic() < until:
            busy = bool(count % 2)
            stream.gaps_ms.clear()
            end = time.monotonic() + 2
            while time.monotonic() < end:
                if busy:
                    binds += 1
                    bind_ms(client, binds)
                time.sleep(max(0.0, min(1.0, end - time.monotonic())))  # the rate of binds is what is being set here
            gaps[busy] += stream.gaps_ms
            count += 1
        stream.end()
    for busy, found in gaps.items():
        label = "with a bind a second" if busy else "alone"
        p99 = statistics.quantiles(found, n=100)[98]
        print(f"stream {label}: gap p50 {statistics.median(found):.1f} ms, p99 {p99:.1f} ms ({len(found)} tokens)")
    alone, beside = (statistics.quantiles(gaps[busy], n=100)[98] for busy in (False, True))
    print(f"p99 {100 * (beside / alone - 1):+.0f} %; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
