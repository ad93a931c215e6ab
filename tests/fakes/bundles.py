"""Small bundles for a small engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trtllm_lora import MODULES, Bundle, BundleFacts, EngineShape, Row, pack, write_bundle

SHAPE = EngineShape.from_hf_config(
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    dtype="float32",
    max_lora_rank=8,
)


def small_bundle(parent: Path, name: str, seed: int = 0, rank: int = 4) -> Bundle:
    """A bundle of random attn_q rows that fits SHAPE; another seed is other content."""
    chance = np.random.default_rng(seed)
    module = MODULES["attn_q"].id
    rows = [
        Row(
            module,
            layer,
            chance.standard_normal((rank, 64), dtype=np.float32),
            chance.standard_normal((64, rank), dtype=np.float32),
        )
        for layer in range(2)
    ]
    weights, config = pack(rows, "float32")
    return write_bundle(parent, weights, config, BundleFacts(name, "float32", modules={"attn_q": (64, 64)}))
