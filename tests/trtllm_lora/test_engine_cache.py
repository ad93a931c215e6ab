"""The engine's cache: held to the recorded traces of the real one where they are, and to its rules everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lora import CacheError, EngineCache, TaskState

TRACES = sorted(Path(__file__).parents[3].glob("shared/reference/engine-cache-traces/*.jsonl"))
SAMPLE = Path(__file__).parents[1] / "golden" / "engine-cache-trace.jsonl"


@pytest.mark.parametrize("file", [SAMPLE, *TRACES], ids=lambda file: file.stem)
def test_every_line_of_a_recorded_trace_is_reproduced(file: Path) -> None:
    """After each recorded operation, both caches are in the recorded state, with the recorded text."""
    header, *lines = (json.loads(line) for line in file.read_text().splitlines())
    pages = {int(task): entry[1] for task, entry in header["ranks"].items()}
    host, device = EngineCache(header["host_pages"]), EngineCache(header["device_pages"])
    for number, (operation, task, *wanted) in enumerate(lines, 2):
        result = attempt(operation, task, pages, host, device)
        assert [result, letters(host, len(pages)), letters(device, len(pages))] == wanted, f"line {number}"


def attempt(operation: str, task: int, pages: dict[int, int], host: EngineCache, device: EngineCache) -> str:
    """Do one recorded operation; "ok" or the error's text."""
    do: dict[str, Callable[[], object]] = {
        "put": lambda: host.put(task, pages[task]),
        "done": lambda: host.mark_done(task),
        "bump": lambda: host.bump(task),
        "copy": lambda: host.copy_to(device, task),
        "device_done": lambda: device.mark_done(task),
    }
    try:
        do[operation]()
    except CacheError as error:
        return str(error)
    return "ok"


def letters(cache: EngineCache, tasks: int) -> str:
    """The state as the traces write it."""
    return "".join(cache.state(task).value for task in range(1, tasks + 1))


operations = st.lists(st.tuples(st.sampled_from(["put", "done", "bump"]), st.integers(1, 8)), max_size=80)


@given(st.integers(1, 12), st.lists(st.integers(1, 4), min_size=8, max_size=8), operations)
def test_pages_are_never_lost_or_overdrawn(size: int, sizes: list[int], todo: list[tuple[str, int]]) -> None:
    """Free pages and the pages of resident tasks always add up; `victims` foretells what `put` evicts."""
    cache = EngineCache(size)
    for operation, task in todo:
        if operation == "put" and task not in cache:
            foretold = cache.victims(sizes[task - 1])
            try:
                assert cache.put(task, sizes[task - 1]) == foretold
            except CacheError:
                assert foretold is None
        else:
            attempt(operation, task, dict(enumerate(sizes, 1)), cache, EngineCache(99))
        assert cache.free_pages + sum(cache.pages_of(task) for task in cache.resident()) == size
        assert cache.free_pages >= 0


def test_the_victim_is_the_least_recently_finished() -> None:
    """Order of puts is irrelevant: whoever was marked done first goes first (loraCache.cpp)."""
    cache = EngineCache(3)
    for task in (1, 2, 3):
        cache.put(task, 1)
    for task in (2, 3, 1):
        cache.mark_done(task)
    assert cache.put(4, 1) == (2,)
    assert cache.eviction_order() == (3, 1)


def test_a_put_that_cannot_fit_evicts_every_done_task_first() -> None:
    """The runtime's shadowed iterator: all idle tasks are lost, then the put fails, and the pages stay free."""
    cache = EngineCache(4)
    for task in (1, 2, 3):
        cache.put(task, 1)
    cache.mark_done(1)
    cache.mark_done(3)
    with pytest.raises(CacheError, match=r"pageIds\.has_value\(\)") as caught:
        cache.put(4, 4)
    assert caught.value.evicted == (1, 3)
    assert cache.free_pages == 3
    assert cache.state(2) is TaskState.IN_PROGRESS


def test_put_of_a_resident_task_is_a_bump() -> None:
    """The runtime ignores new weights under a known id."""
    cache = EngineCache(2)
    cache.put(1, 1)
    cache.mark_done(1)
    assert cache.put(1, 2) == ()
    assert cache.state(1) is TaskState.IN_PROGRESS
    assert cache.pages_of(1) == 1
