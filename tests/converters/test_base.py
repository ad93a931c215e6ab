"""A base's sizes, in the dozen spellings of its config.json."""

from __future__ import annotations

from typing import Any

import pytest

from peft_to_trtllm.base import base_from_config

CONFIGS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "llama": (
        {
            "hidden_size": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 9,
            "num_hidden_layers": 3,
        },
        (8, 3, 8, 4, 9),
    ),
    "gemma, wide heads": (
        {"hidden_size": 8, "num_attention_heads": 4, "head_dim": 8, "intermediate_size": 9},
        (8, None, 32, 32, 9),
    ),
    "gpt2, no n_inner": (
        {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "n_inner": None},
        (8, 3, 8, 8, 32),
    ),
    "bloom": ({"model_type": "bloom", "n_embed": 8, "num_attention_heads": 2, "n_layer": 3}, (8, 3, 8, 8, 32)),
    "falcon 7b": (
        {"model_type": "falcon", "hidden_size": 8, "num_attention_heads": 2, "multi_query": True},
        (8, None, 8, 4, 32),
    ),
    "falcon 40b": (
        {
            "model_type": "falcon",
            "hidden_size": 8,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
        (8, None, 8, 4, 32),
    ),
    "falcon rw": (
        {"model_type": "falcon", "hidden_size": 8, "num_attention_heads": 2, "multi_query": False},
        (8, None, 8, 8, 32),
    ),
    "starcoder": ({"model_type": "gpt_bigcode", "n_embd": 8, "n_head": 2, "multi_query": True}, (8, None, 8, 4, 32)),
    "chatglm": (
        {
            "model_type": "chatglm",
            "hidden_size": 8,
            "num_attention_heads": 4,
            "kv_channels": 2,
            "num_layers": 3,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "ffn_hidden_size": 9,
        },
        (8, 3, 8, 4, 9),
    ),
    "mpt": (
        {
            "model_type": "mpt",
            "d_model": 8,
            "n_heads": 4,
            "n_layers": 3,
            "expansion_ratio": 2,
            "attn_config": {"kv_n_heads": 2},
        },
        (8, 3, 8, 4, 16),
    ),
    "opt": ({"model_type": "opt", "hidden_size": 8, "num_attention_heads": 4, "ffn_dim": 9}, (8, None, 8, 8, 9)),
    "xglm": (
        {"model_type": "xglm", "d_model": 8, "attention_heads": 4, "ffn_dim": 9, "num_layers": 3},
        (8, 3, 8, 8, 9),
    ),
    "the first qwen": (
        {"model_type": "qwen", "hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 18},
        (8, None, 8, 8, 9),
    ),
    "vision-language": (
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4},
            "hidden_size": 99,
        },
        (8, None, 8, 8, None),
    ),
    "nonsense": (
        {"hidden_size": "8", "num_attention_heads": -1, "intermediate_size": 9.5, "num_hidden_layers": True},
        (None,) * 5,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_sizes(kind: str) -> None:
    """hidden, layers, width of the queries, width of the keys, intermediate."""
    config, wanted = CONFIGS[kind]
    base = base_from_config(config, source="config.json")
    assert (base.hidden, base.layers, base.q, base.kv, base.inter) == wanted


def test_experts() -> None:
    """The experts' own size where it is stated, else the intermediate size."""
    mixtral = base_from_config({"num_local_experts": 8, "intermediate_size": 9}, source="")
    qwen = base_from_config({"num_experts": 8, "intermediate_size": 9, "moe_intermediate_size": 5}, source="")
    assert (mixtral.experts, mixtral.expert_inter) == (8, 9)
    assert (qwen.experts, qwen.expert_inter, qwen.inter) == (8, 5, 9)


def test_the_type_of_the_weights() -> None:
    """torch_dtype, or dtype as transformers 5 writes it."""
    assert base_from_config({"torch_dtype": "bfloat16"}, source="").dtype == "bfloat16"
    assert base_from_config({"dtype": "float16"}, source="").dtype == "float16"
