"""Twelve adapters through four slots of a real engine whose cache holds no more than a few of them."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import steady
from fakes.stacks import running
from fakes.variants import golden_variants, make_variant

from lora_slots.client import Client
from lora_slots.embedded import Prepared, publish_adapters
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer

pytestmark = pytest.mark.triton
SLOTS = 4
until = partial(steady.until, tries=400)
HOST_CACHE_BYTES = 80_000_000  # about seven pages of the engine: real evictions in the engine, too


@pytest.fixture(scope="module")
def golden_of() -> dict[str, list[int]]:
    """Variant name -> tokens of transformers and peft."""
    return {entry["name"]: entry["tokens"] for entry in golden_variants()["variants"]}


@pytest.fixture(scope="module")
def crowded(base: Path, engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A stack with twelve adapters, four slots, and two seconds until an idle adapter leaves."""
    home = tmp_path_factory.mktemp("variants")
    variants = {
        entry["name"]: make_variant(home / "peft" / entry["name"], entry["example"], entry["seed"])
        for entry in golden_variants()["variants"]
    }
    registry = publish_adapters(variants, base, home, lambda *_: None)
    bounds = {"num_slots": str(SLOTS), "idle_s": "2", "tick_s": "0.1", "refresh_s": "1"}
    cache = {"lora_cache_host_memory_bytes": str(HOST_CACHE_BYTES)}
    with running(Prepared(base, engine, registry), router=bounds, engine=cache) as made:
        yield made


def metric(server: TritonServer, name: str, **labels: str) -> float:
    """Sum of a family's series that carry these labels."""
    with urllib.request.urlopen(server.metrics_url) as reply:  # noqa: S310 - loopback
        lines = reply.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"{name}{{") and all(text in line for text in wanted)
    )


def lora_info(server: TritonServer) -> list[str]:
    """The series of vLLM's family, that routers read."""
    with urllib.request.urlopen(server.metrics_url) as reply:  # noqa: S310 - loopback
        return [line for line in reply.read().decode().splitlines() if line.startswith("vllm:lora_requests_info{")]


def status(server: TritonServer) -> dict[str, Any]:
    """The slot manager's status."""
    with Client(server.grpc_url) as client:
        return client.operate("status")


def test_twelve_adapters_through_four_slots(
    crowded: TritonServer, golden_of: dict[str, list[int]], tokenizer: Tokenizer
) -> None:
    """Every answer is right, never more than four are in slots, a pinned one never leaves, the idle ones do."""
    given = golden_variants()
    names = list(golden_of)
    pinned = names[0]
    seen: list[int] = []
    lost_pin: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            now = status(crowded)
            seen.append(now["slots_used"])
            lost_pin.extend(a["tier"] for a in now["adapters"] if a["name"] == pinned and a["tier"] != "SLOT")

    def ask(name: str) -> str:
        with Client(crowded.grpc_url) as client:
            return "".join(client.stream(given["text_input"], adapter=name, max_tokens=given["max_tokens"]))

    with Client(crowded.grpc_url) as client:
        client.operate("pin", adapter=pinned)
        client.operate("warm", adapter=pinned)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        order = names + names[::-1]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, order))
    finally:
        stop.set()
        watcher.join()
    wrong = [name for name, text in zip(order, answers, strict=True) if text != tokenizer.decode(golden_of[name])]
    assert not wrong
    assert max(seen) <= SLOTS
    assert not lost_pin
    until(lambda: [a["name"] for a in status(crowded)["adapters"] if a["tier"] == "SLOT"] == [pinned])
    until(lambda: metric(crowded, "lora_slots_evictions_total", tier="SLOT", reason="idle") > 0)
    assert metric(crowded, "lora_slots_evictions_total", tier="SLOT", reason="bind") > 0
    assert metric(crowded, "lora_slots_engine_misses_total") == 0
    assert metric(crowded, "lora_slots_promotions_total", tier="SLOT") >= len(names)
    until(lambda: any('running_lora_adapters="",waiting_lora_adapters=""' in line for line in lora_info(crowded)))
    assert len(lora_info(crowded)) == 1, "what runs now, and nothing of what ran before"


def test_operators_evict_and_are_told_why_not(crowded: TritonServer, golden_of: dict[str, list[int]]) -> None:
    """evict takes an idle adapter out; a pinned or absent one is refused in words, an unknown one is NOT_FOUND."""
    pinned, other = next(iter(golden_of)), list(golden_of)[5]
    with Client(crowded.grpc_url) as client:
        client.operate("pin", adapter=pinned)
        client.operate("warm", adapter=other)
        client.operate("evict", adapter=other)
        for adapter, words in ((other, "is not in a slot"), (pinned, "is held: .*pinned")):
            with pytest.raises(ServerError, match=words):
                client.operate("evict", adapter=adapter)
        with pytest.raises(ServerError) as unknown:
            client.operate("warm", adapter="nobody")
        assert unknown.value.code == "NOT_FOUND"
        with pytest.raises(ServerError, match="no operation 'explode'"):
            client.operate("explode")
        client.operate("unpin", adapter=pinned)
