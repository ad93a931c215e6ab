"""The key grammar: each key is used, known and ignored, or a reason; names inside cannot confuse it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_to_trtllm.families import COMMON, FAMILIES, find_leaf, leaves_of
from peft_to_trtllm.keys import Ignored, Part, Place, Refused, parse_key, parse_path


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("base_model.model.a.lora_A.weight", Part("A", "a", "")),
        ("base_model.model.a.lora_B.default.weight", Part("B", "a", "default")),
        ("base_model.model.a.lora_B.bias", Part("bias", "a", "")),
        ("base_model.model.a.lora_magnitude_vector", Part("magnitude", "a", "")),
        ("base_model.model.a.lora_magnitude_vector.default.weight", Part("magnitude", "a", "default")),
        ("base_model.model.weight.bias.lora_A.weight", Part("A", "weight.bias", "")),
        ("base_model.model.lora_B.lora_A.weight", Part("A", "lora_B", "")),
        ("base_model.model.base_model.model.a.lora_A.weight", Part("A", "a", "")),
    ],
)
def test_used(key: str, part: Part) -> None:
    """A key is read from its end: role, path, adapter name."""
    assert parse_key(key) == part


@pytest.mark.parametrize("key", ["a.lora_velora_embed", "a.lora_monteclora_sampler.default.std"])
def test_ignored(key: str) -> None:
    """Tensors that only training used are known by name."""
    assert isinstance(parse_key(key), Ignored)


@given(st.text(max_size=60))
def test_any_text_is_one_of_three(text: str) -> None:
    """No text makes the grammar stumble."""
    meaning = parse_key(text)
    assert isinstance(meaning, Part | Ignored | Refused)
    if isinstance(meaning, Part):
        assert isinstance(parse_path(meaning.path), Place | Refused)


@given(
    st.lists(
        st.sampled_from(["lora_A", "lora_B", "weight", "default", "layers", "0", "q_proj", "bias", ""]), max_size=9
    )
)
def test_any_mix_of_its_words_is_one_of_three(words: list[str]) -> None:
    """Nor does any order of its own words."""
    meaning = parse_key(".".join(words))
    assert isinstance(meaning, Part | Ignored | Refused)


def test_place() -> None:
    """The first numbered layer word splits prefix and leaf; experts keep their number in the leaf."""
    found = parse_path("model.language_model.layers.12.mlp.experts.3.up_proj")
    assert found == Place(("model", "language_model"), 12, ("mlp", "experts", "3", "up_proj"))


def test_expert_numbers_are_found() -> None:
    """A leaf of experts means the same for every expert."""
    leaf, expert = find_leaf("mlp.experts.17.up_proj", None)
    assert (leaf, expert) == (COMMON["mlp.experts.*.up_proj"], 17)


def test_gate_and_up_are_not_swapped() -> None:
    """The naming trap: gate_proj is mlp_h_to_4h, up_proj is mlp_gate."""
    assert COMMON["mlp.gate_proj"].modules == ("mlp_h_to_4h",)
    assert COMMON["mlp.up_proj"].modules == ("mlp_gate",)
    assert FAMILIES["qwen"]["mlp.w2"].modules == ("mlp_h_to_4h",)
    assert FAMILIES["nemotron"]["mlp.up_proj"].modules == ("mlp_h_to_4h",)


def test_no_base_means_common_names_only() -> None:
    """Without a base no family's own leaf is known."""
    assert leaves_of(None) == {}
