"""A real Triton with the real model and the example adapters, and a gateway before it; once for all tests here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes.gateways import RunningGateway, gateway
from fakes.stacks import running

from lora_slots import examples
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.store import cache_folder
from lora_slots.embedded import Prepared, ensure_engine, publish_adapters
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "answers.json"


def quiet(stage: str, done: int, total: int) -> None:
    """No progress bar in tests."""


@pytest.fixture(scope="session")
def base() -> Path:
    """The base model's directory."""
    return ensure_base_model()


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Tokenizer:
    """The base model's tokenizer."""
    return Tokenizer(base)


@pytest.fixture(scope="session")
def prepared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The example adapters, published in a registry of the tests' own."""
    home = tmp_path_factory.mktemp("adapters")
    engine = ensure_engine(base, cache_folder(None) / "engines", quiet)
    return Prepared(base, engine, publish_adapters(examples.adapters(), base, home, quiet))


@pytest.fixture(scope="session")
def server(prepared: Prepared) -> Iterator[TritonServer]:
    """A running stack."""
    with running(prepared, router={"tick_s": "0.2"}) as made:
        yield made


@pytest.fixture(scope="session")
def door(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway without tenants."""
    with gateway(server.grpc_url, tmp_path_factory.mktemp("gateway") / "log") as made:
        yield made


@pytest.fixture(scope="session")
def client(door: RunningGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which tries nothing again."""
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """The answers of transformers and peft: adapter, prompt, tokens, text."""
    return list(json.loads(GOLDEN.read_text(encoding="utf-8"))["answers"])
