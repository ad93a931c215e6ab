"""LoRA: push, use, miss, refuse, evict."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trtllm_lora import CacheGeometry, EngineCache

pytestmark = pytest.mark.triton

N = 8
MISS = "LoRA task {} not found in cache. Please send LoRA weights with request"
Adapter = dict[str, Any]


def test_miss(server: Any, prompt: list[int], new_task: Any) -> None:
    """Rule: an unknown id alone is a miss, told unprefixed by the executor."""
    task = new_task()
    error = server.answer(prompt, 1, lora_task_id=task).error
    assert re.search(
        r"Executor failed process requestId \d+ due to the following error: " + re.escape(MISS.format(task)) + "$",
        error,
    )


def test_pushed_weights_change_the_answer(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: what was pushed is used."""
    assert server.tokens(prompt, N, lora_task_id=new_task(), **make_adapter(1)) != server.tokens(prompt, N)


def test_id_alone_after_a_push(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: weights are sent once."""
    task = new_task()
    pushed = server.tokens(prompt, N, lora_task_id=task, **make_adapter(1))
    assert server.tokens(prompt, N, lora_task_id=task) == pushed


def test_base_is_untouched(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: no id, no adapter."""
    before = server.tokens(prompt, N)
    server.tokens(prompt, N, lora_task_id=new_task(), **make_adapter(1))
    assert server.tokens(prompt, N) == before


def test_resident_id_ignores_weights(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: put of a resident id keeps the old weights."""
    task = new_task()
    pushed = server.tokens(prompt, N, lora_task_id=task, **make_adapter(1))
    assert server.tokens(prompt, N, lora_task_id=task, **make_adapter(2)) == pushed


def test_same_weights_under_two_ids(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: the id names, the weights decide."""
    answers = [server.tokens(prompt, N, lora_task_id=new_task(), **make_adapter(3)) for _ in range(2)]
    assert answers[0] == answers[1]


def test_weights_without_an_id(server: Any, prompt: list[int], make_adapter: Any) -> None:
    """Rule: the pair counts only beside lora_task_id; the base answers."""
    assert server.tokens(prompt, N, **make_adapter(1)) == server.tokens(prompt, N)


def test_zero_adapter_is_the_base(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: an adapter of zeros adds nothing."""
    assert server.tokens(prompt, N, lora_task_id=new_task(), **make_adapter(1, scale=0.0)) == server.tokens(prompt, N)


def test_missing_layers_have_no_delta(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: rows that are absent leave their modules alone; no zero rows are needed."""
    last = server.shape.num_layers - 1
    some, whole = make_adapter(4, layers=[last]), make_adapter(4, layers=[last])
    zeros = make_adapter(5, scale=0.0, layers=range(last))
    whole = {name: np.concatenate([zeros[name], whole[name]], axis=1) for name in whole}
    got = server.tokens(prompt, N, lora_task_id=new_task(), **some)
    assert got == server.tokens(prompt, N, lora_task_id=new_task(), **whole)


def test_row_order_does_not_matter(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: rows are found by module and layer."""
    adapter = make_adapter(6)
    turned = {name: np.ascontiguousarray(value[:, ::-1]) for name, value in adapter.items()}
    got = server.tokens(prompt, N, lora_task_id=new_task(), **adapter)
    assert got == server.tokens(prompt, N, lora_task_id=new_task(), **turned)


def test_padding_does_not_matter(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: what stands behind a row's values is not read."""
    adapter = make_adapter(6)
    padded = adapter | {"lora_weights": np.pad(adapter["lora_weights"], ((0, 0), (0, 0), (0, 13)), constant_values=9)}
    got = server.tokens(prompt, N, lora_task_id=new_task(), **adapter)
    assert got == server.tokens(prompt, N, lora_task_id=new_task(), **padded)


def test_largest_rank(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: a rank equal to max_lora_rank is accepted, whatever the text says."""
    adapter = make_adapter(7, rank=server.shape.max_lora_rank, scale=0.05)
    assert len(server.tokens(prompt, N, lora_task_id=new_task(), **adapter)) == N


def test_adapters_and_base_in_one_batch(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: every stream gets its own adapter's tokens, however they are mixed."""
    tasks = [None, new_task(), new_task()]
    for seed, task in enumerate(tasks[1:]):
        server.tokens(prompt, 1, lora_task_id=task, **make_adapter(seed, rank=seed + 1))
    alone = [server.tokens(prompt, 20, lora_task_id=task) for task in tasks]
    asked = [server.ask(prompt, 20, lora_task_id=tasks[i % 3]) for i in range(12)]
    assert [alone[i % 3] for i in range(12)] == [request.answer().tokens for request in asked]


def test_a_miss_disturbs_nobody(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: only the request that missed fails."""
    task = new_task()
    alone = server.tokens(prompt, 40, lora_task_id=task, **make_adapter(1))
    running = server.ask(prompt, 40, lora_task_id=task)
    assert server.answer(prompt, 1, lora_task_id=new_task()).errors
    assert alone == running.answer().tokens


def _change(**columns: Callable[[Any], Any]) -> Callable[[Adapter], Adapter]:
    """Change columns of the first row of lora_config."""

    def change(adapter: Adapter) -> Adapter:
        config = adapter["lora_config"].copy()
        for index, name in enumerate(("module", "layer", "rank")):
            if name in columns:
                config[0, 0, index] = columns[name](config[0, 0, index])
        return adapter | {"lora_config": config}

    return change


MALFORMED: dict[str, tuple[Callable[[Adapter], Adapter], str]] = {
    "config only": (
        lambda a: {"lora_config": a["lora_config"]},
        "Request for LoRA inference must have both lora_weights and lora_keys",
    ),
    "weights only": (
        lambda a: {"lora_weights": a["lora_weights"]},
        "Request for LoRA inference with lora weights must also have lora config",
    ),
    "row counts": (
        lambda a: a | {"lora_weights": np.ascontiguousarray(a["lora_weights"][:, 1:])},
        "Expected dim 0 of lora weights and lora config to have the same size",
    ),
    "layer too high": (
        _change(layer=lambda _: 9999),
        "Expected layerId to be in the range [0, numModelLayers)",
    ),
    "layer below zero": (_change(layer=lambda _: -1), "Expected layerId to be in the range [0, numModelLayers)"),
    "rank zero": (_change(rank=lambda _: 0), "Expected adapterSize to be > 0"),
    "rank below zero": (_change(rank=lambda _: -4), "Expected adapterSize to be > 0"),
    "unknown module": (_change(module=lambda _: 99), "lora module INVALID not enabled for this model"),
    "module not enabled": (_change(module=lambda _: 13), "lora module moe_h_to_4h not enabled for this model"),
    "too few values": (_change(rank=lambda rank: 4 * rank), "lora_weights has to few values for"),
    "layer before rank": (
        _change(layer=lambda _: 9999, rank=lambda _: 0),
        "Expected layerId to be in the range [0, numModelLayers)",
    ),
    "rank before module": (_change(module=lambda _: 99, rank=lambda _: 0), "Expected adapterSize to be > 0"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_adapter(case: str, server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: the runtime's checks, in its order, with its texts; nothing is stored."""
    change, text = MALFORMED[case]
    task = new_task()
    assert text in server.answer(prompt, 1, lora_task_id=task, **change(make_adapter(1))).error
    assert MISS.format(task) in server.answer(prompt, 1, lora_task_id=task).error


def test_rank_beyond_the_engine(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: a rank above max_lora_rank is refused, after the values were counted."""
    largest = server.shape.max_lora_rank
    error = server.answer(prompt, 1, lora_task_id=new_task(), **make_adapter(1, rank=largest + 1)).error
    assert f"Invalid low_rank ({largest + 1}). low_rank must be smaller than mMaxLowRank ({largest})" in error


def test_refusals_are_wrapped_as_fetch_errors(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: what the executor refuses is told as an error of fetching the request."""
    error = server.answer(prompt, 1, lora_task_id=new_task(), **_change(rank=lambda _: 0)(make_adapter(1))).error
    assert "due to the following error: Encountered an error when fetching new request: [TensorRT-LLM][ERROR]" in error


# the cache ------------------------------------------------------------------------------------------------------------


class Cache:
    """What the cache of the server under test must hold, by the mirror that the slot manager uses."""

    def __init__(self, server: Any) -> None:
        def number(key: str, default: int) -> int:
            value = server.config.parameters[key].string_value
            return int(value) if value.isdigit() else default

        self.shape = server.shape
        self.geometry = CacheGeometry.of(
            self.shape,
            optimal_rank=number("lora_cache_optimal_adapter_size", 8),
            max_rank=number("lora_cache_max_adapter_size", 64),
        )
        self.pages = self.geometry.num_pages(number("lora_cache_host_memory_bytes", 2**30))

    def pages_of(self, adapter: Adapter) -> int:
        """Pages an adapter takes."""
        return self.geometry.pages_for(adapter["lora_config"][0].tolist())

    def filled(self, make_adapter: Any, pages: int) -> list[Adapter]:
        """Adapters that take so many pages together and all run at once: eight small ones at most, else large ones."""
        large, small = make_adapter(1, rank=self.shape.max_lora_rank, scale=0.05), make_adapter(1)
        if pages <= 8 * self.pages_of(small):  # a tiny engine ends one or two before anything can be done beside them
            return [small] * (pages // self.pages_of(small))
        number, rest = divmod(pages, self.pages_of(large))
        filling = [large] * number + [small] * (rest // self.pages_of(small))
        if len(filling) > self.shape.max_batch_size:
            pytest.skip(f"{pages} pages take {len(filling)} adapters, and {self.shape.max_batch_size} run at once")
        return filling


@pytest.fixture(scope="module")
def cache(server: Any) -> Cache:
    """The cache of the server under test; skipped where it is too large to fill."""
    found = Cache(server)
    if found.pages > 64:
        pytest.skip(f"the host cache has {found.pages} pages: too many to fill over the wire")
    return found


def test_eviction_order_is_the_mirrors(
    server: Any, cache: Cache, prompt: list[int], make_adapter: Any, new_task: Any
) -> None:
    """Rule: the victim is the least recently finished, page by page as the mirror says."""
    adapter = make_adapter(1)
    tasks = [new_task() for _ in range(cache.pages)]
    mirror = EngineCache(cache.pages)
    for task in tasks:
        server.tokens(prompt, 1, lora_task_id=task, **adapter)
        mirror.put(task, cache.pages_of(adapter))
        mirror.mark_done(task)
    server.tokens(prompt, 1, lora_task_id=tasks[0])
    mirror.bump(tasks[0])
    mirror.mark_done(tasks[0])
    (victim,) = mirror.victims(1) or ()
    newcomer = new_task()
    server.tokens(prompt, 1, lora_task_id=newcomer, **adapter)
    assert victim == tasks[1]
    assert MISS.format(victim) in server.answer(prompt, 1, lora_task_id=victim).error
    for task in (tasks[0], *tasks[2:], newcomer):
        assert server.answer(prompt, 1, lora_task_id=task).errors == []


def test_full_of_busy_adapters(server: Any, cache: Cache, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: nothing evictable: the sliced text, and nobody is disturbed."""
    task, room = new_task(), server.shape.max_seq_len - len(prompt)
    filling = cache.filled(make_adapter, cache.pages)

    def busy() -> list[Any]:
        return [server.ask(prompt, room, lora_task_id=new_task(), **adapter) for adapter in filling]

    put = server.while_busy(busy, lambda: server.answer(prompt, 1, lora_task_id=task, **make_adapter(1)))
    text = f"Error storing task={task} in PEFT cache -- Cache is full. There are no done tasks to evict ("
    assert f"Encountered an error when fetching new request: {text}" in put.error


def test_too_large_a_put_empties_the_cache(
    server: Any, cache: Cache, prompt: list[int], make_adapter: Any, new_task: Any
) -> None:
    """Rule: some evictable, not enough: every idle adapter is dropped, then the put fails."""
    large = make_adapter(1, rank=server.shape.max_lora_rank, scale=0.05)
    if cache.pages_of(large) < 2:
        pytest.skip("the largest adapter takes one page")
    idle, room = new_task(), server.shape.max_seq_len - len(prompt)
    filling = cache.filled(make_adapter, cache.pages - cache.pages_of(large) + 1)

    def busy() -> list[Any]:
        server.tokens(prompt, 1, lora_task_id=idle, **make_adapter(2))
        return [server.ask(prompt, room, lora_task_id=new_task(), **adapter) for adapter in filling]

    def put() -> tuple[Any, Any]:
        failed = server.answer(prompt, 1, lora_task_id=new_task(), **large)
        return failed, server.answer(prompt, 1, lora_task_id=idle)

    failed, dropped = server.while_busy(busy, put)
    assert "in PEFT cache -- [TensorRT-LLM][ERROR] Assertion failed: pageIds.has_value() (" in failed.error
    assert MISS.format(idle) in dropped.error
