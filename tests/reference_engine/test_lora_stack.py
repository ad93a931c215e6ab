"""The stack holds exactly the adapters of the step, whoever came and went before."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from reference_engine.batch import group_tokens
from reference_engine.lora_sites import lora_sites
from reference_engine.lora_stack import BASE, LoraStack
from trtllm_lora import MODULES, EngineShape, Row, dims

MODULE_SETS = (
    ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"),
    ("attn_q", "attn_v"),
    ("mlp_gate",),
    ("attn_qkv", "attn_q", "mlp_gate_up"),
)
SHAPE = EngineShape.from_hf_config(
    {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
    },
    dtype="float32",
    lora_modules=(*MODULE_SETS[0], "attn_qkv", "mlp_gate_up"),
)
TASKS = range(1, 7)


def _adapter(seed: int) -> tuple[Row, ...]:
    rng = np.random.default_rng(seed)
    rows = []
    for layer in range(2):
        for name in MODULE_SETS[seed % 4]:
            rank, (d_in, d_out) = int(rng.integers(1, 9)), dims(name, SHAPE)
            a, b = rng.standard_normal((rank, d_in), np.float32), rng.standard_normal((d_out, rank), np.float32)
            magnitude = rng.standard_normal(d_out).astype(np.float32) if seed % 5 == 0 else None
            rows.append(Row(MODULES[name].id, layer, a, b, magnitude))
    return tuple(rows)


def _expected(rows: tuple[Row, ...], layer: int, site: Any) -> tuple[Any, Any]:
    """(delta [in, out], magnitude [out]) of a site by plain sums over its rows."""
    delta, magnitude = np.zeros((site.d_in, site.d_out), np.float32), np.ones(site.d_out, np.float32)
    begins = np.cumsum([0, *site.widths])
    for row in rows:
        name = next(n for n, m in MODULES.items() if m.id == row.module_id)
        if row.layer != layer or name not in (*site.parts, site.fused):
            continue
        order = site.fused_order if name == site.fused else (site.parts.index(name),)
        columns = np.concatenate([np.arange(begins[part], begins[part + 1]) for part in order])
        delta[:, columns] += np.matmul(row.b_OR, row.a_RI).T
        if row.magnitude_O is not None:
            magnitude[columns] = row.magnitude_O
    return delta, magnitude


def _check(stack: LoraStack, task: int | None, rows: tuple[Row, ...]) -> None:
    arrays, place = dict(stack.arrays(dora=True)), stack.place(task)
    for layer in range(2):
        for site in lora_sites(SHAPE):
            delta, magnitude = _expected(rows, layer, site)
            np.testing.assert_array_equal(arrays[f"{layer}.{site.name}.magnitude"][place], magnitude)
            if task is BASE:
                continue
            a = arrays[f"{layer}.{site.name}.a"][place - 1]
            rank = a.shape[0] // len(site.parts)
            blocks = [
                a[part * rank : (part + 1) * rank].T @ arrays[f"{layer}.{site.name}.b{part}"][place - 1].T
                for part in range(len(site.parts))
            ]
            np.testing.assert_allclose(np.concatenate(blocks, axis=1), delta, atol=1e-4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.sampled_from([BASE, *TASKS]), min_size=1, max_size=6), min_size=1, max_size=8), st.data())
def test_every_step_holds_its_adapters(steps: list[list[int | None]], data: st.DataObject) -> None:
    """After any history each held adapter's matrices give its own deltas, in as many places as adapters."""
    stack = LoraStack(lora_sites(SHAPE), 2, 6)
    stored = {task: _adapter(task) for task in TASKS}
    for tasks in steps:
        if data.draw(st.booleans()):  # an adapter was evicted and pushed again with other weights
            stored[data.draw(st.sampled_from(TASKS))] = _adapter(data.draw(st.integers(10, 30)))
        version, before = stack.version, _where(stack)
        stack.hold(tasks, stored.__getitem__)
        assert stack.version != version or _where(stack) == before
        adapters = set(tasks) - {BASE}
        assert stack.num_held == len(adapters)
        assert sorted(stack.place(task) for task in adapters) == list(range(1, stack.num_held + 1))
        assert stack.place(BASE) == 0
        for task in set(tasks):
            _check(stack, task, () if task is BASE else stored[task])
        version = stack.version
        stack.hold(tasks, stored.__getitem__)
        assert stack.version == version


def _where(stack: LoraStack) -> list[Any]:
    """Where the matrices lie, and their shapes: constants of a stack without adapters aside."""
    if stack.only_base:
        return []
    return [(array.ctypes.data, array.shape) for name, array in stack.arrays(dora=False)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40).filter(any))
def test_tokens_are_grouped_and_found_again(adapters: list[int]) -> None:
    """Each token stands in its adapter's group, and its place points back at it; groups are powers of two wide."""
    adapter_T = np.array(adapters, np.int32)
    groups, place = group_tokens(adapter_T, 4)
    adapted = np.flatnonzero(adapter_T)
    assert groups.reshape(-1)[place[adapted] - 1].tolist() == adapted.tolist()
    assert (1 + (place[adapted] - 1) // groups.shape[1]).tolist() == adapter_T[adapted].tolist()
    assert not place[adapter_T == 0].any()
    busiest, width = np.bincount(adapter_T)[1:].max(), groups.shape[1]
    assert busiest <= width < 2 * busiest
    assert width & (width - 1) == 0
