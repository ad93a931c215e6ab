"""Every family that transformers can build: an adapter on all its linear layers, converted and run beside PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_to_trtllm import convert
from peft_to_trtllm.job import Job, Request
from peft_to_trtllm.verify import verify

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # peft and transformers about each other

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {"intermediate_size": 48, "num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 48}
WIDE, NARROW, PLAIN, ROTARY = (
    {**GATED, "head_dim": 16},
    {**GATED, "head_dim": 8},
    {"intermediate_size": 48},
    {**GPT, "rotary_dim": 4},
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "mistral": GATED,
    "qwen2": GATED,
    "phi": GATED,
    "phi3": GATED,
    "starcoder2": GATED,
    "stablelm": GATED,
    "cohere": GATED,
    "olmo": GATED,
    "olmo2": GATED,
    "nemotron": GATED,
    "granite": GATED,
    "smollm3": GATED,
    "exaone4": GATED,
    "arcee": GATED,
    "apertus": GATED,
    "qwen3": WIDE,
    "gemma": WIDE,
    "gemma2": WIDE,
    "gemma3_text": WIDE,
    "glm": NARROW,
    "glm4": NARROW,
    "ernie4_5": NARROW,
    "seed_oss": NARROW,
    "gpt_neox": PLAIN,
    "persimmon": PLAIN,
    "gptj": ROTARY,
    "codegen": ROTARY,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_all_linear_layers(model_type: str, tmp_path: Path) -> None:
    """Prefixes, leaves and dimensions of the family are read, and the logits are PEFT's."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **FAMILIES[model_type]})
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(str(tmp_path / "adapter"))
    bundle = convert(tmp_path / "adapter", base=tmp_path / "base", out=tmp_path / "o", dtype="float32")
    with Job(Request(str(tmp_path / "adapter"), base=tmp_path / "base", dtype="float32")) as job:
        assert job.conversion
        verdict = verify(bundle, job.conversion.plan, tmp_path / "adapter", tmp_path / "base")
    assert verdict.largest_change > 0.01
    assert verdict.largest_difference < 1e-5
