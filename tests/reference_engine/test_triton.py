"""The engine inside a real Triton: what a gRPC client sees of it."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.utils import np_to_triton_dtype

from lora_slots.stack import StackConfig, TritonServer

pytestmark = pytest.mark.triton

REPOSITORY = Path(__file__).parents[2] / "triton_repo" / "tensorrt_llm"
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def address(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tritonserver with the tiny engine; its gRPC address."""
    folder = tmp_path_factory.mktemp("models") / "tensorrt_llm"
    shutil.copytree(REPOSITORY, folder)
    file = folder / "config.pbtxt"
    config = text_format.Parse(file.read_text(encoding="utf-8"), pb.ModelConfig())
    config.parameters["gpt_model_path"].string_value = str(tiny_engine)
    next(i for i in config.input if i.name == "lora_weights").data_type = pb.TYPE_FP32
    file.write_text(text_format.MessageToString(config), encoding="utf-8")
    with TritonServer(StackConfig(model_repository=folder.parent)) as server:
        yield f"127.0.0.1:{server.ports.grpc}"


class Stream:
    """One gRPC stream; requests are told apart by id."""

    def __init__(self, address: str) -> None:
        self.heard: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.client = triton.InferenceServerClient(address)
        self.client.start_stream(lambda result, error: self.heard.put((result, error)))

    def ask(self, max_tokens: int, request_id: str, **tensors: Any) -> None:
        """Send one request; further tensors by name, with their batch dimension."""
        given = {
            "input_ids": np.array([PROMPT], np.int32),
            "input_lengths": np.array([[len(PROMPT)]], np.int32),
            "request_output_len": np.array([[max_tokens]], np.int32),
            "streaming": np.array([[True]]),
            **tensors,
        }
        inputs = []
        for name, value in given.items():
            inputs.append(triton.InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
            inputs[-1].set_data_from_numpy(value)
        self.client.async_stream_infer("tensorrt_llm", inputs, request_id=request_id, enable_empty_final_response=True)

    def answer(self) -> tuple[list[int], str | None, list[Any]]:
        """(tokens, error, results) of the one request under way."""
        tokens: list[int] = []
        results: list[Any] = []
        while True:
            result, error = self.heard.get(timeout=60)
            if error is not None:
                return tokens, error.message(), results
            results.append(result)
            ids = result.as_numpy("output_ids")
            tokens += [] if ids is None else ids.ravel().tolist()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return tokens, None, results

    def close(self) -> None:
        """Cancel what runs and close."""
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


@pytest.fixture
def stream(address: str) -> Iterator[Stream]:
    """An open stream."""
    opened = Stream(address)
    yield opened
    opened.close()


def test_tokens_stream_and_the_final_flag_rides_on_the_last(stream: Stream, client: Any) -> None:
    """The tokens are the engine's, one a response, no empty response after them."""
    stream.ask(6, "a")
    tokens, error, results = stream.answer()
    assert error is None
    assert client.tokens(PROMPT, 6) == tokens
    assert len(results) == 6
    assert list(results[0].as_numpy("output_ids").shape) == [1, 1, 1]


def test_pushed_adapter_miss_and_end_of_answer(stream: Stream, client: Any, make_adapter: Any) -> None:
    """A miss has the contract's text; pushed weights serve id-only requests; an empty last response passes."""
    task = np.array([[3]], np.uint64)
    stream.ask(6, "a", lora_task_id=task)
    _, error, _ = stream.answer()
    assert error is not None
    assert error.endswith("error: LoRA task 3 not found in cache. Please send LoRA weights with request")
    weights, config = make_adapter(3)
    expected = client.tokens(PROMPT, 6, task=3, adapter=(weights, config))
    stream.ask(6, "b", lora_task_id=task, lora_weights=weights, lora_config=config)
    assert expected == stream.answer()[0]
    end = expected[4]
    stream.ask(6, "c", lora_task_id=task, end_id=np.array([[end]], np.int32))
    tokens, error, results = stream.answer()
    assert (expected[: expected.index(end)], None) == (tokens, error)
    assert results[-1].as_numpy("sequence_length").tolist() == [[0]]


def test_perf_metrics_end_with_the_last_token_time(stream: Stream) -> None:
    """Zero until the last response."""
    stream.ask(4, "a", return_perf_metrics=np.array([[True]]))
    _, _, results = stream.answer()
    assert [r.as_numpy("last_token_time_ns").item() > 0 for r in results] == [False, False, False, True]


def test_stop_by_request_id(stream: Stream) -> None:
    """The stopped request ends early; the stopping one gets an empty final response."""
    stream.ask(250, "long")
    first, error = stream.heard.get(timeout=60)
    assert error is None
    assert first.as_numpy("output_ids") is not None
    stream.ask(1, "long", stop=np.array([[True]]))
    finals, tokens = 0, 1
    while finals < 2:
        result, error = stream.heard.get(timeout=60)
        assert error is None
        ids = result.as_numpy("output_ids")
        tokens += 0 if ids is None else ids.size
        finals += result.get_response().parameters["triton_final_response"].bool_param
    assert tokens < 250


def test_a_cancelled_stream_frees_the_engine(address: str, stream: Stream) -> None:
    """After a client cancels, the next one is served and a stop finds nothing to do."""
    other = Stream(address)
    other.ask(250, "gone")
    other.heard.get(timeout=60)
    other.close()
    stream.ask(3, "next")
    assert len(stream.answer()[0]) == 3


def test_core_refuses_four_columns_before_the_engine(stream: Stream, make_adapter: Any) -> None:
    """The stock config declares three columns of lora_config."""
    weights, config = make_adapter(5, dora=True)
    stream.ask(2, "a", lora_task_id=np.array([[5]], np.uint64), lora_weights=weights, lora_config=config)
    _, error, _ = stream.answer()
    assert error is not None
    assert "unexpected shape for input 'lora_config' for model 'tensorrt_llm'. Expected [-1,-1,3]" in error
