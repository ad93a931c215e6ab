"""The decoder: tokens in, logits out, on OpenVINO's CPU runtime. The only door to that library (with graph.py).

Weights are packed once by the runtime; keys and values lie in blocks that this class owns and the caller hands out.
A step runs without Python's lock, so that responses can be sent meanwhile.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import openvino as ov

from reference_engine.batch import NO_GROUPS, Batch
from reference_engine.engine_dir import EngineDirectory
from reference_engine.graph import BLOCK_TOKENS, DecoderGraph
from reference_engine.lora_sites import lora_sites
from reference_engine.lora_stack import LoraStack
from reference_engine.rope import rotary_tables
from reference_engine.safetensors_map import MappedTensors
from reference_engine.weights import as_float32

__all__ = ["BLOCK_TOKENS", "Decoder"]

Floats = npt.NDArray[np.float32]


class Decoder:
    """One model, compiled; `step` is not reentrant."""

    def __init__(self, engine: EngineDirectory, *, num_blocks: int, threads: int | None = None) -> None:
        """Map the weights and compile.

        Args:
            num_blocks: key/value blocks of `BLOCK_TOKENS` tokens.
            threads: computing threads; None for one per processor this process may use.

        Raises:
            EngineDirectoryError: the weight file cannot be read.
        """
        self._engine = engine
        self._config = engine.model
        self.sites = lora_sites(engine.shape)
        self._threads = threads or len(os.sched_getaffinity(0))
        self._weights = MappedTensors([engine.weights_file])
        self._embed = self._weights["embed"]
        self._cos, self._sin = rotary_tables(self._config, engine.shape.max_seq_len)
        shape = (num_blocks, self._config.num_kv_heads, BLOCK_TOKENS, self._config.head_size)
        # bfloat16 is computed only by an engine of that dtype, and only where the processor has it
        can = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self._bfloat16 = engine.shape.dtype == "bfloat16" and "BF16" in can
        # zeros are not touched until a block is used: the operating system counts only what was written
        self._caches = {
            f"{layer}.{name}": np.zeros(shape, np.uint16 if self._bfloat16 else np.float32)
            for layer in range(self._config.num_layers)
            for name in ("keys", "values")
        }
        self._dora = False
        self._stacked: dict[str, Floats] = {}
        self._compile()
        self._warm_up()

    def _compile(self) -> None:
        kind = ov.Type.bf16 if self._bfloat16 else ov.Type.f32
        graph = DecoderGraph(self._config, self._weights, self.sites, dora=self._dora, cache=kind)
        options = {
            "INFERENCE_PRECISION_HINT": kind,
            "KV_CACHE_PRECISION": kind,
            "INFERENCE_NUM_THREADS": self._threads,
            "ENABLE_CPU_PINNING": False,
        }
        self._request = ov.Core().compile_model(graph.model, "CPU", options).create_infer_request()
        self._packed = False
        for name, cache in self._caches.items():
            self._request.set_tensor(name, ov.Tensor(cache, ov.Shape(list(cache.shape)), kind))
        self._stacked_from: tuple[LoraStack, int] | None = None

    def _warm_up(self) -> None:
        """One step of one token, so that the first request need not wait for weights to be packed."""
        zero, ends = np.zeros(1, np.int32), np.array([0, 1], np.int32)
        batch = Batch(zero, zero, zero, ends, zero, ends, zero, *NO_GROUPS, zero)
        self.step(batch, LoraStack(self.sites, self._config.num_layers, 1))

    def step(self, batch: Batch, stack: LoraStack) -> Floats:
        """Run one step; logits [R, V] of the wanted rows, valid until the next step."""
        if stack.has_dora and not self._dora:
            # a graph with magnitudes costs every step, so it is compiled when the first such adapter comes
            self._dora = True
            del self._request
            self._compile()
        if self.sites:
            self._set_stack(stack)
            self._set("groups", batch.groups_nm)
            self._set("place", batch.place_T)
            if self._dora:
                self._set("adapter", batch.adapter_T)
        self._set("hidden", as_float32(self._embed[batch.token_ids_T]))
        self._set("cos", self._cos[batch.positions_T][:, None])
        self._set("sin", self._sin[batch.positions_T][:, None])
        self._set("logit_rows", batch.logit_rows_R)
        self._set("past", batch.past_lens_S)
        self._set("begins", batch.begins_S1)
        self._set("block_ids", batch.block_ids)
        self._set("block_begins", batch.block_begins_S1)
        longest = batch.past_lens_S + np.diff(batch.begins_S1)
        self._set("longest", np.array(longest.max(), np.int32))
        self._request.infer()
        if not self._packed:
            # weights are packed by the first step; what they were packed from is not needed in memory any more
            self._weights.release()
            self._packed = True
        logits: Floats = self._request.get_output_tensor(0).data
        return logits

    def _set(self, name: str, array: npt.NDArray[np.generic]) -> None:
        self._request.set_tensor(name, ov.Tensor(np.asarray(array, order="C")))

    def _set_stack(self, stack: LoraStack) -> None:
        if (stack, stack.version) == self._stacked_from:
            return
        # the request uses this memory and does not keep it alive
        self._stacked = dict(stack.arrays(dora=self._dora))
        for name, array in self._stacked.items():
            self._request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        self._stacked_from = (stack, stack.version)
