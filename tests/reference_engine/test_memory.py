"""Memory: nothing grows with the number of requests, and weights are held once."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_lora import CacheGeometry

REQUESTS = 10_000
WARM_UP = 6_000
"""After so many every shape of a step has come by; the runtime keeps a compiled kernel for each (about 60 MiB)."""


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def test_ten_thousand_requests_leave_no_growth(serve: Any, make_adapter: Any, shape: Any) -> None:
    """After a warm-up, requests with and without adapters, hits, misses and evictions, leave less than 1.6 KiB each."""
    client = serve(max_rank=8, host_bytes=4 * CacheGeometry.of(shape).page_bytes)
    adapters = [make_adapter(seed) for seed in range(8)]
    rng = np.random.default_rng(1)

    def some(count: int) -> None:
        for begin in range(0, count, 50):
            asked = []
            for n in range(begin, begin + 50):
                prompt = rng.integers(3, 256, int(rng.integers(1, 60))).tolist()
                task = None if n % 3 == 0 else n % 8 + 1
                given = adapters[n % 8] if n % 3 == 1 else None
                asked.append(client.ask(prompt, 2, task=task, adapter=given))
            for request in asked:
                request.answer()

    some(WARM_UP)
    gc.collect()
    before, threads = _resident(), threading.active_count()
    some(REQUESTS)
    gc.collect()
    assert _resident() - before < 16 * 2**20
    assert threading.active_count() == threads
