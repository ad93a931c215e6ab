"""Row orders held against transformers: what a change of "q of head 2" changes in the real model, and what not.

Each family's tiny random model runs with some rows of its fused weight changed, and what its attention hands to the
output projection (heads in order) is compared:

    v of kv head g   zeroed: exactly the heads of group g become zero
    q of head h      zeroed: exactly head h changes
    k of kv head g   zeroed: exactly the heads of group g change
    up               doubled: the input of down_proj doubles, exactly; gate doubled: it does not
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from peft_to_trtllm.base import base_from_config
from peft_to_trtllm.dims import Dimensions
from peft_to_trtllm.families import find_leaf
from peft_to_trtllm.report import Findings
from peft_to_trtllm.split import split_leaf

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

HEADS, HIDDEN = 4, 32
COMMON = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": 1, "n_positions": 32, "n_ctx": 32, "n_inner": 48}
BLOOM = {"n_layer": 1, "n_head": HEADS}
MPT = {"d_model": HIDDEN, "n_heads": HEADS, "n_layers": 1, "max_seq_len": 32, "expansion_ratio": 2}
QKV: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "phi3": ("phi3", {"num_key_value_heads": 2}, "self_attn.qkv_proj", "self_attn.o_proj"),
    "gpt2": ("gpt2", GPT, "attn.c_attn", "attn.c_proj"),
    "gpt_bigcode, one kv head": ("gpt_bigcode", {**GPT, "multi_query": True}, "attn.c_attn", "attn.c_proj"),
    "gpt_bigcode, all kv heads": ("gpt_bigcode", {**GPT, "multi_query": False}, "attn.c_attn", "attn.c_proj"),
    "gpt_neox": ("gpt_neox", {}, "attention.query_key_value", "attention.dense"),
    "persimmon": ("persimmon", {}, "self_attn.query_key_value", "self_attn.dense"),
    "bloom": ("bloom", BLOOM, "self_attention.query_key_value", "self_attention.dense"),
    "falcon 7b": ("falcon", {"multi_query": True}, "self_attention.query_key_value", "self_attention.dense"),
    "falcon rw": (
        "falcon",
        {"multi_query": False, "alibi": True},
        "self_attention.query_key_value",
        "self_attention.dense",
    ),
    "falcon 40b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        "self_attention.query_key_value",
        "self_attention.dense",
    ),
    "mpt": ("mpt", MPT, "attn.Wqkv", "attn.out_proj"),
    "codegen": ("codegen", {**GPT, "rotary_dim": 4}, "attn.qkv_proj", "attn.out_proj"),
}
GATE_UP = {
    "phi3": ("phi3", "mlp.gate_up_proj", "mlp.down_proj"),
    "glm": ("glm", "mlp.gate_up_proj", "mlp.down_proj"),
    "glm4": ("glm4", "mlp.gate_up_proj", "mlp.down_proj"),
}


class Probe:
    """A tiny model of one family, a fused weight of its first layer, and what arrives at a later projection."""

    def __init__(self, model_type: str, config: dict[str, Any], leaf: str, output: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.torch = torch
        torch.manual_seed(0)
        made = AutoConfig.for_model(model_type, **{**COMMON, **config})
        self.model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, dtype=torch.float64
        ).eval()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        modules = dict(self.model.named_modules())
        self.fused = next(module for name, module in modules.items() if name.endswith(f".0.{leaf}"))
        target = next(module for name, module in modules.items() if name.endswith(f".0.{output}"))
        target.register_forward_pre_hook(lambda _, inputs: self.seen.append(inputs[0].detach().numpy().copy()))
        self.seen: list[Any] = []
        if getattr(self.fused, "bias", None) is not None:
            torch.nn.init.zeros_(self.fused.bias)
        base = base_from_config(self.model.config.to_dict(), source="config.json")
        meaning, _ = find_leaf(leaf, base)
        assert meaning
        problems = Findings()
        width = self.weight().shape[0]
        pieces = split_leaf(meaning, 0, width, leaf, base, Dimensions(base, problems), problems)
        assert not problems
        self.kv_heads = base.kv_heads or 0
        self.rows = {piece.module: np.arange(width)[piece.b_rows] for piece in pieces}

    def weight(self) -> Any:
        """The fused weight as [out, in]."""
        weight = self.fused.weight
        return weight.T if type(self.fused).__name__ == "Conv1D" else weight

    @contextmanager
    def changed(self, rows: Any, factor: float) -> Iterator[None]:
        """Some rows of the fused weight multiplied."""
        with self.torch.no_grad():
            before = self.weight().clone()
            self.weight()[self.torch.from_numpy(rows)] *= factor
            yield
            self.weight().copy_(before)

    def run(self) -> Any:
        """What arrives at the later projection, [tokens, width]."""
        self.seen.clear()
        with self.torch.no_grad():
            self.model(self.torch.arange(3, 9)[None])
        return self.seen[0].reshape(-1, self.seen[0].shape[-1])[-6:]


@pytest.mark.parametrize("family", QKV)
def test_qkv_rows(family: str) -> None:
    """Rows that are said to be q, k, v of a head are that in the model."""
    probe = Probe(*QKV[family])
    plain = probe.run()
    size = HIDDEN // HEADS
    heads_of = {
        group: {h for h in range(HEADS) if h // (HEADS // probe.kv_heads) == group} for group in range(probe.kv_heads)
    }
    cases = [("attn_q", head, {head}) for head in range(HEADS)]
    cases += [(module, group, heads) for module in ("attn_k", "attn_v") for group, heads in heads_of.items()]
    for module, number, heads in cases:
        with probe.changed(probe.rows[module][number * size : (number + 1) * size], 0.0):
            found = probe.run()
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            same = np.allclose(found[:, part], plain[:, part], rtol=1e-9, atol=1e-12)
            assert same == (head not in heads), (module, number, head)
            if module == "attn_v" and head in heads:
                assert not found[:, part].any()


@pytest.mark.parametrize("family", QKV)
def test_v_rows_within_a_head(family: str) -> None:
    """Within a head the rows are in order: one v row is one column."""
    probe = Probe(*QKV[family])
    plain = probe.run()
    with probe.changed(probe.rows["attn_v"][3:4], 0.0):
        found = probe.run()
    changed = {int(c) % (HIDDEN // HEADS) for c in np.flatnonzero((found != plain).any(axis=0))}
    assert changed == {3}


@pytest.mark.parametrize("family", GATE_UP)
def test_gate_and_up_rows(family: str) -> None:
    """The half that is said to be up is multiplied, the half that is said to be gate goes through the activation."""
    model_type, leaf, output = GATE_UP[family]
    probe = Probe(model_type, {"num_key_value_heads": 2, "head_dim": 8}, leaf, output)
    plain = probe.run()
    with probe.changed(probe.rows["mlp_gate"], 2.0):
        np.testing.assert_allclose(probe.run(), 2 * plain, rtol=1e-9)
    with probe.changed(probe.rows["mlp_h_to_4h"], 2.0):
        assert not np.allclose(probe.run(), 2 * plain, rtol=1e-3)
