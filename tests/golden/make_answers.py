"""Writes answers.json: what base and example adapters answer according to transformers and peft.

    python tests/golden/make_answers.py

float32, greedy, one thread, up to 64 tokens. Engines are held to these tokens without torch. A prompt is taken only if
in every answer the best token led the second by MIN_MARGIN or more at every step, so that another order of float32
additions cannot change it. Needs the `oracle` dependency group; two minutes.
"""

import contextlib
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_slots.base_model import BASE_MODEL, ensure_base_model
from lora_slots.text import Tokenizer

ADAPTERS = Path(__file__).parents[2] / "examples/adapters"
OUT = Path(__file__).with_name("answers.json")
NUM_PROMPTS = 6
MAX_TOKENS = 64
MIN_MARGIN = 1e-3
CANDIDATES = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Tell me something about the moon.",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
    "Who painted the Mona Lisa?",
    "What do cows eat?",
    "List three colors.",
    "What is 2 + 2?",
    "Tell me a short story about a dragon.",
    "How do airplanes fly?",
    "What should I cook tonight?",
)


def greedy(model: Any, ids: list[int], eos_ids: tuple[int, ...], max_tokens: int) -> tuple[list[int], float]:
    """Greedy tokens after `ids`, the end token included if reached, and the least lead of a chosen token's logit."""
    prompt = torch.tensor([ids])
    found = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=list(eos_ids),
        return_dict_in_generate=True,
        output_logits=True,
    )
    leads = [float(best[0] - best[1]) for best in (step[0].topk(2).values for step in found.logits)]
    return found.sequences[0, len(ids) :].tolist(), min(leads)


def load_models(base: Path) -> tuple[PeftModel, list[str]]:
    """The base with every example adapter loaded under its name, and the names."""
    names = sorted(path.name for path in ADAPTERS.iterdir())
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), ADAPTERS / names[0], adapter_name=names[0]
    )
    for name in names[1:]:
        model.load_adapter(ADAPTERS / name, adapter_name=name)
    return model.eval(), names


def best_tokens(model: PeftModel, entry: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The greedy choice after the prompt and each beginning of an entry's answer: the answer itself, if it is right."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": entry["prompt"]}])
    ids = tokenizer.encode(chat, add_special_tokens=False)
    whole = torch.tensor([ids + entry["tokens"][:-1]])
    with torch.inference_mode(), contextlib.ExitStack() as without:
        if entry["adapter"] is None:
            without.enter_context(model.disable_adapter())
        else:
            model.set_adapter(entry["adapter"])
        best: list[int] = model(input_ids=whole).logits[0, len(ids) - 1 :].argmax(-1).tolist()
    return best


def answer(model: PeftModel, adapter: str | None, prompt: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry of the file: the answer of `adapter`, or of the base, to `prompt` in the chat format."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    ids = tokenizer.encode(chat, add_special_tokens=False)
    if adapter is None:
        with model.disable_adapter():
            tokens, lead = greedy(model, ids, tokenizer.eos_ids, MAX_TOKENS)
    else:
        model.set_adapter(adapter)
        tokens, lead = greedy(model, ids, tokenizer.eos_ids, MAX_TOKENS)
    return {
        "adapter": adapter,
        "prompt": prompt,
        "prompt_ids": ids,
        "tokens": tokens,
        "text": tokenizer.decode(tokens),
        "min_margin": round(lead, 5),
    }


def main() -> None:
    """Answer the candidates until enough of them are safe, and write the file."""
    torch.set_num_threads(1)
    base = ensure_base_model()
    tokenizer = Tokenizer(base)
    model, names = load_models(base)
    answers: list[dict[str, Any]] = []
    for prompt in CANDIDATES:
        found = [answer(model, adapter, prompt, tokenizer) for adapter in (None, *names)]
        least = min(entry["min_margin"] for entry in found)
        print(f"{'taken' if least >= MIN_MARGIN else 'NOT taken'}: {prompt} (least margin {least})", flush=True)  # noqa: T201
        if least >= MIN_MARGIN:
            answers += found
        if len(answers) == NUM_PROMPTS * (len(names) + 1):
            break
    else:
        raise SystemExit("too few safe prompts: add candidates")
    content = {
        "made_with": {name: version(name) for name in ("torch", "transformers", "peft", "tokenizers")},
        "base_model": BASE_MODEL,
        "sha256": {
            "base": sha256(base / "model.safetensors"),
            **{name: sha256(ADAPTERS / name / "adapter_model.safetensors") for name in names},
        },
        "max_tokens": MAX_TOKENS,
        "eos_ids": tokenizer.eos_ids,
        "answers": answers,
    }
    OUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
