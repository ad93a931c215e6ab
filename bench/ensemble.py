"""What lora_router costs: the ensemble with it against the same ensemble without it, differences in one run.

    python bench/ensemble.py [--requests 400]

Two real Tritons with the same engine (a two-layer random Llama, so that the engine's own time does not drown the
difference) and the same adapter, warm in both. Requests alternate; printed are medians of each side and of the paired
differences, for one-token requests (cost of a request) and 64-token streams (cost of a token). A client that does not
name the outputs it wants gets every one of them, and with an adapter those include the performance counters by which
the end of a lease is seen: the last line shows what that costs.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from adapter_slots.registry import publish
from lora_slots.base_model import make_tiny_llama
from lora_slots.embedded import Prepared, running
from reference_engine.engine_dir import build_engine
from trtllm_lora import LLAMA_MODULES, MODULES, Bundle, BundleFacts, EngineShape, Row, dims, pack, write_bundle

STREAM_TOKENS = 64
DTYPES = {"INT32": np.int32, "BOOL": np.bool_, "UINT64": np.uint64, "BYTES": np.object_}


def random_bundle(engine: Path, parent: Path, rank: int = 8) -> Bundle:
    """An adapter of random weights on every module of the engine."""
    shape = EngineShape.from_engine_config(engine)
    chance = np.random.default_rng(1)
    rows = []
    for layer in range(shape.num_layers):
        for name in LLAMA_MODULES:
            d_in, d_out = dims(name, shape)
            a = chance.standard_normal((rank, d_in), dtype=np.float32) * 0.1
            b = chance.standard_normal((d_out, rank), dtype=np.float32) * 0.1
            rows.append(Row(MODULES[name].id, layer, a, b))
    weights, config = pack(rows, "float32")
    facts = BundleFacts("bench", "float32", modules={name: dims(name, shape) for name in LLAMA_MODULES})
    return write_bundle(parent, weights, config, facts)


def tensor(name: str, value: Any, kind: str) -> triton.InferInput:
    """An input of shape [1, 1]."""
    array = np.array([[value]], dtype=DTYPES[kind])
    made = triton.InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(array)
    return made


class Side:
    """One server and one open stream to its ensemble."""

    def __init__(self, url: str, extra: list[triton.InferInput]) -> None:
        self.client = triton.InferenceServerClient(url)
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))
        self.extra = extra

    outputs: tuple[str, ...] | None = ("text_output",)

    def ask(self, tokens: int, more: list[triton.InferInput] | None = None) -> float:
        """Seconds of one streamed request."""
        inputs = [
            tensor("text_input", b"hello", "BYTES"),
            tensor("max_tokens", tokens, "INT32"),
            tensor("stream", True, "BOOL"),
            tensor("end_id", -1, "INT32"),
            *(self.extra if more is None else more),
        ]
        began = time.perf_counter()
        wanted = self.outputs and [triton.InferRequestedOutput(name) for name in self.outputs]
        self.client.async_stream_infer(
            "ensemble", inputs, outputs=wanted, request_id=uuid.uuid4().hex, enable_empty_final_response=True
        )
        while True:
            result, error = self.answers.get()
            if error is not None:
                raise SystemExit(f"the server refused: {error}")
            if result.get_response().parameters["triton_final_response"].bool_param:
                return time.perf_counter() - began


def weights_inputs(bundle: Bundle) -> list[triton.InferInput]:
    """The three LoRA inputs, weights included, for the ensemble without lora_router."""
    made = [tensor("lora_task_id", bundle.task_id, "UINT64")]
    for name, array, kind in (("lora_weights", bundle.weights(), "FP32"), ("lora_config", bundle.config(), "INT32")):
        one = triton.InferInput(name, list(array.shape), kind)
        one.set_data_from_numpy(np.ascontiguousarray(array))
        made.append(one)
    return made


def compare(name: str, with_router: Side, without: Side, tokens: int, rounds: int) -> None:
    """Alternate the two sides and print a line of the table."""
    ours: list[float] = []
    theirs: list[float] = []
    for i in range(rounds):
        for side, times in ((with_router, ours), (without, theirs))[:: 1 if i % 2 else -1]:
            times.append(side.ask(tokens) * 1e3)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    p50 = statistics.median
    print(
        f"{name:<34} {p50(ours):8.3f} {p50(theirs):8.3f} {p50(ours) - p50(theirs):+8.3f} {p50(differences):+8.3f}"
        f" {(p50(ours) - p50(theirs)) / tokens * 1e3:+9.1f}"
    )


def main() -> None:
    """Run both servers and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        base = make_tiny_llama(home / "base", seed=1)
        engine = build_engine(base, home / "engine", max_lora_rank=8, max_seq_len=512)
        bundle = random_bundle(engine, home / "bundles")
        publish(home / "adapters.yaml", bundle)
        prepared = Prepared(base, engine, home / "adapters.yaml")
        with running(prepared) as routed, running(prepared, with_router=False) as plain:
            ours = Side(routed.grpc_url, [tensor("adapter", b"bench", "BYTES")])
            theirs = Side(plain.grpc_url, [tensor("lora_task_id", bundle.task_id, "UINT64")])
            theirs.ask(1, weights_inputs(bundle))
            for side in (ours, theirs):
                for _ in range(20):
                    side.ask(4)
            print(f"{'ms':<34} {'router':>8} {'without':>8} {'of p50s':>8} {'paired':>8} {'us/token':>9}")
            compare("one token, adapter resident", ours, theirs, 1, options.requests)
            compare(f"stream of {STREAM_TOKENS}, adapter resident", ours, theirs, STREAM_TOKENS, options.requests // 8)
            ours.outputs = theirs.outputs = None
            compare("the same, all outputs", ours, theirs, STREAM_TOKENS, options.requests // 8)
            ours.outputs = theirs.outputs = ("text_output",)
            ours.extra, theirs.extra = [], []
            compare("one token, base", ours, theirs, 1, options.requests)


if __name__ == "__main__":
    main()
