"""Engine directories: what is written, what is refused, and engines of other dtypes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_engine import EngineDirectoryError, UnsupportedModel, build_engine, open_engine
from reference_engine.backend import Backend
from reference_engine.settings import Settings
from reference_engine.weights import as_float32, as_kind
from trtllm_lora import EngineShape, pack


def test_config_is_the_compiled_engines(tiny_engine: Path, tiny_base: Path) -> None:
    """The three top keys, the LoRA keys that the C++ runtime reads, and a link to the base."""
    config = json.loads((tiny_engine / "config.json").read_text())
    assert list(config) == ["version", "pretrained_config", "build_config"]
    lora = config["build_config"]["lora_config"]
    assert lora["max_lora_rank"] == 16
    assert lora["lora_target_modules"][0] == "attn_q"
    assert config["build_config"]["plugin_config"]["lora_plugin"] == "float32"
    assert (tiny_engine / "base").resolve() == tiny_base.resolve()
    assert open_engine(tiny_engine).shape.max_input_len == 255


def test_building_again_replaces_the_engine(tiny_base: Path, tmp_path: Path) -> None:
    """A second build is complete under the same name; nothing is left beside it."""
    for modules in ((), ("mlp_gate",)):
        build_engine(tiny_base, tmp_path / "e", lora_modules=modules, max_seq_len=64)
    assert EngineShape.from_engine_config(tmp_path / "e").lora_modules == ("mlp_gate",)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not computed"),
    "rope": ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' is not supported"),
    "rope keys": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
    "dynamic beyond": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}},
        "dynamic is exact up to 16 positions",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act gelu"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "window": ({"sliding_window": 32}, "sliding_window 32 below max_seq_len 64"),
    "sizes": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    "length": ({"max_position_embeddings": 32}, "max_seq_len 64 exceeds max_position_embeddings 32"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_models_outside_the_family_are_refused_by_name(case: str, tiny_base: Path, tmp_path: Path) -> None:
    """Whatever would change the mathematics is refused, and nothing is written."""
    changes, text = REFUSALS[case]
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    config = json.loads((base / "config.json").read_text()) | changes
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as caught:
        build_engine(base, tmp_path / "out", max_seq_len=64)
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_impossible_lora_modules_are_refused_together(tiny_base: Path, tmp_path: Path) -> None:
    """Modules another family has, and a part of q, k, v (the builder's rule)."""
    with pytest.raises(UnsupportedModel) as caught:
        build_engine(tiny_base, tmp_path / "e", lora_modules=("moe_gate", "attn_q"), max_seq_len=64)
    assert "moe_gate" in str(caught.value)
    assert "all enabled or all disabled" in str(caught.value)


def test_broken_weights_are_told(tiny_base: Path, tmp_path: Path) -> None:
    """No weights, half a file, a file that is something else, a tensor of another shape."""
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    weights = base / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:1000], b"GIF89a" + whole[6:]):
        weights.write_bytes(content)
        with pytest.raises(EngineDirectoryError, match="not a readable safetensors file"):
            build_engine(base, tmp_path / "e", max_seq_len=64)
    weights.unlink()
    with pytest.raises(EngineDirectoryError, match=r"no model\.safetensors"):
        build_engine(base, tmp_path / "e", max_seq_len=64)
    weights.write_bytes(whole)
    config = json.loads((base / "config.json").read_text()) | {"intermediate_size": 96}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineDirectoryError, match="the config says"):
        build_engine(base, tmp_path / "e", max_seq_len=64)
    assert not (tmp_path / "e").exists()


def test_an_engine_without_its_files_is_refused(tiny_engine: Path, tmp_path: Path) -> None:
    """Weights or base missing, no config at all."""
    copy = tmp_path / "e"
    shutil.copytree(tiny_engine, copy, symlinks=True)
    (copy / "rank0.safetensors").unlink()
    (copy / "base").unlink()
    with pytest.raises(EngineDirectoryError, match=r"no rank0\.safetensors and no base"):
        open_engine(copy)
    with pytest.raises(EngineDirectoryError, match="no such file"):
        open_engine(tmp_path / "nothing")


def test_bfloat16_rounds_to_nearest_even() -> None:
    """As torch does it."""
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 1e-40, 65504.0], np.float32)
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(as_float32(as_kind(values, "BF16")), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_engines_of_other_dtypes(
    dtype: str, tiny_base: Path, tmp_path: Path, serve: Any, oracle: Any, make_rows: Any, prompts: Any
) -> None:
    """Weights, adapters and answers in the engine's dtype: the first tokens are those of float32."""
    engine = build_engine(tiny_base, tmp_path / "e", dtype=dtype, max_seq_len=256)
    client = serve(engine)
    kind = {"float16": "F16", "bfloat16": "BF16"}[dtype]
    rows = [
        type(row)(row.module_id, row.layer, as_kind(row.a_RI, kind), as_kind(row.b_OR, kind)) for row in make_rows(1)
    ]
    adapter = pack(rows, dtype)
    for prompt in prompts(4):
        assert oracle.greedy(prompt, 2) == client.tokens(prompt, 2)
        assert oracle.greedy(prompt, 2, make_rows(1)) == client.tokens(prompt, 2, task=1, adapter=adapter)


def test_an_engine_without_lora_answers_lora_requests_by_the_base(
    tiny_base: Path, tmp_path: Path, serve: Any, make_adapter: Any
) -> None:
    """`NoOpPeftCacheManager`: no check, no miss, no effect."""
    client = serve(build_engine(tiny_base, tmp_path / "e", lora_modules=(), max_seq_len=64))
    plain = client.tokens([5, 6, 7], 4)
    assert plain == client.tokens([5, 6, 7], 4, task=1)
    assert plain == client.tokens([5, 6, 7], 4, task=1, adapter=make_adapter(1))


@pytest.mark.parametrize("parameters", [{"gpt_model_type": "V1"}, {"max_beam_width": "4"}, {"decoding_mode": "eagle"}])
def test_parameters_that_cannot_be_honoured_fail_the_load(parameters: dict[str, str], tiny_engine: Path) -> None:
    """By name, as a start-up refusal."""
    from reference_engine import StartupRefused

    given = {"gpt_model_path": str(tiny_engine), **parameters}
    config = {"parameters": {key: {"string_value": value} for key, value in given.items()}}
    with pytest.raises(StartupRefused, match=next(iter(parameters))):
        Backend(Settings.from_model_config(config))
