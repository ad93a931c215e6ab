"""Against one engine: what its runtime would refuse, and what it would silently get wrong, is said beforehand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import (
    LLAMA,
    LLAMA_DIMS,
    LLAMA_ROW_DIMS,
    PREFIX,
    Tensors,
    assert_same,
    bundle_deltas,
    llama_deltas,
    llama_tensors,
    pair,
    values,
    write_adapter,
)

from peft_to_trtllm import AdapterRefused, convert, inspect
from trtllm_lora import EngineShape

ALL_SEVEN = dict.fromkeys(LLAMA_DIMS, 4)
SHAPE = EngineShape.from_hf_config(LLAMA, dtype="float16", max_lora_rank=8)


def engine(folder: Path, **changes: Any) -> Path:
    """An engine directory of the small Llama."""
    folder.mkdir(exist_ok=True)
    shape = dataclasses.replace(SHAPE, **changes)
    (folder / "config.json").write_text(json.dumps(shape.to_engine_config()))
    return folder


def test_an_engine_alone_is_enough(tmp_path: Path) -> None:
    """Sizes, family and type come from the engine where no base is given."""
    tensors = llama_tensors(ALL_SEVEN)
    bundle = convert(write_adapter(tmp_path / "a", tensors), engine=engine(tmp_path / "e"), out=tmp_path / "o")
    assert bundle.dtype == "float16"
    assert_same(bundle_deltas(bundle, LLAMA_ROW_DIMS), llama_deltas(tensors), "float16")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a rank above its limit": ({"max_lora_rank": 3}, "engine-rank"),
    "a module it lacks": ({"lora_modules": ("attn_q", "attn_k")}, "engine-modules"),
    "LoRA off": ({"lora_plugin": None}, "engine-lora-off"),
    "SmoothQuant": ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "engine-quantisation"),
    "a pipeline rank without rows": ({"pp_size": 2}, "engine-pipeline"),
}


@pytest.mark.parametrize("kind", BAD)
def test_refused_by_the_engine(tmp_path: Path, kind: str) -> None:
    """Each limit of an engine is checked before a file is written."""
    changes, rule = BAD[kind]
    adapter = write_adapter(tmp_path / "a", {k: v for k, v in llama_tensors().items() if ".0." in k})
    with pytest.raises(AdapterRefused) as caught:
        convert(adapter, engine=engine(tmp_path / "e", **changes), out=tmp_path / "o")
    assert set(caught.value.report.problems.counts) == {rule}


def test_rank_equal_to_the_limit_fits(tmp_path: Path) -> None:
    """r == max_lora_rank is accepted, as the runtime does."""
    report = inspect(write_adapter(tmp_path / "a", llama_tensors()), engine=engine(tmp_path / "e", max_lora_rank=4))
    assert report.ok


def test_another_type_than_the_engine(tmp_path: Path) -> None:
    """A type the engine does not have is refused with the right one."""
    report = inspect(write_adapter(tmp_path / "a", llama_tensors()), engine=engine(tmp_path / "e"), dtype="float32")
    assert report.problems.kept[0].wanted == "--dtype float16"


def test_an_engine_of_another_base(tmp_path: Path) -> None:
    """An engine's dimensions must be the adapter's."""
    other = engine(tmp_path / "e", intermediate_size=48)
    base = tmp_path / "base.json"
    base.write_text(json.dumps(LLAMA))
    report = inspect(write_adapter(tmp_path / "a", llama_tensors(ALL_SEVEN)), base=base, engine=other)
    assert report.problems.counts["engine-dims"] == 6


def test_attn_dense_where_heads_are_wider(tmp_path: Path) -> None:
    """attn_dense of Q != H is refused for an engine, and a warning without one."""
    a, b = pair(np.random.default_rng(0), 4, 32, 16)
    path = f"{PREFIX}0.self_attn.o_proj"
    adapter = write_adapter(tmp_path / "a", {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b})
    base = tmp_path / "base.json"
    base.write_text(json.dumps({**LLAMA, "head_dim": 8}))
    report = inspect(adapter, base=base, engine=engine(tmp_path / "e", head_size=8))
    assert set(report.problems.counts) == {"attn-dense"}
    alone = inspect(adapter, base=base, dtype="float16")
    assert alone.ok
    assert alone.warnings.counts["attn-dense"] == 1


def test_a_plugin_of_another_type_is_a_warning(tmp_path: Path) -> None:
    """lora_plugin and engine type that differ were seen to answer with the base: it is said, not refused."""
    report = inspect(
        write_adapter(tmp_path / "a", llama_tensors()), engine=engine(tmp_path / "e", lora_plugin="bfloat16")
    )
    assert report.ok
    assert report.warnings.counts["engine-dtype"] == 1


def fused_parts(tp: int, *sizes: int) -> list[np.ndarray[Any, Any]]:
    """Rows of each part of a fused matrix whose parts are dealt out to `tp` ranks."""
    starts = np.cumsum([0, *(size // tp for size in sizes)])
    share = sum(sizes) // tp
    return [
        np.concatenate([np.arange(rank * share + begin, rank * share + begin + size // tp) for rank in range(tp)])
        for begin, size in zip(starts, sizes, strict=False)
    ]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("leaves", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj"), ("k_proj",)])
def test_separate_to_fused_qkv(converted: Any, leaves: tuple[str, ...], tp: int) -> None:
    """q, k, v with A's of their own become one row: ranks add up, and what was not adapted stays zero."""
    tensors = llama_tensors({f"self_attn.{leaf}": 4 for leaf in leaves})
    bundle = converted(tensors, fused=["attn_qkv"], tp_size=tp)
    found = bundle_deltas(bundle, {"attn_qkv": (16, 32)})
    wanted = llama_deltas(tensors)
    q, k, v = fused_parts(tp, 16, 8, 8)
    split = {
        (layer, name): found[layer, "attn_qkv"][rows]
        for layer in (0, 1)
        for name, rows in (("attn_q", q), ("attn_k", k), ("attn_v", v))
    }
    assert_same({key: split.pop(key) for key in wanted}, wanted, "float32")
    assert not any(rest.any() for rest in split.values())
    assert set(bundle.config()[0, :, 2]) == {4 * len(leaves)}


@pytest.mark.parametrize("tp", [1, 2])
def test_gate_up_is_up_then_gate(converted: Any, tp: int) -> None:
    """mlp_gate_up holds [up; gate], dealt out rank by rank."""
    tensors = llama_tensors({"mlp.gate_proj": 4, "mlp.up_proj": 4})
    found = bundle_deltas(converted(tensors, fused=["mlp_gate_up"], tp_size=tp), {"mlp_gate_up": (16, 48)})
    up, gate = fused_parts(tp, 24, 24)
    split: dict[tuple[int, str], np.ndarray[Any, Any]] = {}
    for layer in (0, 1):
        split |= {
            (layer, "mlp_gate"): found[layer, "mlp_gate_up"][up],
            (layer, "mlp_h_to_4h"): found[layer, "mlp_gate_up"][gate],
        }
    assert_same(split, llama_deltas(tensors), "float32")


def test_fused_stays_one_a(converted: Any) -> None:
    """What was one fused matrix in the adapter keeps its rank under the fused id."""
    a, b = pair(np.random.default_rng(2), 4, 16, 48)
    path = f"{PREFIX}0.mlp.gate_up_proj"
    tensors: Tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    bundle = converted(tensors, base_config={**LLAMA, "model_type": "phi3"}, fused=["mlp_gate_up"])
    found = bundle_deltas(bundle, {"mlp_gate_up": (16, 48)})[0, "mlp_gate_up"]
    delta = 2.0 * values(b) @ values(a)
    np.testing.assert_allclose(found, np.concatenate([delta[24:], delta[:24]]), rtol=1e-5)
    assert bundle.config().tolist() == [[[18, 0, 4]]]


def test_fused_needs_the_engines_ranks(tmp_path: Path) -> None:
    """Fused rows dealt out for another number of ranks than the engine's are refused; by default they follow it."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    two = engine(tmp_path / "e", tp_size=2, lora_modules=("attn_qkv",))
    assert inspect(adapter, engine=two, fused=["attn_qkv"]).ok
    assert inspect(adapter, engine=two, fused=["attn_qkv"], tp_size=1).problems.counts["fused"] == 1
    assert "--fused attn_qkv" in inspect(adapter, engine=two).text()


def test_rows_that_ranks_cannot_share(converted: Any) -> None:
    """Rows that do not divide by the ranks are refused."""
    with pytest.raises(AdapterRefused, match="cannot share"):
        converted(llama_tensors(), fused=["attn_qkv"], tp_size=3)


OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": ({"num_heads": 8, "head_size": 2}, {}),
    "kv heads": ({"num_kv_heads": 4}, {}),
    "layers": ({"num_layers": 3}, {}),
    "family": ({}, {"architecture": "GPTNeoXForCausalLM"}),
}


@pytest.mark.parametrize("kind", OTHER)
def test_an_engine_of_another_model_than_the_base(tmp_path: Path, kind: str) -> None:
    """Base and engine must be one model: fused rows are cut by the one and read by the other."""
    changes, pretrained = OTHER[kind]
    folder = engine(tmp_path / "e", **changes)
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"].update(pretrained)
    (folder / "config.json").write_text(json.dumps(config))
    base = tmp_path / "base.json"
    base.write_text(json.dumps(LLAMA))
    report = inspect(write_adapter(tmp_path / "a", llama_tensors()), base=base, engine=folder)
    assert report.problems.counts["engine-base"] == 1
    assert kind in next(problem.found for problem in report.problems.kept if problem.rule == "engine-base")


def test_ranks_that_cannot_share(tmp_path: Path) -> None:
    """Two kv heads cannot be dealt out to four ranks, nor 24 rows to five, fused or not."""
    adapter = write_adapter(tmp_path / "a", llama_tensors(ALL_SEVEN, layers=1))
    four = inspect(adapter, engine=engine(tmp_path / "e", tp_size=4))
    assert {problem.rule for problem in four.problems.kept} == {"engine-tp"}
    assert four.problems.counts["engine-tp"] == 2
    assert inspect(adapter, engine=engine(tmp_path / "e", tp_size=5)).problems.counts["engine-tp"] == 7
    assert inspect(adapter, engine=engine(tmp_path / "e", tp_size=2)).ok
