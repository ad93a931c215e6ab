"""Pack and unpack one adapter: rows of (module, layer) <-> `lora_weights` and `lora_config`.

Layout of a row (TensorRT-LLM `cpp/tensorrt_llm/runtime/loraUtils.cpp`, `loraCache.cpp`):

    A.flatten() [r*in] | (scale*B).flatten() [out*r] | magnitude [out], DoRA only | zeros up to the longest row

`lora_weights` is `[1, rows, width]` in the engine's dtype, `lora_config` is `[1, rows, 3]` int32 with
(module id, layer, rank), or `[1, rows, 4]` with is_dora as the fourth column.
numpy has no bfloat16: in memory it is the bit pattern as `uint16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_lora.errors import TensorError
from trtllm_lora.modules import MODULE_BY_ID, dims
from trtllm_lora.shape import EngineShape

STORAGE: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
"""numpy type that carries each engine dtype in memory."""

Array = npt.NDArray[np.generic]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """One (module, layer) of an adapter, in the storage type of the target dtype.

    `a_RI` is `[r, in]`; `b_OR` is `[out, r]` with the scale already multiplied in; `magnitude_O` is `[out]`,
    normalised as the engine wants it, or None without DoRA. Experts are stacked in front: `[E, r, in]`,
    `[E, out, r]`, with `rank` the rank of one expert.
    """

    module_id: int
    layer: int
    a_RI: Array
    b_OR: Array
    magnitude_O: Array | None = None

    @property
    def rank(self) -> int:
        """Rank of this row (of one expert, if stacked)."""
        return int(self.a_RI.shape[-2])

    @property
    def size(self) -> int:
        """Elements the row takes before padding."""
        extra = 0 if self.magnitude_O is None else int(self.magnitude_O.size)
        return int(self.a_RI.size) + int(self.b_OR.size) + extra


def pack(rows: Sequence[Row], dtype: str) -> tuple[Array, IntArray]:
    """Rows -> (`lora_weights` [1, rows, width], `lora_config` [1, rows, 3 or 4] int32).

    Four columns are written only if some row has a magnitude: stock Triton configs declare three.

    Raises:
        TensorError: no rows, two rows for one (module, layer), A and B of different rank, wrong storage type.
    """
    if not rows:
        raise TensorError("an adapter without a single row would be answered by the base model")
    seen: set[tuple[int, int]] = set()
    for row in rows:
        key = (row.module_id, row.layer)
        if key in seen:
            raise TensorError(f"two rows for module {row.module_id}, layer {row.layer}: the engine would use the last")
        seen.add(key)
        if row.a_RI.shape[-2] != row.b_OR.shape[-1]:
            raise TensorError(
                f"module {row.module_id}, layer {row.layer}: rank of A {row.a_RI.shape} and B {row.b_OR.shape}"
            )
        for part in (row.a_RI, row.b_OR):
            if part.dtype != STORAGE[dtype]:
                raise TensorError(f"module {row.module_id}, layer {row.layer}: {part.dtype} given, {dtype} wanted")
    dora = any(row.magnitude_O is not None for row in rows)
    weights = np.zeros((1, len(rows), max(row.size for row in rows)), dtype=STORAGE[dtype])
    config = np.zeros((1, len(rows), 4 if dora else 3), dtype=np.int32)
    for i, row in enumerate(rows):
        config[0, i, :3] = (row.module_id, row.layer, row.rank)
        end_a, end_b = row.a_RI.size, row.a_RI.size + row.b_OR.size
        weights[0, i, :end_a] = row.a_RI.reshape(-1)
        weights[0, i, end_a:end_b] = row.b_OR.reshape(-1)
        if row.magnitude_O is not None:
            config[0, i, 3] = 1
            weights[0, i, end_b : end_b + row.magnitude_O.size] = row.magnitude_O.reshape(-1)
    return weights, config


def unpack(weights: Array, config: IntArray, shape: EngineShape) -> list[Row]:
    """The rows as the engine reads them: views into `weights`, cut by the ENGINE's dimensions.

    `weights` is `[rows, width]` or `[1, rows, width]`, `config` `[rows, 3|4]` or `[1, rows, 3|4]`.

    Raises:
        TensorError: unknown module, or a row shorter than the engine's dimensions need.
    """
    flat = weights.reshape(weights.shape[-2:])
    table = config.reshape(config.shape[-2:])
    rows = []
    for i, entry in enumerate(table.tolist()):
        module_id, layer, rank = entry[:3]
        dora = len(entry) == 4 and bool(entry[3])
        if module_id not in MODULE_BY_ID:
            raise TensorError(f"row {i}: no module has id {module_id}")
        name = MODULE_BY_ID[module_id].name
        d_in, d_out = dims(name, shape)
        end_a, end_b = rank * d_in, rank * (d_in + d_out)
        if end_b + (d_out if dora else 0) > flat.shape[1]:
            raise TensorError(f"row {i}: {name} of rank {rank} needs {end_b} values, the row has {flat.shape[1]}")
        if name.startswith("moe_") and name != "moe_router":
            experts = shape.num_experts
            a = flat[i, :end_a].reshape(experts, rank, d_in // experts)
            b = flat[i, end_a:end_b].reshape(experts, d_out // experts, rank)
        else:
            a = flat[i, :end_a].reshape(rank, d_in)
            b = flat[i, end_a:end_b].reshape(d_out, rank)
        magnitude = flat[i, end_b : end_b + d_out] if dora else None
        rows.append(Row(module_id, layer, a, b, magnitude))
    return rows
