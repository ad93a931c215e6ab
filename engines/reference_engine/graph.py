"""The decoder as one OpenVINO graph: a whole step over packed tokens of several sequences.

Attention is `PagedAttentionExtension`, OpenVINO's operator for continuous batching: it writes the step's keys and
values into the sequences' blocks and attends over them. The operator is internal (28 inputs in 2026.4); its use is
confined to `_attention`, and tests compare every path with transformers.

LoRA at a site: tokens are gathered by adapter into [n, m, in], multiplied with the stacked A [n, parts*r, in] and B
[n, out, r] of the n adapters in the step, and the deltas are gathered back into token order; delta 0 is zero, for
tokens of the base. Without adapters in the step the stack has one adapter of rank 0 and nobody takes its deltas.

Legend: T tokens, H hidden, D head size, S sequences, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from reference_engine.llama_config import LlamaConfig
from reference_engine.lora_sites import Site
from reference_engine.safetensors_map import Array, MappedTensors

BLOCK_TOKENS = 32
"""Tokens of one key/value block: the CPU operator works with this size only."""

_INT = ov.Type.i32
_EMPTY_INT = np.zeros(0, np.int32)
_EMPTY_FLOAT = np.zeros(0, np.float32)
_EMPTY_BYTE = np.zeros(0, np.uint8)


class DecoderGraph:
    """Builds the graph of one model; `model` is the result."""

    def __init__(
        self, config: LlamaConfig, weights: MappedTensors, sites: tuple[Site, ...], *, dora: bool, cache: ov.Type
    ) -> None:
        self._config, self._weights, self._cache, self._dora = config, weights, cache, dora
        self._sites = {site.name: site for site in sites}
        self._parameters: list[Any] = []
        self._steps()
        self.model = ov.Model([self._decoder().output(0)], self._parameters, "decoder")

    def _input(self, name: str, shape: list[int], kind: ov.Type = ov.Type.f32) -> Any:
        parameter = ops.parameter(ov.PartialShape(shape), kind, name)
        parameter.output(0).set_names({name})
        self._parameters.append(parameter)
        return parameter

    def _steps(self) -> None:
        """Inputs that every layer shares."""
        size = self._config.head_size
        self._hidden = self._input("hidden", [-1, self._config.hidden_size])
        self._cos, self._sin = self._input("cos", [-1, 1, size]), self._input("sin", [-1, 1, size])
        self._rows = self._input("logit_rows", [-1], _INT)
        self._lens = [self._input(name, [-1], _INT) for name in ("past", "begins", "block_ids", "block_begins")]
        self._longest = self._input("longest", [], _INT)
        if self._sites:
            self._groups, self._place = self._input("groups", [-1, -1], _INT), self._input("place", [-1], _INT)
            self._adapter = self._input("adapter", [-1], _INT) if self._dora else None

    def _decoder(self) -> Any:
        x = self._hidden
        for layer in range(self._config.num_layers):
            x = ops.add(x, self._attention(self._norm(x, f"{layer}.norm1"), layer))
            x = ops.add(x, self._mlp(self._norm(x, f"{layer}.norm2"), layer))
        x = self._norm(ops.gather(x, self._rows, _ints(0)), "norm")
        head = "embed" if self._config.tied else "head"
        return ops.matmul(x, self._weight(head), transpose_a=False, transpose_b=True)

    def _norm(self, x: Any, name: str) -> Any:
        mean = ops.reduce_mean(ops.multiply(x, x), _ints([-1]), keep_dims=True)
        root = ops.sqrt(ops.add(mean, _float(self._config.norm_epsilon)))
        return ops.multiply(ops.multiply(x, ops.divide(_float(1.0), root)), self._weight(name))

    def _attention(self, x: Any, layer: int) -> Any:
        c = self._config
        heads, kv = c.num_heads, c.num_kv_heads
        split = _ints([(heads + kv) * c.head_size, kv * c.head_size])
        qk, v = ops.variadic_split(self._linear(x, layer, "qkv"), _ints(1), split).outputs()
        split = _ints([heads * c.head_size, kv * c.head_size])
        q, k = ops.variadic_split(self._rotate(qk, heads + kv), _ints(1), split).outputs()
        shape = [-1, kv, BLOCK_TOKENS, c.head_size]
        cache = [self._input(f"{layer}.{name}", shape, self._cache) for name in ("keys", "values")]
        arguments = [
            *(q, k, v, *cache, *self._lens),
            *(_float(c.head_size**-0.5), _ints(0), _const(_EMPTY_FLOAT), self._longest),  # scale, window, alibi
            *(_const(_EMPTY_INT), _const(_EMPTY_INT), _const(_EMPTY_INT), _const(_EMPTY_FLOAT)),  # scores, rotation
            *(_const(_EMPTY_FLOAT), _ints(0), _ints(0), _const(_EMPTY_FLOAT)),  # sparse attention, sinks
            *(_ints(0), *(_const(_EMPTY_INT) for _ in range(3)), _const(_EMPTY_INT)),  # cache eviction, token types
            *(_const(_EMPTY_BYTE), _const(_EMPTY_INT)),  # query-query bias
        ]
        node = PagedAttention([a if isinstance(a, ov.Output) else a.output(0) for a in arguments])
        facts = node.get_rt_info()
        facts["num_k_heads"] = facts["num_v_heads"] = kv
        facts["k_head_size"] = facts["v_head_size"] = c.head_size
        return self._linear(node.output(0), layer, "o")

    def _rotate(self, x: Any, heads: int) -> Any:
        size = self._config.head_size
        x = ops.reshape(x, _ints([0, heads, size]), special_zero=True)
        first, second = ops.split(x, _ints(2), 2).outputs()
        turned = ops.concat([ops.multiply(second, _float(-1.0)), first], 2)
        x = ops.add(ops.multiply(x, self._cos), ops.multiply(turned, self._sin))
        return ops.reshape(x, _ints([0, heads * size]), special_zero=True)

    def _mlp(self, x: Any, layer: int) -> Any:
        gate, up = ops.split(self._linear(x, layer, "gate_up"), _ints(1), 2).outputs()
        return self._linear(ops.multiply(ops.swish(gate), up), layer, "down")

    def _linear(self, x: Any, layer: int, name: str) -> Any:
        y = ops.matmul(x, self._weight(f"{layer}.{name}"), transpose_a=False, transpose_b=True)
        site = self._sites.get(name)
        if site is not None:
            y = ops.add(y, self._delta(x, layer, site))
            if self._adapter is not None:
                scale = self._input(f"{layer}.{name}.magnitude", [-1, site.d_out])
                y = ops.multiply(y, ops.gather(scale, self._adapter, _ints(0)))
        bias = f"{layer}.{name}_bias"
        return ops.add(y, self._weight(bias)) if bias in self._weights else y

    def _delta(self, x: Any, layer: int, site: Site) -> Any:
        num = len(site.parts)
        a = self._input(f"{layer}.{site.name}.a", [-1, -1, site.d_in])
        low = ops.matmul(ops.gather(x, self._groups, _ints(0)), a, transpose_a=False, transpose_b=True)
        lows = ops.split(low, _ints(2), num).outputs() if num > 1 else [low]
        outs = []
        for part, (part_low, width) in enumerate(zip(lows, site.widths, strict=True)):
            b = self._input(f"{layer}.{site.name}.b{part}", [-1, width, -1])
            outs.append(ops.matmul(part_low, b, transpose_a=False, transpose_b=True))
        delta = ops.concat(outs, 2) if num > 1 else outs[0]
        flat = ops.reshape(delta, _ints([-1, site.d_out]), special_zero=False)
        flat = ops.concat([_const(np.zeros((1, site.d_out), np.float32)), flat], 0)
        return ops.gather(flat, self._place, _ints(0))

    def _weight(self, name: str) -> Any:
        stored = self._weights[name]
        constant = _constant(stored)
        return constant if stored.dtype == np.float32 else ops.convert(constant, ov.Type.f32)


def _constant(array: Array) -> Any:
    """A constant on the mapped memory itself; `uint16` holds bfloat16."""
    if array.dtype == np.uint16:
        return ops.constant(ov.Tensor(array, ov.Shape(list(array.shape)), ov.Type.bf16), shared_memory=True)
    return ops.constant(array, shared_memory=True)


def _const(array: Array) -> Any:
    return ops.constant(array)


def _ints(value: int | list[int]) -> Any:
    return ops.constant(np.array(value, np.int32))


def _float(value: float) -> Any:
    return ops.constant(np.array(value, np.float32))
