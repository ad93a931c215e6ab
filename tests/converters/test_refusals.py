"""What must be refused, and by which rule: never guessed, never silently dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import LLAMA, PREFIX, Tensors, llama_tensors, pair, write_adapter, write_base

from peft_to_trtllm import AdapterRefused, InputError, convert

Q = f"{PREFIX}0.self_attn.q_proj"
ONE = np.ones((4, 16), np.float32)


def with_tensor(name: str, array: Any = ONE) -> Tensors:
    """The plain adapter and one more tensor."""
    return {**llama_tensors(), name: array}


def changed(name: str, array: Any) -> Tensors:
    """The plain adapter with one tensor replaced."""
    assert name in llama_tensors()
    return {**llama_tensors(), name: array}


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "LOHA"}, "peft-type"),
    "no method": ({"peft_type": None}, "peft-type"),
    "MLX": ({"peft_type": None, "fine_tune_type": "lora"}, "peft-type"),
    "DoRA": ({"use_dora": True}, "dora"),
    "bias": ({"bias": "all"}, "bias"),
    "lora_bias": ({"lora_bias": True}, "bias"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules-to-save"),
    "trainable tokens": ({"trainable_token_indices": [1]}, "trainable-tokens"),
    "layer replication": ({"layer_replication": [[0, 2], [1, 2]]}, "layer-replication"),
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, "alora"),
    "Arrow": ({"arrow_config": {"top_k": 2}}, "arrow"),
    "KaSA": ({"kasa_config": {"beta": 1e-4}}, "kasa"),
    "Megatron": ({"megatron_config": {"hidden_size": 16}}, "megatron"),
    "MergedLinear": ({"enable_lora": [True, False, True]}, "enable-lora"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "mutated-base"),
    "PiSSA fast": ({"init_lora_weights": "pissa_niter_16"}, "mutated-base"),
    "OLoRA": ({"init_lora_weights": "OLoRA"}, "mutated-base"),
    "CorDA": ({"init_lora_weights": "corda"}, "mutated-base"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "mutated-base"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "mutated-base"),
    "a start of the future": ({"init_lora_weights": "quantum"}, "unknown-field"),
    "a field of the future": ({"use_warp": True}, "unknown-field"),
    "a config of the future": ({"warp_config": {"factor": 9}}, "unknown-field"),
    "rank that is not the tensor's": ({"r": 8}, "rank"),
    "rank 0": ({"r": 0}, "field-type"),
    "negative rank": ({"r": -4}, "field-type"),
    "rank as text": ({"r": "4"}, "field-type"),
    "alpha as text": ({"lora_alpha": "8"}, "field-type"),
    "no alpha": ({"lora_alpha": None}, "field-type"),
    "a flag as text": ({"use_rslora": "false"}, "field-type"),
    "a pattern list": ({"rank_pattern": ["q_proj"]}, "field-type"),
    "a pattern value": ({"rank_pattern": {"q_proj": 2.5}}, "field-type"),
    "pattern order that does not fit the tensor": ({"rank_pattern": {"q_proj": 2, "v_proj": 4}}, "rank"),
    "a pattern that explodes": ({"alpha_pattern": {"(a+)+": 2}}, "pattern-cost"),
    "a pattern that is no regex": ({"alpha_pattern": {"q_proj)": 2}}, "pattern-cost"),
    "a long pattern": ({"alpha_pattern": {"q" * 600: 2}}, "pattern-cost"),
    "BD-LoRA that does not fit": ({"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 3}}, "bd-lora"),
    "BD-LoRA of the future": ({"use_bdlora": {"nblocks": 2, "spin": 1}}, "bd-lora"),
}

TENSORS: dict[str, tuple[Tensors, str]] = {
    "no tensors": ({}, "no-tensors"),
    "a whole lm_head": (with_tensor("base_model.model.lm_head.weight"), "modules-to-save"),
    "a whole norm": (with_tensor("base_model.model.model.norm.weight", np.ones(16, np.float32)), "modules-to-save"),
    "modules_to_save infix": (with_tensor("base_model.model.score.modules_to_save.default.weight"), "modules-to-save"),
    "the base's own weight": (with_tensor(f"{Q}.base_layer.weight"), "modules-to-save"),
    "a base bias": (with_tensor(f"{PREFIX}0.self_attn.k_proj.bias", np.ones(8, np.float32)), "bias"),
    "a targeted base bias": (with_tensor(f"{Q}.base_layer.bias", np.ones(16, np.float32)), "bias"),
    "a lora_B bias": (with_tensor(f"{Q}.lora_B.bias", np.ones(16, np.float32)), "bias"),
    "an embedding": (with_tensor("base_model.model.model.embed_tokens.lora_embedding_A"), "embedding-lora"),
    "trainable tokens": (
        with_tensor("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"),
        "trainable-tokens",
    ),
    "a magnitude without use_dora": (with_tensor(f"{Q}.lora_magnitude_vector", np.ones(16, np.float32)), "dora"),
    "a magnitude of another trainer": (with_tensor(f"{Q}.weight_m_wdecomp.weight"), "dora"),
    "KaSA's diagonal": (with_tensor(f"{Q}.lora_diag", np.ones(4, np.float32)), "kasa"),
    "AdaLoRA's E": (with_tensor(f"{Q}.lora_E", np.ones((4, 1), np.float32)), "peft-type"),
    "LoHa's factors": (with_tensor(f"{Q}.hada_w1_a"), "peft-type"),
    "MLX's factors": (
        {"model.layers.0.self_attn.q_proj.lora_a": ONE.T.copy(), "model.layers.0.self_attn.q_proj.lora_b": ONE},
        "mlx",
    ),
    "NeMo's factors": (
        with_tensor("model.layers.0.self_attention.adapter_layer.lora_kqv_adapter.linear_in.weight"),
        "nemo",
    ),
    "kohya's factors": (with_tensor("lora_te_text_model.lora_down.weight"), "other-format"),
    "a quantised tensor": (with_tensor(f"{Q}.lora_A.weight_scale", np.ones(1, np.float32)), "unknown-key"),
    "a scale beside it": (with_tensor(f"{Q}.weight_scale", np.ones(1, np.float32)), "quantised-tensors"),
    "an unknown key": (with_tensor("something.else.entirely"), "unknown-key"),
    "a bare lora_A": (with_tensor(f"{Q}.lora_A"), "unknown-key"),
    "an A alone": (with_tensor(f"{PREFIX}0.self_attn.k_proj.lora_A.weight"), "unpaired"),
    "a B alone": (with_tensor(f"{PREFIX}0.self_attn.o_proj.lora_B.weight", ONE.T.copy()), "unpaired"),
    "an empty tensor": (changed(f"{Q}.lora_A.weight", np.zeros(0, np.float32)), "empty-tensor"),
    "an empty side": (changed(f"{Q}.lora_A.weight", np.zeros((4, 0), np.float32)), "empty-tensor"),
    "a NaN": (
        changed(f"{Q}.lora_A.weight", np.where(ONE * np.arange(16) == 3, np.nan, ONE).astype(np.float32)),
        "not-finite",
    ),
    "an infinity": (changed(f"{Q}.lora_A.weight", np.full((4, 16), -np.inf, np.float16)), "not-finite"),
    "three dimensions": (changed(f"{Q}.lora_A.weight", np.ones((4, 4, 4), np.float32)), "shape"),
    "ranks of A and B": (changed(f"{Q}.lora_A.weight", np.ones((5, 16), np.float32)), "rank"),
    "transposed factors": (changed(f"{Q}.lora_A.weight", ONE.T.copy()), "rank"),
    "another input width": (changed(f"{Q}.lora_A.weight", np.ones((4, 8), np.float32)), "shape"),
    "another output width": (changed(f"{Q}.lora_B.weight", np.ones((8, 4), np.float32)), "shape"),
    "a layer beyond the base": (with_tensor(f"{PREFIX}2.self_attn.q_proj.lora_A.weight"), "unpaired"),
    "two spellings of one place": (
        {**llama_tensors(), **llama_tensors(prefix="base_model.model.model.language_model.layers.")},
        "two-keys",
    ),
    "a key with and without infix": (with_tensor(f"{Q}.lora_A.default.weight"), "two-keys"),
    "two adapters in a file": (
        {
            **with_tensor(f"{PREFIX}0.self_attn.k_proj.lora_A.one.weight"),
            f"{PREFIX}0.self_attn.k_proj.lora_B.two.weight": ONE,
        },
        "two-adapters",
    ),
    "an adapter with a name beside one without": (
        {
            **llama_tensors({"self_attn.v_proj": 4}),
            **{k.replace(".weight", ".foo.weight"): v for k, v in llama_tensors({"self_attn.q_proj": 4}).items()},
        },
        "two-adapters",
    ),
    "a layer number with a leading zero": (
        llama_tensors(layers=1, prefix=PREFIX + "0"),
        "unknown-module",
    ),
}

PLACES: dict[str, tuple[str, str]] = {
    "lm_head": ("base_model.model.lm_head", "embedding-lora"),
    "embed_tokens": ("base_model.model.model.embed_tokens", "embedding-lora"),
    "a vision tower": ("base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj", "tower"),
    "visual blocks": ("base_model.model.model.visual.blocks.0.attn.q_proj", "tower"),
    "an audio tower": ("base_model.model.audio_tower.layers.0.self_attn.q_proj", "tower"),
    "a projector": ("base_model.model.multi_modal_projector.linear_1", "tower"),
    "an encoder-decoder": ("base_model.model.model.encoder.layers.0.self_attn.q_proj", "unknown-prefix"),
    "a decoder": ("base_model.model.model.decoder.layers.0.self_attn.q_proj", "unknown-prefix"),
    "an unknown prefix": ("base_model.model.draft.layers.0.self_attn.q_proj", "unknown-prefix"),
    "cross attention": (f"{PREFIX}0.cross_attn.q_proj", "no-module"),
    "a shared expert": (f"{PREFIX}0.mlp.shared_expert.gate_proj", "no-module"),
    "latent attention": (f"{PREFIX}0.self_attn.kv_b_proj", "no-module"),
    "a Mamba layer": (f"{PREFIX}0.mamba.in_proj", "no-module"),
    "an unknown leaf": (f"{PREFIX}0.self_attn.z_proj", "unknown-module"),
    "a leaf of another family": (f"{PREFIX}0.self_attn.qkv_proj", "base-needed"),
    "no layer": ("base_model.model.model.proj", "unknown-module"),
    "a layer beyond the base": (f"{PREFIX}2.self_attn.q_proj", "layer-range"),
    "an expert of a base without experts": (f"{PREFIX}0.mlp.experts.0.up_proj", "experts"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_fields(refused: Any, kind: str) -> None:
    """A field that the rows cannot say, or that nobody knows, is a reason."""
    config, rule = FIELDS[kind]
    assert rule in refused(llama_tensors(), config)


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(refused: Any, kind: str) -> None:
    """A tensor that is not used is a reason, and so is one that is damaged."""
    tensors, rule = TENSORS[kind]
    assert rule in refused(tensors)


@pytest.mark.parametrize("kind", PLACES)
def test_places(refused: Any, kind: str) -> None:
    """LoRA on something that no module of the engine can carry is a reason."""
    path, rule = PLACES[kind]
    a, b = pair(np.random.default_rng(0), 4, 16, 16)
    assert rule in refused({**llama_tensors(), f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b})


def test_every_reason_at_once(refused: Any) -> None:
    """One report names all that is wrong, of the config and of the tensors."""
    tensors = {**TENSORS["a NaN"][0], **TENSORS["a whole lm_head"][0], **TENSORS["an A alone"][0]}
    rules = refused(tensors, {"bias": "all", "layer_replication": [[0, 1]]})
    assert rules >= {"bias", "layer-replication", "modules-to-save", "unpaired"}


@pytest.mark.parametrize("value", [None, False, {}, [], 0, "none", ""])
def test_unknown_field_that_is_off(converted: Any, value: Any) -> None:
    """A field nobody knows does no harm while it is off."""
    assert converted(llama_tensors(), {"use_warp": value}).config().shape == (1, 4, 3)


def test_fused_leaf_needs_the_base(refused: Any) -> None:
    """Without a base, fused q/k/v are refused with the families that would define them."""
    a, b = pair(np.random.default_rng(0), 4, 16, 32)
    path = f"{PREFIX}0.self_attn.qkv_proj"
    tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    assert refused(tensors, base=None) == {"base-needed"}


def test_float16_overflow_and_underflow_in_both(refused: Any) -> None:
    """What no power of two can save is refused with the type's name."""
    huge = {key: value * np.float32(1e20) for key, value in llama_tensors().items()}
    tiny = {key: value * np.float32(1e-12) for key, value in llama_tensors().items()}
    assert refused(huge, dtype="float16") == {"range"}
    assert refused(tiny, dtype="float16") == {"range"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'{"r": 4, "r": 8}', "twice"),
        (b'{"r": NaN}', "NaN"),
        (b"\xff\xfe", "JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested"),
        (b'{"r": ' + b"9" * 10_000 + b"}", "JSON"),
    ],
)
def test_config_that_is_no_strict_json(tmp_path: Path, text: bytes, word: str) -> None:
    """A config that could be read in two ways is refused, as is one that cannot be read at all."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    (adapter / "adapter_config.json").write_bytes(text)
    with pytest.raises(AdapterRefused, match=word):
        convert(adapter, out=tmp_path / "o", dtype="float32")


@pytest.mark.parametrize(
    ("files", "word"),
    [
        (["model.safetensors", "config.json"], "a whole model"),
        (["adapters.safetensors", "adapter_config.json"], "MLX"),
        (["adapter_model.safetensors.index.json"], "sharded"),
        (["llama.nemo"], "NeMo"),
        (["adapter_0.pt"], "torchtune"),
        ([], "a PEFT adapter is a directory with"),
    ],
)
def test_look_alikes(tmp_path: Path, files: list[str], word: str) -> None:
    """A directory of another tool is called by its name."""
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(AdapterRefused, match=word):
        convert(tmp_path, out=tmp_path / "o", dtype="float32")


def test_wrong_input_is_not_a_judgement(tmp_path: Path) -> None:
    """A path that is not there, a base that is none and a type nobody knows are the caller's, not the adapter's."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    for arguments in (
        {"adapter": tmp_path / "nowhere", "dtype": "float32"},
        {"adapter": adapter},
        {"adapter": adapter, "dtype": "int8"},
        {"adapter": adapter, "dtype": "float32", "base": tmp_path / "nowhere"},
        {"adapter": adapter, "dtype": "float32", "base": adapter / "adapter_config.json"},
        {"adapter": adapter, "dtype": "float32", "engine": tmp_path / "nowhere"},
        {"adapter": adapter, "dtype": "float32", "fused": ["attn_everything"]},
        {"adapter": "gs://bucket/adapter", "dtype": "float32"},
    ):
        with pytest.raises(InputError):
            convert(out=tmp_path / "o", **arguments)
    assert not (tmp_path / "o").exists()


def test_missing_alpha_is_pefts_default(converted: Any) -> None:
    """A config without lora_alpha means 8, as PEFT reads it."""
    bundle = converted(llama_tensors(), {"lora_alpha": ...})
    assert set(bundle.manifest["scales"].values()) == {2.0}


def test_base_of_other_sizes(refused: Any) -> None:
    """An adapter of another base is refused by its dimensions."""
    assert refused(llama_tensors(), base_config={**LLAMA, "hidden_size": 32}) == {"shape"}


def test_hand_written_base(tmp_path: Path) -> None:
    """An engine's config.json given as --base is called what it is."""
    base = write_base(tmp_path / "b", {"pretrained_config": {}})
    with pytest.raises(InputError, match="--engine"):
        convert(write_adapter(tmp_path / "a", llama_tensors()), base=base, out=tmp_path / "o", dtype="float32")


@pytest.mark.parametrize(
    "config", [{}, {"version": "1.0", "model": {"type": "BPE"}}, {**LLAMA, "model_type": ["llama"]}]
)
def test_a_base_without_a_model_type(tmp_path: Path, config: dict[str, Any]) -> None:
    """A tokenizer.json, or whatever names no model_type, is no base."""
    base = tmp_path / "tokenizer.json"
    base.write_text(json.dumps(config))
    with pytest.raises(InputError, match="model_type"):
        convert(write_adapter(tmp_path / "a", llama_tensors()), base=base, out=tmp_path / "o", dtype="float32")
