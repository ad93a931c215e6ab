"""Twelve adapters out of three: copies of the examples with changed weights, each with an answer of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "golden" / "variants.json"


def make_variant(out: Path, example: str, seed: int) -> Path:
    """Write the PEFT directory of one variant: every B is scaled and gets noise, by `seed`."""
    source = ROOT / "examples" / "adapters" / example
    chance = np.random.default_rng(seed)
    tensors = load_file(source / "adapter_model.safetensors")
    for name in sorted(tensors):
        if ".lora_B." in name:
            b = tensors[name]
            noise = chance.standard_normal(b.shape, dtype=np.float32) * b.std() * 0.25
            tensors[name] = (b * np.float32(0.7 + 0.15 * (seed % 5)) + noise).astype(np.float32)
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(source / "adapter_config.json", out / "adapter_config.json")
    return out


def golden_variants() -> dict[str, Any]:
    """What tests/golden/make_variants.py wrote: the prompt and each variant's example, seed and tokens."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))
