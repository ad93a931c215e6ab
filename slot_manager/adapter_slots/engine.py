"""SLOT: bind and touch through Triton, and the one place where the engine's error texts become types.

A bind is a one-token request that carries `lora_task_id`, `lora_weights` and `lora_config` (the weights lie in
registered shared memory); a touch is the same with the id alone. Both go to `tensorrt_llm` itself. The texts come
from the runtime (`peftCacheManager.cpp`, `loraCache.cpp`); they share one gRPC code, so only the words tell.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from adapter_slots.errors import EngineFull, EngineMiss, EngineRefused, EngineUnavailable, TierError
from adapter_slots.host import Region

MODEL = "tensorrt_llm"
_WIRE_TYPE = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_MISS = re.compile(r"LoRA task (\d+) not found in cache")
_NOTHING_EVICTABLE = re.compile(r"no done tasks to evict|PEFT Cache is full")
_PUT_FAILED = re.compile(r"Error storing task=|pageIds\.has_value\(\)")
_UNREACHABLE = re.compile(
    r"StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED|CANCELLED)|Stub process|not ready|Socket closed|failed to connect",
    re.I,
)


def engine_error(text: str) -> TierError:
    """The type of an engine's error text."""
    if _MISS.search(text):
        return EngineMiss(text)
    if _NOTHING_EVICTABLE.search(text):
        return EngineFull(text, lost_idle=False)
    if _PUT_FAILED.search(text):
        # some tasks could be evicted but not enough: the runtime has evicted all of them by now
        return EngineFull(text, lost_idle=True)
    if _UNREACHABLE.search(text):
        return EngineUnavailable(text)
    return EngineRefused(text)


class TritonEngine:
    """The engine behind a Triton gRPC endpoint. Coroutines of one event loop; times in seconds."""

    def __init__(self, url: str, *, bind_timeout_s: float = 60.0, model: str = MODEL) -> None:
        self._url = url
        self._model = model
        self._timeout_s = bind_timeout_s
        self._client: triton.InferenceServerClient | None = None
        self._counter = 0

    async def ready(self) -> bool:
        """Whether the engine's model is loaded. Never raises."""
        # a connection of its own: one that was refused once is not tried again for a second or more
        probe = triton.InferenceServerClient(self._url)
        try:
            async with asyncio.timeout(self._timeout_s):
                return bool(await probe.is_model_ready(self._model))
        except (TimeoutError, InferenceServerException):
            return False
        finally:
            await probe.close()

    async def register(self, region: Region) -> None:
        """Let Triton map a region. Raises TierError."""
        await self._call("register_system_shared_memory", region.name, f"/{region.name}", region.num_bytes)

    async def unregister(self, region: Region) -> None:
        """Let Triton unmap a region (it may be in use for a moment after a response). Raises TierError."""
        for _ in range(20):
            try:
                await self._call("unregister_system_shared_memory", region.name)
            except TierError as error:
                if "currently in use" not in str(error):
                    raise
                await asyncio.sleep(0.05)
            else:
                return
        raise EngineUnavailable(f"Triton still uses shared memory region {region.name}")

    async def bind(self, task_id: int, region: Region) -> None:
        """Make the engine hold an adapter: one token with weights and config. Raises TierError."""
        weights = triton.InferInput("lora_weights", list(region.weights_shape), _WIRE_TYPE[region.dtype])
        weights.set_shared_memory(region.name, region.weights_bytes, 0)
        config = triton.InferInput("lora_config", list(region.config_shape), "INT32")
        config.set_shared_memory(region.name, region.config_bytes, region.config_offset)
        await self._one_token("bind", task_id, [weights, config])

    async def touch(self, task_id: int) -> None:
        """Make the engine see a task id: one token with the id alone. Raises EngineMiss or another TierError."""
        await self._one_token("touch", task_id, [])

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _one_token(self, what: str, task_id: int, extra: list[Any]) -> None:
        self._counter += 1
        inputs = [
            _tensor("input_ids", np.ones((1, 1), np.int32), "INT32"),
            _tensor("input_lengths", np.ones((1, 1), np.int32), "INT32"),
            _tensor("request_output_len", np.ones((1, 1), np.int32), "INT32"),
            _tensor("streaming", np.zeros((1, 1), np.bool_), "BOOL"),
            _tensor("lora_task_id", np.full((1, 1), task_id, np.uint64), "UINT64"),
            *extra,
        ]
        request = {
            "model_name": self._model,
            "inputs": inputs,
            "outputs": [triton.InferRequestedOutput(name) for name in ("output_ids", "sequence_length")],
            "request_id": f"lora-slots-{what}-{task_id}-{self._counter}",
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(request)
        except TimeoutError:
            raise EngineUnavailable(f"{what} of task {task_id}: no answer within {self._timeout_s} s") from None
        except InferenceServerException as error:
            raise engine_error(str(error)) from None

    async def _stream(self, request: dict[str, Any]) -> None:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield request

        async for _, error in self._open().stream_infer(requests()):
            if error is not None:
                raise error

    async def _call(self, method: str, *arguments: Any) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await getattr(self._open(), method)(*arguments)
        except TimeoutError:
            raise EngineUnavailable(f"{method}: no answer within {self._timeout_s} s") from None
        except InferenceServerException as error:
            raise EngineUnavailable(f"{method}: {error}") from None

    def _open(self) -> triton.InferenceServerClient:
        if self._client is None:
            self._client = triton.InferenceServerClient(self._url)
        return self._client


def _tensor(name: str, value: np.ndarray[Any, Any], wire_type: str) -> triton.InferInput:
    tensor = triton.InferInput(name, list(value.shape), wire_type)
    tensor.set_data_from_numpy(value)
    return tensor
