"""The contract suite: what any `tensorrt_llm` model behind Triton must do, seen from a gRPC client alone.

    pytest tests/contract                                          the reference engine, started here on a tiny model
    pytest tests/contract --triton grpc://host:port --engine DIR   any server; DIR has the engine's config.json

Nothing here imports the engine. Each check's docstring names the rule it holds.
"""

from __future__ import annotations

import itertools
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from tritonclient.utils import np_to_triton_dtype

from trtllm_lora import MODULES, EngineShape, Row, dims, pack
from trtllm_lora.tensors import STORAGE

MODEL = "tensorrt_llm"
REPOSITORY = Path(__file__).parents[2] / "triton_repo" / MODEL
WAIT_S = 120
CI_HOST_PAGES = 4
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the server is, and what engine it runs."""
    parser.addoption("--triton", help="grpc://host:port of a running server (default: one is started here)")
    parser.addoption("--engine", help="the engine directory that server runs, for its config.json")
    parser.addoption("--dtype", default="float32", help="dtype of the tiny engine that is started here")


@dataclass
class Answer:
    """All responses to one request."""

    results: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    finals: int = 0

    @property
    def error(self) -> str:
        """The one error there is."""
        assert len(self.errors) == 1
        return self.errors[0]

    def values(self, name: str) -> list[Any]:
        """One output's values, response by response."""
        arrays = [result.as_numpy(name) for result in self.results]
        return [array for array in arrays if array is not None]

    @property
    def tokens(self) -> list[int]:
        """Tokens of all responses in order."""
        assert not self.errors
        return [token for ids in self.values("output_ids") for token in ids.ravel().tolist()]


class Server:
    """A Triton server with the model, over one stream per request."""

    def __init__(self, address: str, shape: EngineShape) -> None:
        self.shape = shape
        self.address = address
        self.client = triton.InferenceServerClient(address)
        self.config: Any = self.client.get_model_config(MODEL).config
        self._ids = itertools.count(1)

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        outputs: Sequence[str] | None = None,
        leave_out: Sequence[str] = (),
        **tensors: Any,
    ) -> Asked:
        """Send a request; scalars among `tensors` become [1,1] of the model's type, None leaves one out."""
        given: dict[str, Any] = {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": len(prompt),
            "request_output_len": max_tokens,
            "streaming": True,
            **tensors,
        }
        inputs = [self._input(n, v) for n, v in given.items() if v is not None and n not in leave_out]
        wanted = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]
        return Asked(self.address, inputs, wanted, request_id if request_id is not None else f"t{next(self._ids)}")

    def answer(self, *args: Any, **more: Any) -> Answer:
        """Send a request and wait for everything."""
        return self.ask(*args, **more).answer()

    def tokens(self, *args: Any, **more: Any) -> list[int]:
        """The tokens of a request that must succeed."""
        return self.answer(*args, **more).tokens

    def stop(self, request: Asked) -> None:
        """Have the engine end a request, and wait until it has: what the request held is free then."""
        if not request.is_over:
            self.answer([5], 1, request_id=request.request_id, stop=True)
        assert request.answer().errors == []

    def while_busy(self, start: Callable[[], Sequence[Asked]], act: Callable[[], T]) -> T:
        """What `act` returned while every request of `start` ran; all must go on after it, and are then stopped.

        A quick engine, or a slow client, may see one of them end before: then both are done once more.
        """
        for _ in range(20):
            busy = start()
            for request in busy:
                request.first()
            found = act()
            in_time = not any(request.ended for request in busy)
            for request in busy:
                request.goes_on()
                self.stop(request)
            if in_time:
                return found
        raise AssertionError("the requests always ended first")

    def _input(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            kind = next((i.data_type for i in self.config.input if i.name == name), pb.TYPE_INT32)
            types = {pb.TYPE_FP32: np.float32, pb.TYPE_BOOL: np.bool_, pb.TYPE_UINT64: np.uint64}
            value = np.array([[value]], types.get(kind, np.int32))
        kind = np_to_triton_dtype(value.dtype)
        if name == "lora_weights" and value.dtype == np.uint16:  # our bit patterns; tritonclient wants the type itself
            kind, value = "BF16", value.view(ml_dtypes.bfloat16)
        tensor = triton.InferInput(name, value.shape, kind)
        tensor.set_data_from_numpy(value)
        return tensor


class Asked:
    """A request under way, on a stream of its own."""

    open: ClassVar[set[Asked]] = set()

    def __init__(self, address: str, inputs: list[Any], outputs: list[Any] | None, request_id: str) -> None:
        self.heard: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.request_id = request_id
        self._client = triton.InferenceServerClient(address)
        self.ended = False
        """Its last response has come; perhaps nobody has taken it yet."""
        self.is_over = False
        """Its last response was taken."""
        self._client.start_stream(self._hear)
        self._client.async_stream_infer(
            MODEL, inputs, request_id=request_id, outputs=outputs, enable_empty_final_response=True
        )
        self.open.add(self)

    def _hear(self, result: Any, error: Any) -> None:
        self.ended |= _is_last(result, error)
        self.heard.put((result, error))

    def first(self) -> Any:
        """Wait for the first response, which must be no error."""
        result, error = self._next()
        assert error is None
        return result

    def _next(self) -> tuple[Any, Any]:
        """The next response, or the error that ends the request."""
        result, error = self.heard.get(timeout=WAIT_S)
        self.is_over = _is_last(result, error)
        return result, error

    def goes_on(self) -> None:
        """Hear all that has come, and one more response unless the request has ended; none may be an error."""
        heard = [self._next() for _ in range(self.heard.qsize())]
        if not self.is_over:
            heard.append(self._next())
        assert [error for _, error in heard if error is not None] == []

    def answer(self) -> Answer:
        """What was not taken yet, up to the final response or an error that ends the request."""
        answer = Answer()
        while not self.is_over:
            result, error = self._next()
            if error is not None:
                answer.errors.append(error.message())
                break
            if result.get_response().outputs:
                answer.results.append(result)
            answer.finals += self.is_over
        self._close()
        return answer

    def cancel(self) -> None:
        """Go away."""
        self._close(cancel_requests=True)

    def _close(self, *, cancel_requests: bool = False) -> None:
        self.open.discard(self)
        self._client.stop_stream(cancel_requests=cancel_requests)
        self._client.close()


def _is_last(result: Any, error: Any) -> bool:
    return error is not None or bool(result.get_response().parameters["triton_final_response"].bool_param)


@pytest.fixture(autouse=True)
def _no_stream_stays() -> Iterator[None]:
    """A check that failed halfway leaves requests: they must neither run into the next check nor keep pytest alive."""
    yield
    for asked in list(Asked.open):
        asked.cancel()


def _started(tmp: pytest.TempPathFactory, dtype: str) -> Iterator[tuple[str, EngineShape]]:
    """The reference engine on a tiny model, with a LoRA cache of a few pages, in a Triton of its own."""
    from lora_slots.base_model import make_tiny_llama
    from lora_slots.stack import StackConfig, TritonServer
    from reference_engine import build_engine
    from trtllm_lora import CacheGeometry

    folder = tmp.mktemp("contract")
    base = make_tiny_llama(folder / "base", seed=11)
    engine = build_engine(base, folder / "engine", dtype=dtype, max_lora_rank=16, max_batch_size=16, max_seq_len=1536)
    shape = EngineShape.from_engine_config(engine)
    models = folder / "models"
    shutil.copytree(REPOSITORY, models / MODEL)
    file = models / MODEL / "config.pbtxt"
    config = text_format.Parse(file.read_text(encoding="utf-8"), pb.ModelConfig())
    next(i for i in config.input if i.name == "lora_weights").data_type = {
        "float32": pb.TYPE_FP32,
        "float16": pb.TYPE_FP16,
        "bfloat16": pb.TYPE_BF16,
    }[dtype]
    config.parameters["gpt_model_path"].string_value = str(engine)
    host_bytes = CI_HOST_PAGES * CacheGeometry.of(shape).page_bytes
    config.parameters["lora_cache_host_memory_bytes"].string_value = str(host_bytes)
    file.write_text(text_format.MessageToString(config), encoding="utf-8")
    with TritonServer(StackConfig(model_repository=models)) as server:
        yield f"127.0.0.1:{server.ports.grpc}", shape
        server.kill()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server under test."""
    address = request.config.getoption("--triton", None)
    if address:
        engine = request.config.getoption("--engine", None)
        if not engine:
            pytest.exit("--triton needs --engine: the adapters are made to fit the engine's config.json", 2)
        yield Server(address.removeprefix("grpc://"), EngineShape.from_engine_config(Path(engine)))
        return
    for started in _started(tmp_path_factory, request.config.getoption("--dtype", "float32")):
        yield Server(*started)


@pytest.fixture(scope="session")
def prompt(server: Server) -> list[int]:
    """A prompt of a few ordinary tokens."""
    return [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="session")
def make_adapter(server: Server) -> Callable[..., dict[str, Any]]:
    """Random adapters as the two tensors of a request."""

    def make(seed: int, *, rank: int = 4, scale: float = 0.2, layers: Sequence[int] | None = None) -> dict[str, Any]:
        shape, rng = server.shape, np.random.default_rng(seed)
        rows = []
        for layer in range(shape.num_layers) if layers is None else layers:
            for name in shape.lora_modules:
                d_in, d_out = dims(name, shape)
                a = _stored(rng.standard_normal((rank, d_in)) * scale, shape.dtype)
                b = _stored(rng.standard_normal((d_out, rank)) * scale, shape.dtype)
                rows.append(Row(MODULES[name].id, layer, a, b))
        weights, config = pack(rows, shape.dtype)
        return {"lora_weights": weights, "lora_config": config}

    return make


def _stored(values: Any, dtype: str) -> Any:
    """Values in an engine's storage type; bfloat16 cut from float32."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(STORAGE[dtype])


@pytest.fixture(scope="session")
def new_task() -> Callable[[], int]:
    """Task ids that no other check uses."""
    count = itertools.count(int(np.random.default_rng().integers(10**6, 10**9)))
    return lambda: next(count)
