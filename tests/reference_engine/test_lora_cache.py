"""The LoRA cache as a client meets it: stored once, evicted in the runtime's order, refused with its texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_engine import StartupRefused
from trtllm_lora import CacheGeometry

PROMPT = [5, 6, 7, 8]
MISS = "LoRA task {} not found in cache. Please send LoRA weights with request"
FETCHING = "Encountered an error when fetching new request: "


def _prefix(number: int) -> str:
    return f"Executor failed process requestId {number} due to the following error: "


@pytest.fixture
def page_bytes(shape: Any) -> int:
    """Bytes of one cache page of the tiny engine with default adapter sizes."""
    return CacheGeometry.of(shape).page_bytes


def test_miss_is_told_with_the_executors_number(client: Any) -> None:
    """An unknown id alone is a miss, unprefixed by the executor, numbered by the backend."""
    client.tokens(PROMPT, 2)
    assert _prefix(2) + MISS.format(77) == client.ask(PROMPT, 2, task=77).answer().error


def test_id_alone_is_served_once_weights_were_pushed(client: Any, make_adapter: Any) -> None:
    """Weights come once; later requests name the id only."""
    first = client.tokens(PROMPT, 8, task=1, adapter=make_adapter(1))
    assert first == client.tokens(PROMPT, 8, task=1)
    assert first != client.tokens(PROMPT, 8)


def test_put_of_a_resident_id_ignores_the_weights(client: Any, make_adapter: Any) -> None:
    """New weights under a known id change nothing."""
    first = client.tokens(PROMPT, 8, task=1, adapter=make_adapter(1))
    assert first == client.tokens(PROMPT, 8, task=1, adapter=make_adapter(2))


def test_an_evicted_id_pushed_again_is_the_new_adapter(serve: Any, page_bytes: int, make_adapter: Any) -> None:
    """After an eviction the id takes the new weights, also in the step's stack."""
    client = serve(host_bytes=2 * page_bytes)
    old = client.tokens(PROMPT, 8, task=1, adapter=make_adapter(1))
    for task in (2, 3):
        client.tokens(PROMPT, 2, task=task, adapter=make_adapter(task))
    assert MISS.format(1) in client.ask(PROMPT, 2, task=1).answer().error
    new = client.tokens(PROMPT, 8, task=1, adapter=make_adapter(9))
    alone = serve().tokens(PROMPT, 8, task=1, adapter=make_adapter(9))
    assert old != new
    assert alone == new


def test_victim_is_the_least_recently_finished(serve: Any, page_bytes: int, make_adapter: Any) -> None:
    """Using an adapter again saves it; the order of puts does not count."""
    client = serve(host_bytes=3 * page_bytes)
    for task in (1, 2, 3):
        client.tokens(PROMPT, 2, task=task, adapter=make_adapter(task))
    client.tokens(PROMPT, 2, task=1)
    client.tokens(PROMPT, 2, task=4, adapter=make_adapter(4))
    assert client.ask(PROMPT, 2, task=1).answer().error is None
    assert MISS.format(2) in client.ask(PROMPT, 2, task=2).answer().error


def test_full_of_busy_adapters_refuses_and_disturbs_nobody(serve: Any, page_bytes: int, make_adapter: Any) -> None:
    """No done task: the runtime's sliced text; the running request goes on, and room is there once it ended."""
    client = serve(host_bytes=page_bytes, max_rank=8)
    alone = client.tokens(PROMPT, 200, task=1, adapter=make_adapter(1))
    running = client.ask(PROMPT, 200, task=1)
    refused = client.ask(PROMPT, 2, task=2, adapter=make_adapter(2)).answer().error
    text = f"{FETCHING}Error storing task=2 in PEFT cache -- Cache is full. There are no done tasks to evict ("
    assert refused.startswith(_prefix(3) + text)
    assert alone == running.answer().tokens
    assert client.ask(PROMPT, 2, task=2, adapter=make_adapter(2)).answer().error is None


def test_too_large_a_put_evicts_all_idle_and_fails(serve: Any, page_bytes: int, make_adapter: Any) -> None:
    """Some evictable, not enough: every idle adapter is gone and the put is refused all the same."""
    client = serve(host_bytes=2 * page_bytes)
    client.tokens(PROMPT, 2, task=1, adapter=make_adapter(1))
    running = client.ask(PROMPT, 200, task=2, adapter=make_adapter(2))
    refused = client.ask(PROMPT, 2, task=3, adapter=make_adapter(3, rank=16)).answer().error
    text = (
        f"{FETCHING}Error storing task=3 in PEFT cache -- [TensorRT-LLM][ERROR] Assertion failed: pageIds.has_value() ("
    )
    assert text in refused
    assert MISS.format(1) in client.ask(PROMPT, 2, task=1).answer().error
    assert running.answer().error is None


def test_a_waiting_request_already_holds_its_adapter(serve: Any, page_bytes: int, make_adapter: Any) -> None:
    """A task is in progress from the moment its request is fetched, not from the moment it runs."""
    client = serve(host_bytes=page_bytes, max_rank=8, max_kv_tokens=256)
    client.tokens(PROMPT, 2, task=1, adapter=make_adapter(1))
    running, waiting = client.ask(PROMPT, 250), client.ask(PROMPT, 250, task=1)
    assert "no done tasks to evict" in client.ask(PROMPT, 2, task=2, adapter=make_adapter(2)).answer().error
    assert [running.answer().error, waiting.answer().error] == [None, None]


def test_weights_without_an_id_are_ignored(client: Any, make_adapter: Any) -> None:
    """The C++ backend reads the pair only beside an id: the base answers."""
    assert client.tokens(PROMPT, 8) == client.tokens(PROMPT, 8, adapter=make_adapter(1))


def test_requests_wait_for_device_pages(serve: Any, make_adapter: Any, shape: Any) -> None:
    """More adapters than the device holds are answered in turn, and others pass the one that waits."""
    client = serve(device_fraction=_fraction_for(2, shape))
    adapters = {task: make_adapter(task, rank=8) for task in (1, 2, 3, 4)}
    alone = {task: client.tokens(PROMPT, 20, task=task, adapter=adapters[task]) for task in adapters}
    asked = {task: client.ask(PROMPT, 20, task=task) for task in adapters}
    assert alone == {task: request.answer().tokens for task, request in asked.items()}


def _fraction_for(pages: int, shape: Any) -> float:
    import os

    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages * CacheGeometry.of(shape).page_bytes / free


CHECKS: dict[str, tuple[Any, str, str]] = {
    "config only": (
        lambda _, c: (None, c),
        FETCHING,
        "Request for LoRA inference must have both lora_weights and lora_keys",
    ),
    "weights only": (
        lambda w, _: (w, None),
        "",
        "Request for LoRA inference with lora weights must also have lora config",
    ),
    "row counts": (
        lambda w, c: (w[:, 1:], c),
        "",
        "Expected dim 0 of lora weights and lora config to have the same size",
    ),
    "columns": (
        lambda w, c: (w, np.concatenate([c, c], axis=2)),
        FETCHING,
        "Expected dim2 of lora_keys to have a size in [3, 4]",
    ),
    "dtype": (
        lambda w, c: (w.astype(np.float16), c),
        FETCHING,
        "Expected lora weights to be the same data type as base model",
    ),
    "layer": (
        lambda w, c: (w, c + np.array([0, 2, 0], np.int32)),
        FETCHING,
        "Expected layerId to be in the range [0, numModelLayers)",
    ),
    "rank 0": (lambda w, c: (w, c * np.array([1, 1, 0], np.int32)), FETCHING, "Expected adapterSize to be > 0"),
    "module": (
        lambda w, c: (w, c * np.array([0, 1, 1], np.int32)),
        FETCHING,
        "lora module attn_qkv not enabled for this model",
    ),
    "unknown module": (
        lambda w, c: (w, c + np.array([90, 0, 0], np.int32)),
        FETCHING,
        "lora module INVALID not enabled for this model",
    ),
    "width": (lambda w, c: (w[:, :, :300], c), FETCHING, "lora_weights has to few values for attn_q"),
    "rank too large": (
        lambda w, c: (np.pad(w, ((0, 0), (0, 0), (0, 9000))), c + np.array([0, 0, 13], np.int32)),
        FETCHING,
        "Invalid low_rank (17). low_rank must be smaller than mMaxLowRank (16)",
    ),
}


@pytest.mark.parametrize("case", CHECKS)
def test_malformed_adapters_are_refused_with_the_runtimes_text(case: str, client: Any, make_adapter: Any) -> None:
    """Every check of the runtime, with its text, its wrapping, and nothing stored."""
    change, wrapping, text = CHECKS[case]
    weights, config = change(*make_adapter(1))
    given = {name: value for name, value in (("lora_weights", weights), ("lora_config", config)) if value is not None}
    error = client.ask(PROMPT, 2, task=1, **given).answer().error
    prefix = _prefix(1) + wrapping if wrapping else ""
    assert error.startswith(f"{prefix}[TensorRT-LLM][ERROR] Assertion failed: {text} (")
    assert MISS.format(1) in client.ask(PROMPT, 2, task=1).answer().error


def test_rank_equal_to_the_maximum_is_accepted(client: Any, make_adapter: Any) -> None:
    """`must be smaller than` says the text; equal passes."""
    assert client.ask(PROMPT, 2, task=1, adapter=make_adapter(1, rank=16)).answer().error is None


def test_start_is_refused_when_one_adapter_does_not_fit(serve: Any, shape: Any) -> None:
    """The runtime's start-up texts for both caches."""
    slots = CacheGeometry.of(shape).min_slots
    text = f"Not enough space allocated to {{}} LoRA cache to hold 1 max sized LoRA {{}} < {slots}"
    small = (slots - 1) * CacheGeometry.of(shape).slot_bytes
    with pytest.raises(StartupRefused, match="^" + text.format("host", slots - 1)):
        serve(host_bytes=small)
    with pytest.raises(StartupRefused, match="^" + text.format("device", 0)):
        serve(device_fraction=1e-12)


def _write(folder: Path, adapter: tuple[Any, Any]) -> None:
    folder.mkdir()
    np.save(folder / "model.lora_weights.npy", adapter[0])
    np.save(folder / "model.lora_config.npy", adapter[1])


def test_prefetched_adapters_are_there_and_pinned_until_used(
    serve: Any, tmp_path: Path, page_bytes: int, make_adapter: Any
) -> None:
    """All-digit folders are loaded; others are passed over; nothing prefetched is evicted before its first request."""
    for name, seed in (("7", 7), ("8", 8), ("notes", 1)):
        _write(tmp_path / name, make_adapter(seed))
    client = serve(prefetch_dir=tmp_path, host_bytes=2 * page_bytes)
    assert "no done tasks" in client.ask(PROMPT, 2, task=9, adapter=make_adapter(9)).answer().error
    assert client.tokens(PROMPT, 8, task=7) == serve().tokens(PROMPT, 8, task=7, adapter=make_adapter(7))
    assert client.ask(PROMPT, 2, task=9, adapter=make_adapter(9)).answer().error is None
    assert MISS.format(7) in client.ask(PROMPT, 2, task=7).answer().error


def test_prefetch_refuses_what_the_runtime_cannot_read(serve: Any, tmp_path: Path, make_adapter: Any) -> None:
    """bfloat16 files, ids beyond int32, too many adapters: the start fails and says why."""
    weights, config = make_adapter(1)
    _write(tmp_path / "1", (weights.astype(np.float16).view("V2"), config))
    with pytest.raises(StartupRefused, match=r"numpy data type 'V2' not supported"):
        serve(prefetch_dir=tmp_path)
    (tmp_path / "1").rename(tmp_path / str(2**31))
    with pytest.raises(StartupRefused, match="out of range"):
        serve(prefetch_dir=tmp_path)
