"""Fixtures of a real Triton with SmolLM2 and the example adapters, for a conftest to import; as in little_stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.variants import golden_variants
from lora_slots import examples
from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.store import cache_folder
from lora_slots.embedded import ensure_engine
from lora_slots.text import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "answers.json"


@pytest.fixture(scope="session")
def base() -> Path:
    """The base model's directory."""
    return ensure_base_model()


@pytest.fixture(scope="session")
def engine(base: Path) -> Path:
    """The reference engine's directory."""
    return ensure_engine(base, cache_folder(None) / "engines", lambda *_: None)


@pytest.fixture(scope="session")
def adapters() -> dict[str, Path]:
    """PEFT directories of the example adapters."""
    return dict(examples.adapters())


@pytest.fixture(scope="session")
def variants(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The answers of transformers and peft of twelve more adapters, by name: as `golden`, with example and seed."""
    given = golden_variants()
    common = {"text_input": given["text_input"], "max_tokens": given["max_tokens"]}
    return {
        entry["name"]: {**entry, **common, "adapter": entry["name"], "text": tokenizer.decode(entry["tokens"])}
        for entry in given["variants"]
    }


@pytest.fixture(scope="session")
def golden(base: Path, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The answers of transformers and peft: adapter, prompt, text_input, tokens, text."""
    answers = json.loads(GOLDEN.read_text(encoding="utf-8"))["answers"]
    for answer in answers:
        messages = [{"role": "user", "content": answer["prompt"]}]
        answer["text_input"] = tokenizer.apply_chat_template(messages)
        answer["text"] = tokenizer.decode(answer["tokens"])
    return list(answers)
