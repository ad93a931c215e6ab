"""Answers equal transformers' in float32: base and adapters, alone and mixed in one batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_engine import build_engine
from trtllm_lora import EngineShape, pack

pytestmark = pytest.mark.oracle
TOKENS = 48


def test_base_answers_equal_transformers(client: Any, oracle: Any, prompts: Any) -> None:
    """Greedy tokens of the base are transformers', prompts short and longer than a block."""
    for prompt in [*prompts(4), list(range(3, 100))]:
        assert oracle.greedy(prompt, TOKENS) == client.tokens(prompt, TOKENS)


def test_mixed_batch_equals_transformers(client: Any, oracle: Any, prompts: Any, make_rows: Any) -> None:
    """Sixteen requests with six adapters of different rank and modules, and the base, answered in one batch."""
    adapters = {
        1: make_rows(1, rank=1),
        2: make_rows(2, rank=16),
        3: make_rows(3, modules=("attn_q", "attn_v")),
        4: make_rows(4, modules=("mlp_gate",), layers=(1,), rank=8),
        5: make_rows(5, modules=("attn_dense", "mlp_4h_to_h", "mlp_h_to_4h"), rank=3),
        6: make_rows(6, modules=("attn_k",)),
    }
    tasks = [None, 1, 2, 3, 4, 5, 6, None, 1, 1, 2, 3, 4, 5, 6, 6]
    asked = [
        client.ask(prompt, TOKENS, task=task, adapter=None if task is None else pack(adapters[task], "float32"))
        for prompt, task in zip(prompts(16), tasks, strict=True)
    ]
    for prompt, task, request in zip(prompts(16), tasks, asked, strict=True):
        rows = () if task is None else adapters[task]
        assert oracle.greedy(prompt, TOKENS, rows) == request.answer().tokens, f"adapter {task}"


def test_dora_rows_equal_transformers(client: Any, oracle: Any, prompts: Any, make_rows: Any) -> None:
    """Magnitudes scale base and delta; DoRA, LoRA and base run side by side."""
    adapters = {1: make_rows(1, dora=True), 2: make_rows(2), 3: make_rows(3, dora=True, modules=("attn_v", "mlp_gate"))}
    tasks = [1, 2, 3, None, 1]
    plain = client.tokens(prompts(1)[0], TOKENS)
    asked = [
        client.ask(prompt, TOKENS, task=task, adapter=None if task is None else pack(adapters[task], "float32"))
        for prompt, task in zip(prompts(5), tasks, strict=True)
    ]
    for prompt, task, request in zip(prompts(5), tasks, asked, strict=True):
        rows = () if task is None else adapters[task]
        assert oracle.greedy(prompt, TOKENS, rows) == request.answer().tokens, f"adapter {task}"
    assert plain == client.tokens(prompts(1)[0], TOKENS)


def test_fused_modules_equal_transformers(
    tiny_base: Path, tmp_path: Path, serve: Any, oracle: Any, prompts: Any, make_rows: Any
) -> None:
    """attn_qkv and mlp_gate_up (B stacked [up; gate]) act as their separate modules would."""
    modules = ("attn_qkv", "attn_dense", "mlp_gate_up", "mlp_4h_to_h")
    engine = build_engine(tiny_base, tmp_path / "e", lora_modules=modules, max_lora_rank=8, max_seq_len=128)
    of = EngineShape.from_engine_config(engine)
    client = serve(engine)
    for seed, dora in ((1, False), (2, True)):
        rows = make_rows(seed, modules=modules, of=of, dora=dora)
        got = client.tokens(prompts(1)[0], TOKENS, task=seed, adapter=pack(rows, "float32"))
        assert oracle.greedy(prompts(1)[0], TOKENS, rows) == got


def test_logits_equal_transformers(client: Any, oracle: Any, make_rows: Any) -> None:
    """Context and generation logits are within 1e-3 of transformers', relative to the largest."""
    rows, prompt = make_rows(9), list(range(3, 80))
    names = frozenset({"output_ids", "sequence_length", "context_logits", "generation_logits"})
    answer = client.ask(
        prompt,
        8,
        task=9,
        adapter=pack(rows, "float32"),
        streaming=False,
        outputs=names,
        return_context_logits=True,
        return_generation_logits=True,
    ).answer()
    whole = oracle.logits(answer.tokens, rows)
    context, generation = answer.output("context_logits")[0][0], answer.output("generation_logits")[0][0, 0]
    scale = np.abs(whole).max()
    assert context.shape == (len(prompt), 256)
    assert np.abs(context - whole[: len(prompt)]).max() < 1e-3 * scale
    assert np.abs(generation - whole[len(prompt) - 1 : -1]).max() < 1e-3 * scale


def test_interleaved_adapters_never_mix(client: Any, prompts: Any, make_adapter: Any) -> None:
    """A thousand requests of two adapters, interleaved, give each what it gives alone."""
    adapters = {1: make_adapter(1), 2: make_adapter(2)}
    some = prompts(10)
    alone = {
        (task, i): client.tokens(prompt, 4, task=task, adapter=adapter)
        for task, adapter in adapters.items()
        for i, prompt in enumerate(some)
    }
    assert all(alone[1, i] != alone[2, i] for i in range(10))
    asked = [((n % 2 + 1, n // 2 % 10), client.ask(some[n // 2 % 10], 4, task=n % 2 + 1)) for n in range(1000)]
    assert all(alone[key] == request.answer().tokens for key, request in asked)


def _variant(base: Path, out: Path, **changes: Any) -> Path:
    shutil.copytree(base, out)
    config = json.loads((out / "config.json").read_text())
    config.update(changes)
    (out / "config.json").write_text(json.dumps(config))
    return out


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "beta_fast": 16,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_equals_transformers(
    kind: str, tiny_base: Path, tmp_path: Path, serve: Any, oracle_of: Callable[[Path], Any]
) -> None:
    """Every supported RoPE scaling gives transformers' tokens, past the original length too."""
    base = _variant(tiny_base, tmp_path / "base", rope_scaling=ROPES[kind])
    client = serve(build_engine(base, tmp_path / "engine", lora_modules=(), max_seq_len=256))
    prompt = list(range(3, 130))
    assert oracle_of(base).greedy(prompt, TOKENS) == client.tokens(prompt, TOKENS)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_other_families_equal_transformers(
    family: str, tmp_path: Path, serve: Any, oracle_of: Callable[[Path], Any]
) -> None:
    """Untied heads, wide heads, one key/value head and attention biases."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    config = {
        "llama": lambda: transformers.LlamaConfig(**sizes, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
        "mistral": lambda: transformers.MistralConfig(**sizes, num_key_value_heads=1, head_dim=32),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, num_key_value_heads=2),
    }[family]()
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.to(torch.bfloat16 if family == "mistral" else torch.float32).save_pretrained(tmp_path / "base")
    client = serve(build_engine(tmp_path / "base", tmp_path / "engine", lora_modules=(), max_seq_len=128))
    prompt = list(range(3, 50))
    assert oracle_of(tmp_path / "base").greedy(prompt, TOKENS) == client.tokens(prompt, TOKENS)
