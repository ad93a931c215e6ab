"""What a served engine gives, measured from a client: tokens/s by streams and adapters, first tokens, and binds.

    python bench/served.py --url host:port --engine DIR [--tokens 128] [--repeats 3] [--streams 1,8,32]

Works on any Triton with the model tensorrt_llm, a compiled engine or the reference engine; ci/gpu/accept.sh runs it.
DIR has the engine's config.json, from which random adapters of rank 8 are made. A figure is tokens per second over all
streams from the first token of the last stream to the end of the first one, the median of the repeats. A bind is a
request of one token that carries the weights of an adapter not seen before, beside the same request with its id alone.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from trtllm_lora import MODULES, EngineShape, Row, dims, pack

ADAPTERS = (0, 1, 4, 16)
RANK, PROMPT = 8, 24
FIRST_TASK = 900_000_000


@dataclass
class Stream:
    """One request under way and the times of its tokens."""

    client: Any
    heard: queue.SimpleQueue[tuple[float, Any, Any]]
    tokens: list[float] = field(default_factory=list)

    def finish(self) -> None:
        """Wait for the end. Raises what the server said."""
        ended = False
        while not ended:
            at, result, error = self.heard.get(timeout=600)
            if error is not None:
                raise error
            ids = result.as_numpy("output_ids")
            self.tokens += [at] * (0 if ids is None else ids.size)
            ended = result.get_response().parameters["triton_final_response"].bool_param

    def close(self) -> None:
        """Give the stream up; an open one would keep this process from ending."""
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


class Engine:
    """The model tensorrt_llm of one server."""

    def __init__(self, url: str, shape: EngineShape) -> None:
        self.url, self.shape = url, shape
        self.random = np.random.default_rng(0)

    def adapter(self, task: int) -> dict[str, Any]:
        """The two tensors of a random adapter."""
        dtype: Any = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[self.shape.dtype]
        random, rows = np.random.default_rng(task), []
        store: Any = np.uint16 if self.shape.dtype == "bfloat16" else dtype
        for layer in range(self.shape.num_layers):
            for name in self.shape.lora_modules:
                d_in, d_out = dims(name, self.shape)
                a = (random.standard_normal((RANK, d_in)) * 0.02).astype(dtype).view(store)
                b = (random.standard_normal((d_out, RANK)) * 0.02).astype(dtype).view(store)
                rows.append(Row(MODULES[name].id, layer, a, b))
        weights, config = pack(rows, self.shape.dtype)
        return {"lora_weights": weights.view(dtype), "lora_config": config}

    def ask(self, tokens: int, task: int | None = None, **tensors: Any) -> Stream:
        """Begin a request of a fixed number of tokens."""
        prompt = self.random.integers(3, min(30_000, self.shape.vocab_size), (1, PROMPT), np.int32)
        given = {
            "input_ids": prompt,
            "input_lengths": np.array([[PROMPT]], np.int32),
            "request_output_len": np.array([[tokens]], np.int32),
            "end_id": np.array([[-1]], np.int32),
            "streaming": np.array([[True]]),
            "exclude_input_in_output": np.array([[True]]),
            **({} if task is None else {"lora_task_id": np.array([[task]], np.uint64)}),
            **tensors,
        }
        inputs = []
        for name, value in given.items():
            wire = "BF16" if value.dtype == ml_dtypes.bfloat16 else triton.np_to_triton_dtype(value.dtype)
            inputs.append(triton.InferInput(name, value.shape, wire))
            inputs[-1].set_data_from_numpy(value)
        client, heard = triton.InferenceServerClient(self.url), queue.SimpleQueue[tuple[float, Any, Any]]()
        client.start_stream(lambda result, error: heard.put((time.perf_counter(), result, error)))
        client.async_stream_infer("tensorrt_llm", inputs, enable_empty_final_response=True)
        return Stream(client, heard)

    def timed(self, tokens: int, task: int | None = None, **tensors: Any) -> float:
        """Seconds of a whole request."""
        began = time.perf_counter()
        stream = self.ask(tokens, task, **tensors)
        try:
            stream.finish()
        finally:
            stream.close()
        return time.perf_counter() - began


def decode(engine: Engine, streams: int, tasks: Sequence[int | None], tokens: int) -> tuple[float, float]:
    """(tokens per second of all streams together, median seconds to a first token)."""
    began = time.perf_counter()
    running = [engine.ask(tokens, tasks[i % len(tasks)]) for i in range(streams)]
    try:
        for each in running:
            each.finish()
    finally:
        for each in running:
            each.close()
    start = max(each.tokens[0] for each in running)
    end = min(each.tokens[-1] for each in running)
    counted = sum(start < at <= end for each in running for at in each.tokens)
    rate = counted / (end - start) if end > start else float("nan")
    return rate, statistics.median(each.tokens[0] for each in running) - began


def hold(engine: Engine, tasks: Sequence[int]) -> bool:
    """Send adapters; whether the engine's cache holds all of them at a time."""
    for task in tasks:
        engine.timed(1, task, **engine.adapter(task))
    try:
        for task in tasks:
            engine.timed(1, task)
    except InferenceServerException as error:
        if "not found in cache" not in str(error):
            raise
        return False
    return True


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", default="1,8,32")
    options = parser.parse_args()
    engine = Engine(options.url, EngineShape.from_engine_config(options.engine))

    tasks = [FIRST_TASK + i for i in range(max(ADAPTERS))]
    binds, touches = [], []
    for task in tasks:
        tensors = engine.adapter(task)
        binds.append(engine.timed(1, task, **tensors))
        touches.append(engine.timed(1, task))
    size = tensors["lora_weights"].nbytes / 1e6
    print(f"adapters of rank {RANK}, {size:.1f} MB; prompts of {PROMPT} tokens, {options.tokens} tokens an answer")
    bind, touch = statistics.median(binds) * 1000, statistics.median(touches) * 1000
    print(f"bind: {bind:.1f} ms (median of {len(tasks)}); the same request with its id alone: {touch:.1f} ms")
    print(f"{'streams':>8}{'adapters':>10}{'tokens/s':>12}{'first token':>14}")
    for streams in map(int, options.streams.split(",")):
        for adapters in ADAPTERS:
            if adapters > streams:
                continue
            if not hold(engine, tasks[:adapters]):
                print(f"{streams:>8}{adapters:>10}  (the engine's LoRA cache holds fewer)")
                continue
            chosen: list[int | None] = list(tasks[:adapters]) or [None]
            runs = [decode(engine, streams, chosen, options.tokens) for _ in range(options.repeats)]
            rate, first = (statistics.median(values) for values in zip(*runs, strict=True))
            print(f"{streams:>8}{adapters or 'base':>10}{rate:>12.1f}{first * 1000:>11.1f} ms")


if __name__ == "__main__":
    main()
