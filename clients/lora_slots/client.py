"""A small client of the ensemble: streamed text, and the operations of `lora_router`, over Triton's gRPC."""

from __future__ import annotations

import json
import queue
import re
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from lora_slots.errors import ServerError

ENSEMBLE, ROUTER = "ensemble", "lora_router"
_STATUS = re.compile(r"^\[?StatusCode\.(\w+)\]?\s*")
_TAG = re.compile(r"^\[([A-Z_]+)\] ")
"""`lora_router` begins its error texts with their code: a stream carries no status of its own (and the header that asks
Triton 2.51 for one, triton_grpc_error, crashes that server)."""
_IN_ENSEMBLE = re.compile(r"^in ensemble '[^']*', (\[request id: [^\]]*\] )?")
SAMPLING: Mapping[str, tuple[str, Any]] = {
    "temperature": ("FP32", np.float32),
    "top_k": ("INT32", np.int32),
    "top_p": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "min_tokens": ("INT32", np.int32),
    "repetition_penalty": ("FP32", np.float32),
    "presence_penalty": ("FP32", np.float32),
    "frequency_penalty": ("FP32", np.float32),
}
"""Sampling options of the ensemble: Triton type and numpy type."""


class Client:
    """One gRPC connection, used by one thread at a time. `url` is host:port of Triton's gRPC door."""

    def __init__(self, url: str) -> None:
        import tritonclient.grpc as triton
        from tritonclient.utils import InferenceServerException

        self.url = url
        self._triton = triton
        self._exception = InferenceServerException
        self._client = triton.InferenceServerClient(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def generate(
        self,
        text: str,
        *,
        adapter: str | None = None,
        max_tokens: int = 64,
        stream: bool = True,
        request_id: str | None = None,
        end_id: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> Iterator[str]:
        """Pieces of the answer to `text` (a finished prompt: no chat template is applied), as they come.

        `adapter` None asks the base model; `sampling` takes the names of SAMPLING; `end_id` None means the
        tokenizer's. Leaving the iterator early cancels the request.

        Raises:
            ServerError: the server refused, failed, or is not there.
        """
        inputs = [
            self._text("text_input", text),
            self._value("max_tokens", max_tokens, "INT32", np.int32),
            self._value("stream", stream, "BOOL", np.bool_),
        ]
        if adapter is not None:
            inputs.append(self._text("adapter", adapter))
        if end_id is not None:
            inputs.append(self._value("end_id", end_id, "INT32", np.int32))
        for name, value in (sampling or {}).items():
            inputs.append(self._value(name, value, *SAMPLING[name]))
        for result in self._stream(ENSEMBLE, inputs, ["text_output"], request_id or uuid.uuid4().hex):
            pieces = result.as_numpy("text_output")
            if pieces is not None:
                yield "".join(piece.decode("utf-8", "replace") for piece in pieces.reshape(-1))

    def operate(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Carry out an operation of the slot manager: status, warm, pin, unpin, evict. Raises ServerError."""
        inputs = [self._text("op", op), self._text("op_args", json.dumps(arguments))]
        for result in self._stream(ROUTER, inputs, ["op_result"], uuid.uuid4().hex):
            value = result.as_numpy("op_result")
            if value is not None:
                return dict(json.loads(value.reshape(-1)[0]))
        raise ServerError(f"{op}: no answer", code="INTERNAL")

    def _stream(self, model: str, inputs: list[Any], outputs: list[str], request_id: str) -> Iterator[Any]:
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        wanted = [self._triton.InferRequestedOutput(name) for name in outputs]
        ended = False
        self._client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            try:
                self._client.async_stream_infer(
                    model, inputs, outputs=wanted, request_id=request_id, enable_empty_final_response=True
                )
            except self._exception as broken:
                # the stream broke before the request was queued; what broke it comes through the callback
                ended = True
                raise server_error(answers.get()[1] or broken, self.url) from None
            while not ended:
                result, error = answers.get()
                if error is not None:
                    ended = True
                    raise server_error(error, self.url)
                response = result.get_response()
                ended = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield result
        finally:
            self._client.stop_stream(cancel_requests=not ended)

    def _text(self, name: str, value: str) -> Any:
        tensor = self._triton.InferInput(name, [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[value.encode()]], dtype=np.object_))
        return tensor

    def _value(self, name: str, value: Any, wire_type: str, dtype: Any) -> Any:
        tensor = self._triton.InferInput(name, [1, 1], wire_type)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        return tensor


def server_error(error: Exception, url: str) -> ServerError:
    """Triton's error as ours: the status name, and the text without Triton's wrapping."""
    text = str(error)
    status = _STATUS.match(text)
    message = _IN_ENSEMBLE.sub("", _STATUS.sub("", text)).strip()
    tag = _TAG.match(message)
    code = tag.group(1) if tag else status.group(1) if status else "UNKNOWN"
    message = _TAG.sub("", message)
    if code == "UNAVAILABLE" and "connect" in message:
        message = f"no server answers at {url}; start one with `lora-slots up`, or give --url ({message})"
    return ServerError(message, code=code)
