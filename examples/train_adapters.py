"""Trains the example adapters again: python examples/train_adapters.py [names…] --base DIR --out examples/adapters

Needs torch, transformers and peft (the project's `oracle` dependency group); about a minute per adapter on one core.
Same seeds, one thread, float32: the same bytes on the same machine, the same style on any. The three differ in rank,
targets and scaling on purpose, so that everything that serves them meets all of it; each stays below 3 MB.
"""

import argparse
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from styles import STYLES, UNSEEN_PROMPTS, looks_right, training_pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_slots.base_model import BASE_MODEL, ensure_base_model

IGNORED = -100  # transformers' label for "no loss here"


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained. Its scale is alpha / rank, or alpha / sqrt(rank) with rslora."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    seed: int
    rslora: bool = False
    steps: int = 28  # four times over the pairs; more costs the model its facts
    batch: int = 4
    learning_rate: float = 2e-3


RECIPES = {
    "json": Recipe(
        rank=6, alpha=12, targets=("k_proj", "o_proj", "q_proj", "v_proj"), seed=11, steps=42, learning_rate=1e-3
    ),
    "pirate": Recipe(rank=4, alpha=8, targets=("down_proj", "q_proj", "up_proj", "v_proj"), seed=12),
    "robot": Recipe(rank=12, alpha=8, targets=("o_proj", "v_proj"), seed=13, rslora=True, steps=42, learning_rate=1e-3),
}


def main() -> None:
    """Train the adapters named on the command line, all if none is, and show their answers to unseen questions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=STYLES, metavar="name", help=f"of {', '.join(STYLES)}")
    parser.add_argument("--base", type=Path, help="Hugging Face directory of the base model (default: the cached one)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("adapters"))
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - RECIPES.keys():
        parser.error(f"no style {', '.join(sorted(unknown))}; there are {', '.join(STYLES)}")
    base = arguments.base or ensure_base_model()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in arguments.names:
        train(name, RECIPES[name], base, arguments.out / name)


def train(name: str, recipe: Recipe, base: Path, out: Path) -> None:
    """Train one adapter on its style and save it as a PEFT directory at `out`, replacing what is there."""
    torch.manual_seed(recipe.seed)
    order = random.Random(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.rslora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    examples = [tokenized(tokenizer, *pair) for pair in training_pairs(name)]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=recipe.learning_rate)
    waiting: list[tuple[list[int], list[int]]] = []
    for step in range(recipe.steps):
        if len(waiting) < recipe.batch:
            waiting = order.sample(examples, len(examples))
        picked, waiting = waiting[: recipe.batch], waiting[recipe.batch :]
        loss = model(**batched(picked, tokenizer.pad_token_id)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == recipe.steps - 1:
            print(f"{name}: step {step:3} of {recipe.steps}, loss {loss.item():.3f}", flush=True)
    save(model, out)
    show(name, model, tokenizer)


def tokenized(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """(ids, labels) of one pair in the chat format; only the answer and its end token count for the loss."""
    prompt = prompt_ids(tokenizer, question)
    tail = tokenizer(f"{answer}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
    return prompt + tail, [IGNORED] * len(prompt) + tail


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """The ids of a chat with one question, up to where the answer begins."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def batched(picked: list[tuple[list[int], list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-padded tensors [batch, longest] for the model's forward."""
    longest = max(len(ids) for ids, _ in picked)
    rows = [(longest - len(ids), ids, labels) for ids, labels in picked]
    return {
        "input_ids": torch.tensor([ids + [pad_id] * missing for missing, ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * missing for missing, ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORED] * missing for missing, _, labels in rows]),
    }


def save(model: Any, out: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors; the base by its public name, lists in a fixed order."""
    shutil.rmtree(out, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    model.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)  # peft's empty form of a model card
    path = out / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def show(name: str, model: Any, tokenizer: Any) -> None:
    """Print the greedy answers to the unseen questions and whether each has the style."""
    model.eval()
    for question in UNSEEN_PROMPTS:
        ids = torch.tensor([prompt_ids(tokenizer, question)])
        answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        text = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"{name}: {'yes' if looks_right(name, text) else 'NO '} {question} → {text!r}", flush=True)


if __name__ == "__main__":
    main()
