"""A tiny engine, clients that speak the contract's tensors to it, random adapters, and torch as the oracle."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_slots.base_model import make_tiny_llama
from reference_engine import build_engine
from reference_engine.backend import Backend
from reference_engine.settings import Settings
from reference_engine.ticket import Reply
from trtllm_lora import LLAMA_MODULES, MODULES, EngineShape, Row, dims, pack

OUTPUTS = frozenset({"output_ids", "sequence_length"})
WAIT_S = 60


@dataclass
class Answer:
    """Everything one request was answered with."""

    replies: list[Reply]
    error: str | None = None
    tokens: list[int] = field(default_factory=list)

    def output(self, name: str) -> list[Any]:
        """The values of one output, reply by reply."""
        return [r.outputs[name] for r in self.replies if r.outputs is not None and name in r.outputs]


class Asked:
    """A request under way."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.cancelled = False

    def answer(self) -> Answer:
        """Wait for the last reply."""
        answer = Answer([])
        while True:
            reply = self.queue.get(timeout=WAIT_S)
            answer.replies.append(reply)
            answer.error = answer.error or reply.error
            if reply.outputs is not None and "output_ids" in reply.outputs:
                answer.tokens += reply.outputs["output_ids"].ravel().tolist()
            if reply.final:
                return answer


class Client:
    """Speaks to a backend as model.py does."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        task: int | None = None,
        adapter: tuple[Any, Any] | None = None,
        streaming: Any = True,
        request_id: str = "",
        outputs: frozenset[str] = OUTPUTS,
        **tensors: Any,
    ) -> Asked:
        """Submit one request; further tensors by name, scalars made [1] of the contract's type."""
        given: dict[str, Any] = {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": np.array([len(prompt)], np.int32),
            "request_output_len": np.array([max_tokens], np.int32),
            "streaming": streaming if isinstance(streaming, np.ndarray) else np.array([streaming]),
        }
        if task is not None:
            given["lora_task_id"] = np.array([task], np.uint64)
        if adapter is not None:
            given["lora_weights"], given["lora_config"] = adapter
        given |= {name: value if isinstance(value, np.ndarray) else _scalar(value) for name, value in tensors.items()}
        asked = Asked()
        self.backend.submit(given, request_id, outputs, asked.queue.put, lambda: asked.cancelled)
        return asked

    def tokens(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
        """The answer's tokens; an error fails the test."""
        answer = self.ask(prompt, max_tokens, **more).answer()
        assert answer.error is None
        return answer.tokens


def _scalar(value: Any) -> Any:
    if isinstance(value, bool):
        return np.array([value])
    return np.array([value], np.float32 if isinstance(value, float) else np.int32)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama as a Hugging Face directory."""
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", seed=11)


@pytest.fixture(scope="session")
def tiny_engine(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its engine: all modules, rank up to 16, 16 requests at once, 256 tokens."""
    out = tmp_path_factory.mktemp("engine") / "tiny"
    return build_engine(tiny_base, out, max_lora_rank=16, max_batch_size=16, max_seq_len=256)


@pytest.fixture(scope="session")
def shape(tiny_engine: Path) -> EngineShape:
    """The tiny engine's shape."""
    return EngineShape.from_engine_config(tiny_engine)


@pytest.fixture
def serve(tiny_engine: Path) -> Iterator[Callable[..., Client]]:
    """Start backends on the tiny engine (or another), with settings; all are closed afterwards."""
    started: list[Backend] = []

    def start(engine: Path = tiny_engine, **settings: Any) -> Client:
        started.append(Backend(Settings(engine_dir=str(engine), num_threads=1, **settings)))
        return Client(started[-1])

    yield start
    for backend in started:
        backend.close()


@pytest.fixture
def client(serve: Callable[..., Client]) -> Client:
    """A backend of the tiny engine with default settings."""
    return serve()


@pytest.fixture(scope="session")
def make_rows(shape: EngineShape) -> Callable[..., list[Row]]:
    """Random adapters, strong enough to change every answer."""

    def make(
        seed: int,
        *,
        rank: int = 4,
        modules: Sequence[str] = LLAMA_MODULES,
        layers: Sequence[int] | None = None,
        dora: bool = False,
        of: EngineShape = shape,
        scale: float = 0.2,
    ) -> list[Row]:
        rng = np.random.default_rng(seed)
        rows = []
        for layer in layers if layers is not None else range(of.num_layers):
            for name in modules:
                d_in, d_out = dims(name, of)
                a = rng.standard_normal((rank, d_in), np.float32) * np.float32(scale)
                b = rng.standard_normal((d_out, rank), np.float32) * np.float32(scale)
                magnitude = rng.uniform(0.7, 1.3, d_out).astype(np.float32) if dora else None
                rows.append(Row(MODULES[name].id, layer, a, b, magnitude))
        return rows

    return make


@pytest.fixture(scope="session")
def make_adapter(make_rows: Callable[..., list[Row]]) -> Callable[..., tuple[Any, Any]]:
    """The same as the two tensors of a request."""
    return lambda *args, **more: pack(make_rows(*args, **more), "float32")


_HF_NAMES = {
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_dense": ("self_attn.o_proj",),
    "mlp_h_to_4h": ("mlp.gate_proj",),
    "mlp_gate": ("mlp.up_proj",),
    "mlp_4h_to_h": ("mlp.down_proj",),
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp_gate_up": ("mlp.up_proj", "mlp.gate_proj"),
}


class Oracle:
    """transformers in float32, with adapters merged into the weights (DoRA included)."""

    def __init__(self, base: Path) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self._original = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    def _merge(self, rows: Sequence[Row]) -> None:
        state = {name: tensor.clone() for name, tensor in self._original.items()}
        for row in rows:
            module = next(name for name, known in MODULES.items() if known.id == row.module_id)
            begin = 0
            for leaf in _HF_NAMES[module]:
                weight = state[f"model.layers.{row.layer}.{leaf}.weight"]
                part = slice(begin, begin + weight.shape[0])
                weight += self._torch.from_numpy(np.matmul(row.b_OR[part], row.a_RI))
                if row.magnitude_O is not None:
                    weight *= self._torch.from_numpy(np.asarray(row.magnitude_O[part]))[:, None]
                begin += weight.shape[0]
        self._model.load_state_dict(state)

    def logits(self, tokens: Sequence[int], rows: Sequence[Row] = ()) -> Any:
        """[T, V] of a whole sequence."""
        self._merge(rows)
        with self._torch.no_grad():
            return self._model(self._torch.tensor([list(tokens)])).logits[0].numpy()

    def greedy(self, prompt: Sequence[int], max_tokens: int, rows: Sequence[Row] = ()) -> list[int]:
        """The most probable continuation."""
        self._merge(rows)
        ids = self._torch.tensor([list(prompt)])
        with self._torch.no_grad():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


@pytest.fixture(scope="session")
def oracle_of() -> Callable[[Path], Oracle]:
    """Make an oracle for a Hugging Face directory."""
    return Oracle


@pytest.fixture(scope="session")
def oracle(tiny_base: Path) -> Oracle:
    """The oracle of the tiny base."""
    return Oracle(tiny_base)


@pytest.fixture
def asked() -> Asked:
    """A request that a test submits by itself."""
    return Asked()


@pytest.fixture(scope="session")
def prompts() -> Callable[[int], list[list[int]]]:
    """Random prompts of 3 to 40 tokens, the same every time."""

    def make(count: int) -> list[list[int]]:
        rng = np.random.default_rng(3)
        return [rng.integers(3, 256, int(rng.integers(3, 40))).tolist() for _ in range(count)]

    return make
