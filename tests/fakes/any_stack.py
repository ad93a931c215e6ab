"""Fixtures of a stack with any model; its `base`, `engine` and `adapters` are of little_stack or smollm2_stack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.stacks import running
from lora_slots.embedded import Prepared, publish_adapters
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Tokenizer:
    """The base model's tokenizer."""
    return Tokenizer(base)


@pytest.fixture(scope="session")
def prepared(base: Path, engine: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The adapters, published in a registry of the tests' own."""
    home = tmp_path_factory.mktemp("adapters")
    return Prepared(base, engine, publish_adapters(adapters, base, home, lambda *_: None))


@pytest.fixture(scope="session")
def server(prepared: Prepared) -> Iterator[TritonServer]:
    """A running stack with the default bounds and a quick timer."""
    with running(prepared, router={"tick_s": "0.2"}) as made:
        yield made
