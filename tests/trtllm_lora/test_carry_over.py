"""`engine diff`: which adapters of one engine do not serve on another, by both config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from typer.testing import CliRunner

from lora_slots.cli import application
from trtllm_lora.carry_over import adapters_carry_over
from trtllm_lora.profile import load_profile

PROFILES = Path(__file__).parents[2] / "engines" / "profiles"


def engine_config(file: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """The config.json of an engine of Llama-3.1-8B, with dotted keys changed."""
    config = load_profile(PROFILES / "llama-3.1-8b.yaml").shape().to_engine_config()
    for key, value in changes.items():
        *path, last = key.split(".")
        part = config
        for name in path:
            part = part[name]
        part[last] = value
    file.write_text(json.dumps(config, indent=1))
    return file


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"build_config.plugin_config.lora_plugin": None}, "all: the second runs no LoRA (lora_plugin None"),
        ({"build_config.lora_config.lora_target_modules": []}, "all: the second runs no LoRA"),
        ({"build_config.lora_config.max_lora_rank": 0}, "all: the second runs no LoRA"),
        ({"build_config.plugin_config.lora_plugin": "float16"}, "build it with --lora_plugin bfloat16"),
        (
            {"pretrained_config.quantization.quant_algo": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"},
            "all: the second's quantisation W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN runs no LoRA",
        ),
        ({"pretrained_config.architecture": "QWenForCausalLM"}, "(architecture QWenForCausalLM, was LlamaForCausalLM)"),
        ({"pretrained_config.vocab_size": 32000}, "(vocab_size 32000, was 128256)"),
        ({"pretrained_config.intermediate_size": 11008}, "another base model (intermediate_size 11008, was 14336)"),
        ({"pretrained_config.num_hidden_layers": 30}, "(num_layers 30, was 32)"),
        ({"build_config.lora_config.lora_target_modules": ["attn_q", "attn_k", "attn_v"]}, "those with attn_dense, "),
        ({"build_config.lora_config.max_lora_rank": 8}, "those of a rank above 8 (max_lora_rank was 64)"),
        ({"pretrained_config.mapping.pp_size": 2}, "each of 2 pipeline ranks"),
        ({"pretrained_config.quantization.quant_algo": "FP8"}, ""),
        ({"build_config.max_batch_size": 8, "build_config.plugin_config.lora_plugin": "auto"}, ""),
    ],
)
def test_diff_says_which_adapters_do_not_carry_over(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """One reason for one change, with the adapters that it stops; none where the second takes what the first took."""
    first, second = engine_config(tmp_path / "a.json"), engine_config(tmp_path / "b.json", changes)
    reasons = adapters_carry_over(first, second)
    assert len(reasons) == bool(says)
    assert all(says in reason for reason in reasons)


def test_diff_tells_both_broken_engines(tmp_path: Path) -> None:
    """Each with its own line, and exit code 2."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("{}")
    done = CliRunner().invoke(application(), ["engine", "diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 2)
    done = CliRunner().invoke(application(), ["engine", "diff", str(tmp_path / "a"), str(tmp_path / "a")])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
