"""The golden answers belong to the files in this checkout, and transformers with peft still gives them."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lora_slots.base_model import ensure_base_model
from lora_slots.text import Tokenizer
from trtllm_lora.files import sha256_of

HERE = Path(__file__).parent
GOLDEN: dict[str, Any] = json.loads((HERE / "answers.json").read_text(encoding="utf-8"))


def test_they_were_made_from_these_files() -> None:
    """Base weights and adapters are those the answers were made with."""
    found = {name: sha256_of(HERE.parents[1] / f"examples/adapters/{name}/adapter_model.safetensors")
             for name in GOLDEN["sha256"] if name != "base"}  # fmt: skip
    assert {**found, "base": sha256_of(ensure_base_model() / "model.safetensors")} == GOLDEN["sha256"]


def test_every_answer_is_safe_and_spelled_as_its_tokens() -> None:
    """Prompts are chat-templated, texts are the tokens', and no step was a close call."""
    tokenizer = Tokenizer(ensure_base_model())
    for entry in GOLDEN["answers"]:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": entry["prompt"]}])
        assert tokenizer.encode(chat, add_special_tokens=False) == entry["prompt_ids"]
        assert tokenizer.decode(entry["tokens"]) == entry["text"]
        assert entry["min_margin"] >= 1e-3
        ended = entry["tokens"][-1] in GOLDEN["eos_ids"]
        assert ended or len(entry["tokens"]) == GOLDEN["max_tokens"]


def test_adapters_and_base_differ_on_every_prompt() -> None:
    """No two of base and adapters give one prompt the same answer: a mixed-up adapter cannot pass."""
    prompts = {entry["prompt"] for entry in GOLDEN["answers"]}
    adapters = {entry["adapter"] for entry in GOLDEN["answers"]}
    texts = {(entry["prompt"], entry["text"]) for entry in GOLDEN["answers"]}
    assert len(texts) == len(prompts) * len(adapters) == len(GOLDEN["answers"])


def make_answers() -> ModuleType:
    """The script beside this file, as a module."""
    spec = importlib.util.spec_from_file_location("make_answers", HERE / "make_answers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_transformers_and_peft_still_say_so() -> None:
    """Base and every adapter, given each answer of the file up to a token, like that token best: all in one pass."""
    script = make_answers()
    base = ensure_base_model()
    tokenizer = Tokenizer(base)
    model, names = script.load_models(base)
    assert {None, *names} == {entry["adapter"] for entry in GOLDEN["answers"]}
    for expected in GOLDEN["answers"][:: len(names) + 2]:  # each adapter, and another prompt each time
        assert script.best_tokens(model, expected, tokenizer) == expected["tokens"]
