"""A fleet of small adapters on the tiny Llama, each with an answer of its own by transformers and peft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lora_slots.base_model import make_tiny_llama
from lora_slots.text import Tokenizer

PROMPT = "hello there"
MAX_TOKENS = 12
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 64, 4, 2, 16, 128
SIZES = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "mlp.down_proj": (FFN, HIDDEN),
}


@dataclass(frozen=True)
class Member:
    """One adapter of the fleet."""

    name: str
    path: Path
    tokens: tuple[int, ...]


def make_base(home: Path) -> Path:
    """The tiny base model."""
    return make_tiny_llama(home / "base", seed=3)


def write_adapter(path: Path, seed: int) -> Path:
    """A PEFT directory with random weights; ranks 2, 4 and 8 in turn."""
    chance, rank = np.random.default_rng(seed), (2, 4, 8)[seed % 3]
    tensors = {}
    for layer in range(LAYERS):
        for module, (d_in, d_out) in SIZES.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = chance.standard_normal((rank, d_in), dtype=np.float32) * np.float32(0.3)
            tensors[f"{stem}.lora_B.weight"] = chance.standard_normal((d_out, rank), dtype=np.float32) * np.float32(0.3)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(name.split(".")[1] for name in SIZES),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def make_fleet(base: Path, home: Path, size: int) -> list[Member]:
    """Adapters whose greedy answers differ and were no close calls. Needs torch, transformers and peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    ids = torch.tensor([Tokenizer(base).encode(PROMPT)])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fleet: list[Member] = []
    seen: set[tuple[int, ...]] = set()
    seed, model = 0, None
    while len(fleet) < size:
        seed += 1
        name = f"adapter-{seed:04d}"
        path = write_adapter(home / name, seed)
        if model is None:
            model = PeftModel.from_pretrained(plain, path, adapter_name=name).eval()
        else:
            model.load_adapter(path, adapter_name=name)
        model.set_adapter(name)
        tokens, margin = _greedy(model, ids)
        model.set_adapter(name)
        if margin > 1e-3 and tokens not in seen:
            seen.add(tokens)
            fleet.append(Member(name, path, tokens))
    return fleet


def _greedy(model: Any, ids: Any) -> tuple[tuple[int, ...], float]:
    found = model.generate(
        input_ids=ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    leads = [float(best[0] - best[1]) for best in (step[0].topk(2).values for step in found.logits)]
    return tuple(found.sequences[0, ids.shape[1] :].tolist()), min(leads)
