"""Does a bundle fit an engine? The runtime's own request checks, and those it forgets, without an engine.

Sources: `loraUtils.cpp` (`loraValidateRequestTensors`) for the checks, `loraModule.cpp` for the dimensions. The
runtime does not see a row whose dimensions are others but long enough; the manifest's dimensions tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from trtllm_lora.bundle import Bundle
from trtllm_lora.modules import MODULE_BY_ID, dims
from trtllm_lora.shape import EngineShape


def fit_problems(bundle: Bundle, shape: EngineShape) -> list[str]:
    """Every reason why this engine would refuse the bundle, or answer wrongly with it; empty if it fits."""
    if not shape.lora_enabled:
        return ["the engine was built without LoRA: it would answer with the base model"]
    return list(dict.fromkeys([*_whole(bundle, shape), *_rows(bundle, shape)]))


def _whole(bundle: Bundle, shape: EngineShape) -> Iterator[str]:
    if bundle.dtype != shape.dtype:
        yield f"weights are {bundle.dtype}, the engine's dtype is {shape.dtype}"
    tp = bundle.manifest.get("tp_size", 1)
    fused = {"attn_qkv", "mlp_gate_up"} & set(bundle.manifest.get("modules", {}))
    if fused and tp != shape.tp_size:
        yield f"{', '.join(sorted(fused))} are interleaved for tp {tp}, the engine has tp {shape.tp_size}"
    for name, found in bundle.manifest.get("modules", {}).items():
        if name in shape.lora_modules and tuple(found) != dims(name, shape):
            d_in, d_out = dims(name, shape)
            yield f"{name} is {found[0]} x {found[1]} (in x out), the engine has {d_in} x {d_out}"


def _rows(bundle: Bundle, shape: EngineShape) -> Iterator[str]:
    for module_id, layer, rank, *_ in bundle.config()[0].tolist():
        module = MODULE_BY_ID.get(module_id)
        name = module.name if module else f"module id {module_id}"
        if module is None or name not in shape.lora_modules:
            yield f"{name} is not enabled in the engine (it has {', '.join(shape.lora_modules)})"
        if not 0 <= layer < shape.num_layers:
            yield f"layer {layer}: the engine has layers 0 to {shape.num_layers - 1}"
        if not 0 < rank <= shape.max_lora_rank:
            yield f"rank {rank} of {name}: the engine's max_lora_rank is {shape.max_lora_rank}"
