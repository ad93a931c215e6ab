"""The runtime's checks of `lora_weights` and `lora_config`, in its order and with its texts.

Sources: `executor/loraConfig.cpp` (constructor of `LoraConfig`), `runtime/loraUtils.cpp`
(`loraValidateRequestTensors`). The texts, blanks and spelling included, are a contract: clients match them.
What the runtime does not check (duplicates, values, padding, missing layers) is not checked here either.
"""

from __future__ import annotations

import numpy as np

from reference_engine.errors import RequestRefused, fetching
from trtllm_lora import MODULE_BY_ID, EngineShape, dims, module_name
from trtllm_lora.request_rules import assertion
from trtllm_lora.tensors import STORAGE, Array

_CONSTRUCTOR = "cpp/tensorrt_llm/executor/loraConfig.cpp"
_VALIDATION = "cpp/tensorrt_llm/runtime/loraUtils.cpp"
MAX_COLUMNS = 4


def check_lora_config(weights: Array | None, config: Array | None) -> None:
    """The constructor's checks, made when the request is enqueued; 2-D tensors of one request.

    Raises:
        RequestRefused: bare assertion text, as the backend sends what fails before the executor has the request.
    """

    def require(condition: bool, text: str) -> None:
        if not condition:
            raise RequestRefused(assertion(text, _CONSTRUCTOR))

    if config is not None:
        require(config.ndim == 2, "Expected config tensor to have 2 dimensions")
        require(config.dtype == np.int32, "Expected lora config tensor to have type kINT32")
    if weights is not None:
        require(config is not None, "Request for LoRA inference with lora weights must also have lora config")
        require(weights.ndim == 2, "Expected weights tensor to have 2 dimensions")
    if weights is not None and config is not None:
        require(
            weights.shape[0] == config.shape[0],
            "Expected dim 0 of lora weights and lora config to have the same size",
        )


def check_lora_rows(weights: Array | None, config: Array | None, shape: EngineShape) -> None:
    """The executor loop's checks; 2-D tensors that passed `check_lora_config`.

    Raises:
        RequestRefused: the executor's text, without the backend's prefix.
    """
    if weights is None and config is None:
        return

    def require(condition: bool, text: str) -> None:
        if not condition:
            raise RequestRefused(fetching(assertion(text, _VALIDATION)))

    require(
        weights is not None and config is not None,
        "Request for LoRA inference must have both lora_weights and lora_keys",
    )
    assert weights is not None and config is not None  # noqa: S101 (told to the type checker)
    require(config.shape[1] in (3, MAX_COLUMNS), "Expected dim2 of lora_keys to have a size in [3, 4]")
    require(
        weights.dtype == STORAGE[shape.dtype],
        "Expected lora weights to be the same data type as base model",
    )
    width = weights.shape[1]
    for entry in config.tolist():
        module_id, layer, rank = entry[:3]
        name = module_name(module_id)
        require(0 <= layer < shape.num_layers, "Expected layerId to be in the range [0, numModelLayers)")
        require(rank > 0, "Expected adapterSize to be > 0")
        enabled = module_id in MODULE_BY_ID and name in shape.lora_modules
        require(enabled, f"lora module {name} not enabled for this model")
        d_in, d_out = dims(name, shape)
        dora = len(entry) == MAX_COLUMNS and bool(entry[3])
        needed = rank * (d_in + d_out) + (d_out if dora else 0)
        require(needed <= width, f"lora_weights has to few values for {name}")
        require(
            rank <= shape.max_lora_rank,
            f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({shape.max_lora_rank})",
        )
