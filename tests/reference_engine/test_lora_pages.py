"""Pages are used again, and yet every adapter in the cache has its own numbers."""

from __future__ import annotations

import threading
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from reference_engine.lora_pages import PageStore
from reference_engine.lora_store import LoraStore
from trtllm_lora import MODULES, CacheGeometry, EngineShape, Row, dims, pack

SHAPE = EngineShape.from_hf_config(
    {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
    },
    dtype="float32",
    lora_modules=("attn_q", "mlp_h_to_4h"),
    max_lora_rank=8,
)
GEOMETRY = CacheGeometry.of(SHAPE, optimal_rank=2, max_rank=8)
CACHE_PAGES = 6


def _adapter(seed: int) -> tuple[Any, Any, list[Row]]:
    rng = np.random.default_rng(seed)
    rows = []
    for layer in range(2):
        for name in SHAPE.lora_modules:
            rank, (d_in, d_out) = int(rng.integers(1, 9)), dims(name, SHAPE)
            a, b = rng.standard_normal((rank, d_in), np.float32), rng.standard_normal((d_out, rank), np.float32)
            magnitude = rng.standard_normal(d_out).astype(np.float32) if seed % 3 == 0 else None
            rows.append(Row(MODULES[name].id, layer, a, b, magnitude))
    weights, config = pack(rows, "float32")
    return weights[0], config[0], rows


def _same(found: tuple[Row, ...], wanted: list[Row]) -> bool:
    return all(
        np.array_equal(f.a_RI, w.a_RI)
        and np.array_equal(f.b_OR, w.b_OR)
        and np.array_equal(_magnitude(f), _magnitude(w))
        for f, w in zip(found, wanted, strict=True)
    )


def _magnitude(row: Row) -> Any:
    return np.zeros(0) if row.magnitude_O is None else row.magnitude_O


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=40))
def test_every_resident_adapter_has_its_own_rows(uses: list[tuple[int, bool]]) -> None:
    """Adapters come (staged or not) and are evicted in any order: what is resident reads as it was pushed."""
    store, resident = LoraStore(GEOMETRY, CACHE_PAGES, CACHE_PAGES), dict[int, list[Row]]()
    for seed, staged in uses:
        weights, config, rows = _adapter(seed)
        store.admit(seed, weights, config, store.stage(seed, weights, config) if staged else None)
        store.release(seed)
        resident[seed] = rows
        resident = {task: rows for task, rows in resident.items() if task in store.host}
        for task, wanted in resident.items():
            assert _same(store.rows(task), wanted)


def test_kept_memory_is_bounded_and_used_again() -> None:
    """As many as the cache has free, and one largest adapter's; what fits them takes no new memory."""
    pages = PageStore(GEOMETRY)
    weights, config, rows = _adapter(3)
    stored = [pages.store(weights, config) for _ in range(20)]
    known = {page.ctypes.data for one in stored for page in one.pages}
    for one in stored:
        pages.give_back(one, free_pages=CACHE_PAGES)
    spare = -(-GEOMETRY.min_slots // GEOMETRY.slots_per_page)
    again = [pages.store(weights, config) for _ in range(20)]
    assert sum(page.ctypes.data in known for one in again for page in one.pages) >= CACHE_PAGES + spare
    assert len(pages._free) == 0
    for one in again:
        pages.give_back(one, free_pages=CACHE_PAGES)
    assert len(pages._free) == CACHE_PAGES + spare
    assert _same(again[0].rows, rows)


def test_many_threads_stage_without_sharing_a_page() -> None:
    """Two adapters that are copied at the same time are copied into different pages."""
    store = LoraStore(GEOMETRY, CACHE_PAGES, CACHE_PAGES)
    adapters = {seed: _adapter(seed) for seed in range(1, 9)}
    wrong: list[int] = []

    def stage(seed: int) -> None:
        weights, config, rows = adapters[seed]
        for _ in range(50):
            staged = store.stage(seed, weights, config)
            assert staged is not None
            if not _same(staged.rows, rows):
                wrong.append(seed)
            store._give_back(staged)

    threads = [threading.Thread(target=stage, args=(seed,)) for seed in adapters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_the_loop_will_refuse_is_not_staged() -> None:
    """A wrong dtype or a rank beyond the engine's: the refusal is the loop's, with its text and in its turn."""
    store = LoraStore(GEOMETRY, CACHE_PAGES, CACHE_PAGES)
    weights, config, _ = _adapter(1)
    assert store.stage(1, weights.astype(np.float16), config) is None
    assert store.stage(1, weights, config + np.array([0, 0, 50], np.int32)) is None
    store.admit(1, weights, config)
    assert store.stage(1, weights, config) is None, "it is resident: its weights are ignored"
