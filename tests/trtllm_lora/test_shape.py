"""An engine's config.json of a stranger: read, or refused with every reason and no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_lora import EngineShape, ShapeError

HF = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
SHAPE = EngineShape.from_hf_config(HF, dtype="float16", max_lora_rank=8)


def _config(part: str, **changes: Any) -> dict[str, Any]:
    config = SHAPE.to_engine_config()
    inner = config
    for name in filter(None, part.split(".")):
        inner = inner[name]
    inner.update(changes)
    return config


def _written(tmp_path: Path, config: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return file


def test_back_and_forth(tmp_path: Path) -> None:
    """What is written is what is read."""
    assert EngineShape.from_engine_config(_written(tmp_path, SHAPE.to_engine_config())) == SHAPE


BAD: dict[str, tuple[Any, list[str]]] = {
    "a list": ([1], ["the file must be an object"]),
    "nothing": ({}, ["no pretrained_config", "no build_config", "hidden_size", "vocab_size"]),
    "parts that are lists": (
        _config("pretrained_config", mapping=[1], moe=[], quantization=[]),
        ["mapping must be an object", "moe must be an object", "quantization must be an object"],
    ),
    "a plugin list": (_config("build_config", plugin_config=[]), ["plugin_config must be an object"]),
    "no plugins": (_config("build_config", plugin_config=None), ["plugin_config must be an object"]),
    "a LoRA list": (_config("build_config", lora_config=["x"]), ["lora_config must be an object"]),
    "texts as numbers": (
        _config("build_config.lora_config", max_lora_rank="8", lora_target_modules="attn_q"),
        ["max_lora_rank must be a whole number, found '8'", "lora_target_modules must be a list"],
    ),
    "numbers in a list of names": (_config("build_config.lora_config", lora_target_modules=[1]), ["list of names"]),
    "sizes of other types": (
        _config("pretrained_config", hidden_size=-1, num_hidden_layers="2", dtype=[1], num_attention_heads=True),
        ["hidden_size", "num_hidden_layers", "dtype must be a text", "num_attention_heads"],
    ),
    "zero heads": (_config("pretrained_config", num_attention_heads=0), ["num_attention_heads must be a positive"]),
    "a type of the future": (_config("pretrained_config", dtype="int2"), ["dtype must be one of"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_every_reason(tmp_path: Path, kind: str) -> None:
    """A field of another type is a reason, beside all the others."""
    config, reasons = BAD[kind]
    with pytest.raises(ShapeError) as caught:
        EngineShape.from_engine_config(_written(tmp_path, config))
    for reason in reasons:
        assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"a":' * 100_000, '{"a": ' + "9" * 10_000 + "}", "\udcff"])
def test_no_json(tmp_path: Path, text: str) -> None:
    """What cannot be read as JSON is said in one line."""
    file = tmp_path / "config.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ShapeError, match="not readable as JSON"):
        EngineShape.from_engine_config(file)
