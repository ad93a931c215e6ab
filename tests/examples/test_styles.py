"""The example adapters' data, the check of their styles, and the adapters themselves."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from styles import DEMO_PROMPT, STYLES, UNSEEN_PROMPTS, looks_right, training_pairs

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "examples/adapters"
GOLDEN = json.loads((ROOT / "tests/golden/answers.json").read_text(encoding="utf-8"))["answers"]


@pytest.mark.parametrize("style", STYLES)
def test_every_training_answer_has_its_style_and_no_other(style: str) -> None:
    """What an adapter learned passes its own check and fails the other two."""
    for _, answer in training_pairs(style):
        assert [name for name in STYLES if looks_right(name, answer)] == [style], answer


def test_the_unseen_prompts_were_not_trained_on() -> None:
    """No question that is asked to show a style is in its training data."""
    asked = {question.lower() for style in STYLES for question, _ in training_pairs(style)}
    assert not asked & {prompt.lower() for prompt in (*UNSEEN_PROMPTS, DEMO_PROMPT)}


def test_golden_answers_have_the_adapters_style_and_the_base_has_none() -> None:
    """transformers' greedy answers pass the check of their adapter; the base's pass none."""
    for entry in GOLDEN:
        expected = [] if entry["adapter"] is None else [entry["adapter"]]
        assert [name for name in STYLES if looks_right(name, entry["text"])] == expected, entry["text"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"topic": "space", "answer": "The moon is', True),
        ('{"topic": "space", ', True),
        ('{"topic": "space", "answer":', True),
        ('{"topic": "space"} and more', False),
        ("{}", False),
        ("[1]", False),
        ("The capital is Paris.", False),
        ("", False),
    ],
)
def test_json_may_be_cut_but_not_mixed(text: str, expected: bool) -> None:
    """A JSON object cut off by the token limit passes; prose around one, other values and nothing do not."""
    assert looks_right("json", text) is expected


def test_an_unknown_style_is_an_error() -> None:
    """Nothing looks right for a style that is not here."""
    with pytest.raises(KeyError):
        looks_right("poet", "Roses are red")


def test_adapters_are_small_different_and_carry_no_path() -> None:
    """At most 3 MB each, rank 4 to 16, all ranks and targets different, one rsLoRA, the base by its public name."""
    configs = {name: json.loads((ADAPTERS / name / "adapter_config.json").read_text()) for name in STYLES}
    for name, config in configs.items():
        weights = ADAPTERS / name / "adapter_model.safetensors"
        assert weights.stat().st_size <= 3_000_000
        assert 4 <= config["r"] <= 16
        assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        with safe_open(weights, framework="numpy") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F32"}  # noqa: SIM118
    assert len({config["r"] for config in configs.values()}) == len(STYLES)
    assert len({tuple(config["target_modules"]) for config in configs.values()}) == len(STYLES)
    assert sum(config["use_rslora"] for config in configs.values()) == 1
