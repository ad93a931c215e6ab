"""GPU memory of one rank of an engine, estimated from its sizes; every assumption is named beside its number.

Weights, KV cache and LoRA cache follow from sizes exactly. Activations and the runtime's own memory are assumptions
that a real start corrects: its log prints both.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_lora.geometry import ceil_div
from trtllm_lora.modules import dims
from trtllm_lora.profile import EngineProfile
from trtllm_lora.shape import ITEM_BYTES

TOKENS_PER_BLOCK = 32
"""KV cache block of the runtime (`tokens_per_block`)."""
RUNTIME_BYTES = 2**30
"""CUDA context, cuBLAS and NCCL workspaces, the decoder's buffers: what a bare engine process takes, an assumption."""
_LINEAR_BYTES = {"none": None, "fp8": 1.0, "int8_weight_only": 1.0, "int4_weight_only": 0.5, "int4_awq": 0.5 + 2 / 128}


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one rank. `assumptions` says how each was found."""

    weights: int
    activations: int
    runtime: int
    kv_bytes_per_token: int
    assumptions: tuple[str, ...]

    @property
    def fixed(self) -> int:
        """What is taken before the KV cache is sized."""
        return self.weights + self.activations + self.runtime


def engine_memory(profile: EngineProfile, *, runtime_bytes: int = RUNTIME_BYTES) -> EngineMemory:
    """Memory of the fullest rank of a profile's engine."""
    return EngineMemory(
        _weights(profile),
        _activations(profile),
        runtime_bytes,
        _kv_bytes_per_token(profile),
        (
            "weights: linear layers / (tp x pp) in the quantised type, embedding whole and output layer / tp in the "
            "engine's dtype, both counted when they are tied",
            "activations: max_num_tokens x (4 hidden + widest layer + LoRA ranks of q, k, v) in the engine's dtype, "
            "and max_batch_size x vocabulary logits in float32, twice",
            f"runtime: {runtime_bytes / 2**30:.1f} GiB for CUDA context, cuBLAS, NCCL and decoder buffers",
            f"KV cache: blocks of {TOKENS_PER_BLOCK} tokens",
        ),
    )


def _weights(profile: EngineProfile) -> int:
    model, shape = profile.model, profile.shape()
    tp, pp, item = shape.tp_size, shape.pp_size, ITEM_BYTES[shape.dtype]
    hidden, wide = shape.hidden_size, shape.num_heads * shape.head_size
    _, fused = dims("attn_qkv", shape)
    attention = hidden * fused + wide * hidden
    mlp = 3 * hidden * shape.intermediate_size * max(1, shape.num_experts) + hidden * shape.num_experts
    linear = _LINEAR_BYTES.get(profile.engine.quantization) or float(item)
    small = (2 * hidden + (fused if model.attention_bias else 0)) * item
    layers = shape.num_layers // pp
    body = layers * (int((attention + mlp) * linear) // tp + small)
    embedding, output = shape.vocab_size * hidden * item, shape.vocab_size * hidden * item // tp
    ends = embedding + output if pp == 1 else max(embedding, output)
    return body + ends + hidden * item


def _activations(profile: EngineProfile) -> int:
    shape = profile.shape()
    _, fused = dims("attn_qkv", shape)
    widest = max(fused, 2 * shape.intermediate_size) // shape.tp_size
    per_token = 4 * shape.hidden_size + widest + 3 * shape.max_lora_rank
    logits = 2 * shape.max_batch_size * shape.vocab_size * 4
    return profile.engine.max_num_tokens * per_token * ITEM_BYTES[shape.dtype] + logits


def _kv_bytes_per_token(profile: EngineProfile) -> int:
    shape = profile.shape()
    item = ITEM_BYTES[shape.dtype] if profile.engine.kv_cache_dtype == "auto" else 1
    return (
        2 * (shape.num_layers // shape.pp_size) * ceil_div(shape.num_kv_heads, shape.tp_size) * shape.head_size * item
    )
