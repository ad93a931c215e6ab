"""The short form of `make soak`: more adapters than slots, several clients, every answer known from peft."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from fakes.fleet import make_base, make_fleet
from fakes.soak import soak
from fakes.stacks import running

from lora_slots.embedded import Prepared, publish_adapters
from lora_slots.text import Tokenizer
from reference_engine import build_engine

pytestmark = [pytest.mark.triton, pytest.mark.oracle]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # between peft and transformers
@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_more_adapters_than_slots_under_load(tmp_path: Path, policy: str) -> None:
    """Twenty adapters, four slots, six clients: nothing wrong, no engine miss, nobody starves."""
    pytest.importorskip("peft")
    base = make_base(tmp_path)
    engine = build_engine(base, tmp_path / "engine", max_lora_rank=8, max_seq_len=512)
    fleet = make_fleet(base, tmp_path / "peft", 20)
    registry = publish_adapters({m.name: m.path for m in fleet}, base, tmp_path, lambda *_: None)
    router = {"num_slots": "4", "idle_s": "1", "tick_s": "0.2", "min_residency_s": "0.1", "policy": policy}
    with running(Prepared(base, engine, registry), router=router) as server:
        for zipf in (True, False):
            outcome = soak(server, fleet, Tokenizer(base), seconds=5, clients=6, zipf=zipf)
            assert not outcome.wrong
            assert not outcome.errors
            assert outcome.requests > 20
        with urllib.request.urlopen(server.metrics_url) as reply:  # noqa: S310 - loopback
            lines = reply.read().decode().splitlines()
    misses = [line for line in lines if line.startswith("lora_slots_engine_misses_total")]
    assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in misses)
    assert any(line.startswith("vllm:lora_requests_info") for line in lines)
