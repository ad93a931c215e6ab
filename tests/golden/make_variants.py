"""Writes variants.json: twelve changed copies of the example adapters, and what each answers by transformers and peft.

    python tests/golden/make_variants.py

Seeds are taken so that no two variants give the same answer and no chosen token was a close call. Needs the `oracle`
dependency group; three minutes.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_slots.base_model import ensure_base_model
from lora_slots.text import Tokenizer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from fakes.variants import FILE, make_variant  # noqa: E402 - tests/ is not a package
from make_answers import greedy  # noqa: E402

EXAMPLES = ("json", "pirate", "robot")
PER_EXAMPLE = 4
MAX_TOKENS = 24
MIN_MARGIN = 1e-3
PROMPT = "Why is the sky blue?"


def main() -> None:
    """Look for seeds and write the file."""
    torch.set_num_threads(1)
    base = ensure_base_model()
    tokenizer = Tokenizer(base)
    text = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    ids = tokenizer.encode(text)
    found: list[dict[str, Any]] = []
    seen: set[tuple[int, ...]] = set()
    with tempfile.TemporaryDirectory() as folder:
        for example in EXAMPLES:
            seed = 0
            while sum(entry["example"] == example for entry in found) < PER_EXAMPLE:
                seed += 1
                path = make_variant(Path(folder) / f"{example}-{seed}", example, seed)
                plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
                model = PeftModel.from_pretrained(plain, path).eval()
                tokens, margin = greedy(model, ids, tokenizer.eos_ids, MAX_TOKENS)
                if margin < MIN_MARGIN or tuple(tokens) in seen:
                    continue
                seen.add(tuple(tokens))
                found.append({"name": f"{example}-{seed}", "example": example, "seed": seed, "tokens": tokens})
                print(found[-1]["name"], repr(tokenizer.decode(tokens)))  # noqa: T201
    content = {"prompt": PROMPT, "text_input": text, "max_tokens": MAX_TOKENS, "variants": found}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
