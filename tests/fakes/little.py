"""A little Llama with three adapters and twelve more, whose answers by transformers and peft are known.

It stands where a test is of what happens around the engine: slots, faults, clients. What it answers is made of
printable characters, and each adapter answers otherwise from the first characters on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from fakes.fleet import write_adapter
from lora_slots.base_model import make_tiny_llama
from lora_slots.text import Tokenizer

FILE = Path(__file__).parents[1] / "golden" / "little.json"
PRINTABLE = "".join(map(chr, range(ord(" "), ord("~") + 1)))
BASE = "little"
"""The base model's name."""
NAMES = ("json", "pirate", "robot")


def make_base(home: Path) -> Path:
    """The model's directory below `home`; the same bytes every time."""
    base = make_tiny_llama(home / BASE, seed=3)
    ids = {number for letter in PRINTABLE for number in Tokenizer(base).encode(letter)}
    file = base / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    # the output layer is the embedding: a row of zeros has logit 0, and the best of 95 others is above it
    embedding[[row for row in range(len(embedding)) if row not in ids]] = 0
    save_file(weights, file, metadata={"format": "pt"})
    return base


def make_adapters(home: Path, seeds: dict[str, int]) -> dict[str, Path]:
    """PEFT directories below `home`: name -> path."""
    return {name: write_adapter(home / name, seed) for name, seed in seeds.items()}


def golden() -> dict[str, Any]:
    """What tests/golden/make_little.py wrote: max_tokens, seeds (name -> of an adapter), answers, variants."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def with_texts(entries: Iterable[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Entries (adapter, prompt, tokens, max_tokens) with the prompt in the chat format and the answer's text."""
    return [
        {
            **entry,
            "text_input": tokenizer.apply_chat_template([{"role": "user", "content": entry["prompt"]}]),
            "text": tokenizer.decode(entry["tokens"]),
        }
        for entry in entries
    ]
