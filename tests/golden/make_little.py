"""Writes little.json: what the little Llama of fakes.little and its adapters answer by transformers and peft.

    python tests/golden/make_little.py

Seeds of adapters are taken so that no two answer a prompt alike, prompts so that no chosen token was a close call.
Needs the `oracle` dependency group; a minute.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_slots.text import Tokenizer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from fakes.fleet import write_adapter  # noqa: E402 - tests/ is not a package
from fakes.little import FILE, NAMES, make_base  # noqa: E402
from make_answers import CANDIDATES, MIN_MARGIN, greedy, sha256  # noqa: E402

NUM_PROMPTS = 6
MAX_TOKENS = 64
VARIANTS = [f"{name}-{number}" for name in NAMES for number in range(1, 5)]
VARIANT_TOKENS = 24
FIRST_DIFFERENT = 12
"""Two answers to one prompt differ within so many tokens."""


def main() -> None:
    """Look for seeds and prompts, and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        content = answers(Path(folder))
    FILE.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def answers(home: Path) -> dict[str, Any]:
    """The file's content."""
    torch.set_num_threads(1)
    base = make_base(home)
    tokenizer = Tokenizer(base)
    prompts: dict[str, list[int]] = {}
    for prompt in CANDIDATES:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        prompts[prompt] = tokenizer.encode(chat, add_special_tokens=False)

    def ask(path: Path | None, asked: list[str], max_tokens: int) -> list[tuple[list[int], float]]:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if path is not None:
            model = PeftModel.from_pretrained(model, path)
        return [greedy(model.eval(), prompts[prompt], tokenizer.eos_ids, max_tokens) for prompt in asked]

    bare = ask(None, list(CANDIDATES), MAX_TOKENS)
    taken = [prompt for prompt, (_, margin) in zip(CANDIDATES, bare, strict=True) if margin >= MIN_MARGIN][:NUM_PROMPTS]
    assert len(taken) == NUM_PROMPTS, "too few safe prompts: add candidates"
    found: dict[str | None, list[list[int]]] = {
        None: [tokens for prompt, (tokens, _) in zip(CANDIDATES, bare, strict=True) if prompt in taken]
    }
    seeds: dict[str, int] = {}
    seed = 0
    for name in (*NAMES, *VARIANTS):
        asked, max_tokens = (taken, MAX_TOKENS) if name in NAMES else (taken[:1], VARIANT_TOKENS)
        while name not in seeds:
            seed += 1
            given = ask(write_adapter(home / str(seed), seed), asked, max_tokens)
            new = all(
                tokens[:FIRST_DIFFERENT] != other[:FIRST_DIFFERENT]
                for theirs in found.values()
                for (tokens, _), other in zip(given, theirs, strict=False)
            )
            if new and all(margin >= MIN_MARGIN for _, margin in given):
                seeds[name], found[name] = seed, [tokens for tokens, _ in given]
                print(name, seed, repr(tokenizer.decode(given[0][0])), flush=True)  # noqa: T201
    return {
        "sha256": {
            "base": sha256(base / "model.safetensors"),
            **{name: sha256(home / str(number) / "adapter_model.safetensors") for name, number in seeds.items()},
        },
        "seeds": seeds,
        "answers": [
            {"adapter": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "tokens": found[name][index]}
            for index, prompt in enumerate(taken)
            for name in (None, *NAMES)
        ],
        "variants": [
            {"adapter": name, "prompt": taken[0], "max_tokens": VARIANT_TOKENS, "tokens": found[name][0]}
            for name in VARIANTS
        ],
    }


if __name__ == "__main__":
    main()
