"""Tensors and bundles: golden bytes, round trips, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lora import (
    MODULES,
    BundleError,
    BundleFacts,
    EngineShape,
    Row,
    TensorError,
    open_bundle,
    pack,
    task_id_for,
    unpack,
    write_bundle,
)
from trtllm_lora.fit import fit_problems
from trtllm_lora.tensors import STORAGE

SHAPE = EngineShape.from_hf_config(
    {
        "vocab_size": 96,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    dtype="float16",
    max_lora_rank=4,
)
Q, UP = MODULES["attn_q"].id, MODULES["mlp_gate"].id


def row(module_id: int, layer: int, rank: int, d_in: int, d_out: int, dtype: str = "float16") -> Row:
    """A row of small whole numbers, exact in every dtype."""
    a = np.arange(rank * d_in).reshape(rank, d_in) % 7
    b = np.arange(d_out * rank).reshape(d_out, rank) % 5
    return Row(module_id, layer, a.astype(STORAGE[dtype]), b.astype(STORAGE[dtype]))


@given(
    st.lists(st.tuples(st.sampled_from(["attn_q", "attn_k", "mlp_gate"]), st.integers(0, 1), st.integers(1, 4)),
             min_size=1, max_size=6, unique_by=lambda entry: entry[:2]),
)  # fmt: skip
def test_unpack_gives_back_what_pack_took(entries: list[tuple[str, int, int]]) -> None:
    """A and B of every row survive, whatever the ranks and the padding."""
    sizes = {"attn_q": (8, 8), "attn_k": (8, 4), "mlp_gate": (8, 12)}
    rows = [row(MODULES[name].id, layer, rank, *sizes[name]) for name, layer, rank in entries]
    weights, config = pack(rows, "float16")
    assert config.shape == (1, len(rows), 3)
    assert weights.shape == (1, len(rows), max(r.size for r in rows))
    for before, after in zip(rows, unpack(weights, config, SHAPE), strict=True):
        assert (before.module_id, before.layer, before.rank) == (after.module_id, after.layer, after.rank)
        np.testing.assert_array_equal(before.a_RI, after.a_RI)
        np.testing.assert_array_equal(before.b_OR, after.b_OR)


def test_dora_rows_take_a_fourth_column() -> None:
    """is_dora is 1 for a row with a magnitude, 0 for one without, and the magnitude follows B."""
    plain, dora = row(Q, 0, 2, 8, 8), row(UP, 1, 1, 8, 12)
    magnitude = np.arange(12).astype(np.float16)
    weights, config = pack([plain, Row(UP, 1, dora.a_RI, dora.b_OR, magnitude)], "float16")
    assert config[0].tolist() == [[1, 0, 2, 0], [7, 1, 1, 1]]
    np.testing.assert_array_equal(weights[0, 1, 20:32], magnitude)
    found = unpack(weights, config, SHAPE)
    assert found[0].magnitude_O is None
    assert found[1].magnitude_O is not None
    np.testing.assert_array_equal(found[1].magnitude_O, magnitude)


def test_two_rows_for_one_place_are_refused() -> None:
    """The engine would silently use the last one."""
    with pytest.raises(TensorError, match="two rows"):
        pack([row(Q, 0, 1, 8, 8), row(Q, 0, 2, 8, 8)], "float16")


def test_golden_bytes(tmp_path: Path) -> None:
    """The files are byte for byte those of TensorRT-LLM's tools: numpy header, C order, `<f2` and `<i4`."""
    weights, config = pack([row(Q, 0, 1, 8, 8)], "float16")
    bundle = write_bundle(tmp_path, weights, config, BundleFacts("golden", "float16"))
    raw = (bundle.path / "model.lora_weights.npy").read_bytes()
    assert raw[:10] == b"\x93NUMPY\x01\x00v\x00"
    assert raw[10:128].startswith(b"{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1, 16), }")
    assert raw[128:] == np.array([0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3, 4, 0, 1, 2], "<f2").tobytes()
    assert (bundle.path / "model.lora_config.npy").read_bytes()[128:] == np.array([1, 0, 1], "<i4").tobytes()
    assert bundle.path.name == bundle.digest


def test_bfloat16_is_written_as_two_byte_void(tmp_path: Path) -> None:
    """numpy has no bfloat16; TensorRT-LLM's tools write `|V2`, and the bits come back."""
    weights, config = pack([row(Q, 0, 1, 8, 8, "bfloat16")], "bfloat16")
    bundle = write_bundle(tmp_path, weights, config, BundleFacts("bf16", "bfloat16"))
    assert b"'descr': '|V2'" in (bundle.path / "model.lora_weights.npy").read_bytes()[:128]
    np.testing.assert_array_equal(open_bundle(bundle.path).weights(), weights)


def test_digest_depends_on_content_alone(tmp_path: Path) -> None:
    """Same content, other place and time: same digest and task id; other content: another digest."""
    weights, config = pack([row(Q, 0, 1, 8, 8)], "float16")
    facts = BundleFacts("one", "float16")
    first = write_bundle(tmp_path / "a", weights, config, facts)
    second = write_bundle(tmp_path / "b", weights, config, facts)
    again = write_bundle(tmp_path / "a", weights, config, facts)
    assert first.digest == second.digest == again.digest
    assert first.task_id == second.task_id
    renamed = write_bundle(tmp_path / "c", weights, config, BundleFacts("two", "float16", tool="another 9.9"))
    assert renamed.digest == first.digest, "a name and a tool are labels, not content"
    changed = weights.copy()
    changed[0, 0, 0] += 1
    assert write_bundle(tmp_path / "a", changed, config, facts).digest != first.digest
    assert not list(tmp_path.glob("*/.writing-*"))


@given(st.binary(min_size=32, max_size=32))
def test_task_ids_fit_int32_and_are_never_zero(raw: bytes) -> None:
    """1 … 2^31-1, for every digest and every probe."""
    digest = hashlib.sha256(raw).hexdigest()
    for probe in range(8):
        assert 1 <= task_id_for(digest, probe) <= 2**31 - 1


def test_what_was_changed_after_writing_is_refused(tmp_path: Path) -> None:
    """A manifest, a size or a byte that is not what was written: each has its message."""
    weights, config = pack([row(Q, 0, 1, 8, 8)], "float16")
    bundle = write_bundle(tmp_path, weights, config, BundleFacts("victim", "float16"))
    file = bundle.path / "model.lora_weights.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(BundleError, match="differ from the manifest's sha256"):
        open_bundle(bundle.path).verify()
    file.write_bytes(raw[:8] + (b"{'descr': '<f2',((").ljust(len(raw) - 8))
    with pytest.raises(BundleError, match="not a readable array"):
        open_bundle(bundle.path).weights()
    file.write_bytes(raw[:-2])
    with pytest.raises(BundleError, match=r"has \d+ bytes, the manifest says"):
        open_bundle(bundle.path)
    manifest = json.loads((bundle.path / "bundle.json").read_text())
    (bundle.path / "bundle.json").write_text(json.dumps({**manifest, "task_id": manifest["task_id"] % 2**31 + 1}))
    with pytest.raises(BundleError, match="rule B6"):
        open_bundle(bundle.path)
    manifest["base_model"] = "another"
    (bundle.path / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="rule B5"):
        open_bundle(bundle.path)
    with pytest.raises(BundleError, match="no bundle here"):
        open_bundle(tmp_path / "nothing")


def test_fit_names_every_reason(tmp_path: Path) -> None:
    """dtype, dims, layer, rank and module are judged together, before anything is sent."""
    rows = [row(Q, 0, 8, 8, 8, "float32"), row(MODULES["attn_qkv"].id, 5, 1, 8, 16, "float32")]
    weights, config = pack(rows, "float32")
    facts = BundleFacts("misfit", "float32", modules={"attn_q": (8, 16)})
    problems = fit_problems(write_bundle(tmp_path, weights, config, facts), SHAPE)
    text = "\n".join(problems)
    for word in ("float32", "attn_q is 8 x 16", "rank 8", "attn_qkv is not enabled", "layer 5"):
        assert word in text
