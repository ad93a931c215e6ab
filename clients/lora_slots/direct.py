"""The direct door: tokenise here, lease the adapter from `lora_router`, stream from `tensorrt_llm` itself.

Against the ensemble it gives three things: a cancel reaches the engine within milliseconds, an engine miss before the
first token is healed and tried again unseen, and a token costs half. The lease is given back whatever happens.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_slots.client import SAMPLING, Client
from lora_slots.errors import ServerError
from lora_slots.text import Tokenizer

ENGINE = "tensorrt_llm"
_MISS = "not found in cache"
_NAMES = {"top_k": "runtime_top_k", "top_p": "runtime_top_p"}


@dataclass(frozen=True, slots=True)
class Lease:
    """What the slot manager granted. `task_id` None: the base model answers, by the cold policy that was asked for."""

    request_id: str
    adapter: str | None
    task_id: int | None
    digest: str | None
    found_in: str | None
    waited_s: float
    ref: str | None = None
    """`adapter@version`: what was granted where `adapter` is an alias."""


class DirectClient(Client):
    """A Client that goes to the engine itself. One request at a time; `url` is host:port of Triton's gRPC door."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        super().__init__(url)
        self._tokenizer = tokenizer
        self._operator = Client(url)
        self.lease: Lease | None = None
        """The lease of the running or last request: what answered it."""

    def close(self) -> None:
        """Close both connections."""
        self._operator.close()
        super().close()

    def stream(
        self,
        text: str,
        *,
        adapter: str | None = None,
        max_tokens: int = 64,
        cold: str = "wait",
        sampling: Mapping[str, float] | None = None,
    ) -> Generator[str, None, None]:
        """Pieces of the answer to `text` (a finished prompt), as they come. Leaving early cancels the request.

        Args:
            cold: what to do if the adapter is not in a slot: "wait", "fail" (ServerError at once, and the adapter is
                warmed meanwhile) or "base" (the base model answers, and `self.lease.task_id` is None).

        Raises:
            ServerError: refused, failed, or not there.
        """
        ids = self._tokenizer.encode(text)
        for attempt in (1, 2):
            lease = self._acquire(adapter, max_tokens, cold)
            pieces = self._from_engine(ids, lease, max_tokens, sampling or {})
            try:
                try:
                    first = next(pieces, None)
                except ServerError as error:
                    if attempt == 2 or _MISS not in str(error) or adapter is None:
                        raise
                    self._operator.operate("missed", adapter=lease.ref or adapter)
                    continue
                if first is not None:
                    yield first
                    yield from pieces
                return
            finally:
                pieces.close()
                self._give_back(lease)

    def _acquire(self, adapter: str | None, max_tokens: int, cold: str) -> Lease:
        request_id = uuid.uuid4().hex
        if adapter is None:
            self.lease = Lease(request_id, None, None, None, None, 0.0)
            return self.lease
        answer = self._operator.operate(
            "lease", adapter=adapter, request_id=request_id, max_tokens=max_tokens, cold=cold
        )
        found, waited_s = answer.get("found_in"), float(answer.get("waited_s", 0.0))
        ref = f"{answer['adapter']}@{answer['version']}" if "version" in answer else None
        self.lease = Lease(request_id, adapter, answer["task_id"], answer["digest"], found, waited_s, ref)
        return self.lease

    def _give_back(self, lease: Lease) -> None:
        if lease.task_id is not None:
            self._operator.operate("end", request_id=lease.request_id)

    def _from_engine(
        self, ids: list[int], lease: Lease, max_tokens: int, sampling: Mapping[str, float]
    ) -> Generator[str, None, None]:
        inputs = [
            self._ids(ids),
            self._value("input_lengths", len(ids), "INT32", np.int32),
            self._value("request_output_len", max_tokens, "INT32", np.int32),
            self._value("end_id", self._tokenizer.eos_ids[0], "INT32", np.int32),
            self._value("streaming", True, "BOOL", np.bool_),
            self._value("exclude_input_in_output", True, "BOOL", np.bool_),
        ]
        if lease.task_id is not None:
            inputs.append(self._value("lora_task_id", lease.task_id, "UINT64", np.uint64))
        for name, value in sampling.items():
            inputs.append(self._value(_NAMES.get(name, name), value, *SAMPLING[name]))
        decoder = self._tokenizer.incremental_decoder()
        for result in self._stream(ENGINE, inputs, ["output_ids", "sequence_length"], lease.request_id):
            tokens = result.as_numpy("output_ids")
            if tokens is None:
                continue
            length = int(result.as_numpy("sequence_length").reshape(-1)[0])
            piece = decoder.push(tokens.reshape(-1)[:length].tolist())
            if piece:
                yield piece
        rest = decoder.flush()
        if rest:
            yield rest

    def _ids(self, ids: list[int]) -> Any:
        tensor = self._triton.InferInput("input_ids", [1, len(ids)], "INT32")
        tensor.set_data_from_numpy(np.array([ids], np.int32))
        return tensor
