"""Fixtures of a real Triton with a little Llama and three adapters, for a conftest to import.

fakes.smollm2_stack has the same names with the real model: base, engine, adapters, golden, variants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes import little
from lora_slots.text import Tokenizer
from reference_engine import build_engine


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's directory."""
    return little.make_base(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="session")
def engine(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference engine's directory."""
    return build_engine(base, tmp_path_factory.mktemp("engine") / "little", max_lora_rank=16, max_seq_len=2048)


@pytest.fixture(scope="session")
def all_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEFT directories of the three adapters and of the variants, by name."""
    return little.make_adapters(tmp_path_factory.mktemp("peft"), little.golden()["seeds"])


@pytest.fixture(scope="session")
def adapters(all_adapters: dict[str, Path]) -> dict[str, Path]:
    """PEFT directories of json, pirate and robot."""
    return {name: all_adapters[name] for name in little.NAMES}


@pytest.fixture(scope="session")
def variants(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The answers of transformers and peft of twelve more adapters, by name: as `golden`, to one prompt."""
    return {entry["adapter"]: entry for entry in little.with_texts(little.golden()["variants"], tokenizer)}


@pytest.fixture(scope="session")
def golden(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The answers of transformers and peft: adapter (None: the base), prompt, max_tokens, tokens, text_input, text."""
    return little.with_texts(little.golden()["answers"], tokenizer)
