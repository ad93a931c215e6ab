"""What the config says of the modules in the file, beside what PEFT makes of the same config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.peft_files import llama_tensors, write_adapter, write_base
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_to_trtllm import inspect
from peft_to_trtllm.report import Report
from peft_to_trtllm.targeting import Targeting

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
        ({"target_modules": []}, 4),
        ({"target_modules": None}, 0),
        ({"target_modules": None, "target_parameters": ["v_proj.weight"]}, 2),
        ({"target_modules": "all-linear"}, 0),
        ({"target_modules": r".*\.q_proj"}, 2),
        ({"target_modules": r".*\.(q|v)_proj"}, 0),
        ({"target_modules": r"(a+)+"}, 1),
        ({"target_modules": r"(?:.*?(?:vision|language|self_attn).*?(?:q_proj|v_proj).*?)|(?:.*?a.*?b.*?c.*?)"}, 0),
        ({"target_modules": "(?:ab|cd)?" * 20 + ".*" * 5 + "z"}, 0),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": []}, 0),
        ({"target_modules": [Q, "v_proj"], "layers_to_transform": [1]}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1], "layers_pattern": "h"}, 4),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]}, 0),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.v_proj"]}, 1),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.1\..*"}, 2),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": "proj"}, 0),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": r"(a+)+"}, 1),
        ({"exclude_modules": "(?:ab|cd)?" * 20 + ".*" * 5 + "z"}, 0),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0, "layers_pattern": "(?P<layer>layers)"}, 1),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0, "layers_pattern": [3]}, 0),
        ({"target_modules": r".*_proj", "layers_to_transform": [0, 1]}, 1),
        ({"target_modules": ["q_proj", "v_proj"], "layers_pattern": "layers"}, 1),
        ({"target_modules": [], "target_parameters": ["q_proj.weight", "v_proj.weight"]}, 0),
    ],
)
def test_a_config_narrower_than_the_file(tmp_path: Path, config: dict[str, Any], modules: int) -> None:
    """What PEFT would pass over is told, one warning for each module, and converted."""
    report = inspect(write_adapter(tmp_path / "a", llama_tensors(), config), dtype="float32")
    assert report.ok
    assert report.warnings.counts["targets"] == modules


@pytest.mark.parametrize(
    ("config", "layers", "absent"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, 2, []),
        ({"target_modules": [Q, Q.replace("0", "1"), "v_proj"]}, 2, []),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "lm_head"]}, 2, ["no tensor of k_proj, lm_head"]),
        ({"target_modules": ["q_proj", "v_proj"]}, 1, 2 * ["no tensors in layers 1, where"]),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}, 1, []),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.1\..*"}, 1, []),
        ({"target_modules": r".*\.[01]\.self_attn\.q_proj|.*\.0\..*v_proj"}, 1, ["no tensors in layers 1, where"]),
        ({}, 1, []),
    ],
)
def test_a_config_wider_than_the_file(tmp_path: Path, config: dict[str, Any], layers: int, absent: list[str]) -> None:
    """What the config targets and the file lacks is told, by name or by leaf and layers, and refuses nothing."""
    adapter = write_adapter(tmp_path / "a", llama_tensors(layers=layers), config)
    report = inspect(adapter, base=write_base(tmp_path / "b"), dtype="float32")
    assert report.ok
    told = [problem.found for problem in report.warnings.kept if problem.rule == "absent"]
    assert len(told) == len(absent)
    assert all(text.startswith(wanted) for text, wanted in zip(told, absent, strict=True))


def test_a_file_without_a_module(tmp_path: Path) -> None:
    """Where nothing of the file lands in the model, that alone is told."""
    tensors = llama_tensors(prefix="base_model.model.model.vision_tower.layers.")
    report = inspect(write_adapter(tmp_path / "a", tensors, {"target_modules": ["q_proj"]}), dtype="float32")
    assert set(report.problems.counts) == {"tower"}
    assert not report.warnings


HEADS = ("model.layers", "model.language_model.layers", "transformer.h")
LEAVES = ("self_attn.q_proj", "mlp.experts.3.up_proj", "mlp.down_proj", "attn.c_proj")
PATHS = [f"{head}.{layer}.{leaf}" for head in HEADS for layer in (0, 1, 12) for leaf in LEAVES]
NAMES = st.sampled_from(
    ["q_proj", "proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", "1.mlp.down_proj", "up_proj", "3.up_proj",
     "c_proj", "mlp", "q.proj"]
)  # fmt: skip
REGEXES = st.sampled_from([r".*proj", r".*\.[01]\..*", r"model\.layers\.1.*", "q_proj", r".*(q|up)_proj", r".*mlp.*"])
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "target_modules": st.lists(NAMES, max_size=3) | REGEXES | st.none(),
        "exclude_modules": st.lists(NAMES, max_size=2) | REGEXES | st.none() | st.just(""),
        "layers_to_transform": st.none() | st.integers(0, 3) | st.lists(st.sampled_from([0, 1, 3, 12]), max_size=2),
        "layers_pattern": st.none()
        | st.sampled_from(["layers", "h", "experts", ""])
        | st.lists(st.just("h"), max_size=1),
        "target_parameters": st.none() | st.just(["nothing.weight"]),
    },
)


@pytest.mark.oracle
@settings(max_examples=400, deadline=None)
@given(CONFIGS)
def test_peft_targets_the_same(config: dict[str, Any]) -> None:
    """Every module is targeted exactly where PEFT's own test says so."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    try:
        theirs = LoraConfig(**config)
    except ValueError:
        return  # PEFT does not load it
    if theirs.target_modules is None and theirs.target_parameters is None:
        return  # chosen by family, when a model is there
    ours = Targeting(config, Report("a"))
    for path in PATHS:
        assert ours.covers(path) == bool(check_target_module_exists(theirs, path)), path
