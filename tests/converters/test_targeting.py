"""What target_modules, target_parameters and layers_to_transform say of the modules in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.peft_files import llama_tensors, write_adapter

from peft_to_trtllm import inspect

Q = "model.layers.0.self_attn.q_proj"
WRAPPED = {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]}


@pytest.mark.parametrize(
    ("pattern", "scale"),
    [({"q_proj": 32}, 2.0), ({"q_proj.weight": 32}, 8.0), ({"self_attn.q_proj.weight": 32}, 8.0), ({"weight": 6}, 1.5)],
)
def test_patterns_see_the_parameter(converted: Any, pattern: dict[str, float], scale: float) -> None:
    """A module wrapped by target_parameters is matched as `<module>.<parameter>`, as PEFT's ParamWrapper is."""
    bundle = converted(llama_tensors(), {**WRAPPED, "alpha_pattern": pattern})
    assert bundle.manifest["scales"][Q] == scale
    assert bundle.manifest["scales"][Q.replace("q_proj", "v_proj")] == 2.0


def test_a_rank_of_the_parameter(converted: Any) -> None:
    """rank_pattern follows the same rule."""
    tensors = llama_tensors({"self_attn.q_proj": 2, "self_attn.v_proj": 4})
    bundle = converted(tensors, {**WRAPPED, "rank_pattern": {"q_proj.weight": 2}})
    assert bundle.manifest["scales"][Q] == 4.0


def test_two_parameters_of_a_module(refused: Any, converted: Any) -> None:
    """Which of two parameters was wrapped cannot be told: refused where it would matter, else converted."""
    config = {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "q_proj.other"]}
    assert refused(llama_tensors(), {**config, "alpha_pattern": {"q_proj.weight": 3}}) == {"target-parameters"}
    assert converted(llama_tensors(), config).manifest["scales"][Q] == 2.0


@pytest.mark.parametrize("value", ["q_proj.weight", [1], {"a": 1}])
def test_target_parameters_of_another_type(refused: Any, value: Any) -> None:
    """Whatever is no list of names is refused, for the scale may depend on it."""
    assert refused(llama_tensors(), {"target_parameters": value}) == {"field-type"}


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, 0),
        ({"target_modules": ["q_proj"]}, 2),
        ({"target_modules": ["proj"]}, 4),
        ({"target_modules": "all-linear"}, 0),
        ({"target_modules": r".*\.q_proj"}, 2),
        ({"target_modules": r".*\.(q|v)_proj"}, 0),
        ({"target_modules": r"(a+)+"}, 1),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": []}, 0),
        ({"target_modules": [], "target_parameters": ["q_proj.weight", "v_proj.weight"]}, 0),
    ],
)
def test_a_config_narrower_than_the_file(tmp_path: Path, config: dict[str, Any], modules: int) -> None:
    """What PEFT would pass over is told, one warning for each module, and converted."""
    report = inspect(write_adapter(tmp_path / "a", llama_tensors(), config), dtype="float32")
    assert report.ok
    assert report.warnings.counts["targets"] == modules
