"""The direct door, asynchronous: a lease from `lora_router`, a stream from `tensorrt_llm` itself, the lease given back.

Rules:
1. Every stream to Triton is one request's; leaving it early cancels it, and the engine sees that within milliseconds.
2. A lease that was granted, or may have been, is given back, whatever happens to who asked for it.
3. Tokens are read from the response's bytes: per token there is no numpy and no copy of a tensor.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import structlog
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from lora_slots.client_wire import (
    ROUTER,
    Message,
    broken_off,
    no_server,
    operation_request,
    result_in,
    server_error,
)
from lora_slots.direct import ENGINE, Lease
from lora_slots.errors import ServerError, Unreachable, UsageError
from lora_slots.gateway.channel import Channel
from lora_slots.gateway.connection import Call, Refused
from lora_slots.gateway.grpc_wire import CallError
from lora_slots.gateway.responses import Piece, Response, Responses, StreamError, read_piece

log = structlog.get_logger("lora_slots.gateway")

INPUTS: Mapping[str, str] = {
    "input_lengths": "INT32",
    "streaming": "BOOL",
    "exclude_input_in_output": "BOOL",
    "lora_task_id": "UINT64",
    "request_output_len": "INT32",
    "end_id": "INT32",
    "num_return_sequences": "INT32",
    "runtime_top_k": "INT32",
    "runtime_top_p": "FP32",
    "temperature": "FP32",
    "min_tokens": "INT32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "return_log_probs": "BOOL",
}
"""Engine inputs of one value, and their Triton type."""
END_AGAIN_S = (0.25, 0.5, 1, 2, 4, 8, 16)
"""Waits before a lease is given back once more to a server that cannot be reached: nothing is lost by telling twice."""
NO_REFUSAL = frozenset({"INTERNAL", "UNKNOWN", "CANCELLED"})
"""Codes of errors that are none of the slot manager's: what it did before them nobody knows."""
BEGIN_TRIES = 3
CLOSE_S = 5.0
_SERVICE = "/inference.GRPCInferenceService"


Answer = TypeVar("Answer")


class NotSent(Unreachable):
    """No server was reached, so none has heard anything."""


class Door:
    """One connection to a Triton, for any number of requests of one event loop."""

    def __init__(self, url: str) -> None:
        """`url` is host:port of Triton's gRPC door. Call it inside of the event loop; nothing is sent yet.

        Raises:
            UsageError: another form of `url`.
        """
        from tritonclient.grpc import service_pb2

        host, _, port = url.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"--url {url}: host:port of Triton's gRPC door expected")
        self.url = url
        self._wire = service_pb2
        self._channel = Channel(host.strip("[]"), int(port))
        self._behind: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for leases that are being given back, then close the connection."""
        if self._behind:
            await asyncio.wait(self._behind, timeout=CLOSE_S)
        for task in self._behind:
            task.cancel()
        self._channel.close()

    async def ready(self) -> bool:
        """Whether the engine and the router say that they are ready."""
        try:
            for model in (ENGINE, ROUTER):
                answer = await self._call("ModelReady", self._wire.ModelReadyRequest(name=model), timeout=5)
                if not answer.ready:
                    return False
        except ServerError:
            return False
        return True

    async def parameters(self, model: str) -> Mapping[str, str]:
        """A model's parameters. Raises ServerError."""
        answer = await self._call("ModelConfig", self._wire.ModelConfigRequest(name=model), timeout=30)
        return {key: value.string_value for key, value in answer.config.parameters.items()}

    async def operate(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Carry out an operation of the slot manager. Raises ServerError."""
        request = operation_request(op, arguments, uuid.uuid4().hex)
        async with aclosing(self._stream(request, _result)) as answers:
            async for answer in answers:
                if answer is not None:
                    return answer
        raise ServerError(f"{op}: no answer", code="INTERNAL")

    async def lease(self, adapter: str, lease_id: str, *, max_tokens: int, cold: str) -> Lease:
        """A hold on an adapter in a slot.

        Args:
            adapter: name, perhaps with a version.
            lease_id: unique among running ones.
            max_tokens: of the whole request; decides how long the hold lasts if its end is never told.
            cold: what to do if it is not in a slot: wait, fail, base (then the lease's `task_id` is None).

        Raises:
            ServerError: refused, failed, or not there.
        """
        try:
            answer = await self.operate("lease", adapter=adapter, request_id=lease_id, max_tokens=max_tokens, cold=cold)
        except BaseException as error:  # given up, or the answer got lost: it may have been granted a moment ago
            if not _grants_nothing(error):
                self.behind(self._end(lease_id, 0))
            raise
        return Lease.of(lease_id, adapter, answer)

    def end(self, lease: Lease, tokens: int) -> None:
        """Give a lease back, behind the caller's back; `tokens` were generated under it."""
        if lease.task_id is not None:
            self.behind(self._end(lease.request_id, tokens))

    def behind(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something behind the caller's back; `close` waits a moment for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    def generate(
        self,
        prompt: Sequence[int],
        values: Mapping[str, float],
        arrays: Mapping[str, NDArray[Any]],
        *,
        request_id: str,
        task_id: int | None,
        streaming: bool,
        number: int = 0,
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the engine's answer to one prompt. Closing the iterator early cancels the request.

        Args:
            prompt: token ids.
            values: engine inputs of one value, names of INPUTS.
            arrays: other engine inputs: name -> int32 or float32 array with a leading dimension of 1.
            streaming: a piece per token, or one per sequence at its end.
            number: comes back in every piece.

        Raises:
            ServerError: the engine refused or failed, or is not there.
        """
        outputs = ["output_ids", "sequence_length"]
        if values.get("return_log_probs"):
            outputs.append("output_log_probs")
        if values.get("num_return_sequences", 1) != 1:
            outputs.append("sequence_index")
        message = Message(ENGINE, request_id, outputs)
        message.ids("input_ids", prompt)
        numbers = {"input_lengths": len(prompt), "streaming": streaming, "exclude_input_in_output": True, **values}
        if task_id is not None:
            numbers["lora_task_id"] = task_id
        for name, value in numbers.items():
            message.value(name, value, INPUTS[name])
        for name, array in arrays.items():
            kind = "INT32" if array.dtype == np.int32 else "FP32"
            message.add(name, kind, array.shape, array.tobytes())
        return self._stream(message.made, partial(read_piece, number))

    async def _stream(self, request: Any, read: Callable[[Response], Answer]) -> AsyncGenerator[Answer, None]:
        responses = Responses()
        with self._telling():
            call, messages = await self._begun(f"{_SERVICE}/ModelStreamInfer", request.SerializeToString())
            try:
                final = False
                while not final:
                    if not messages:
                        raise broken_off(self.url)
                    for message in messages:
                        response = responses.read(message)
                        if response.contents:
                            yield read(response)
                        final = response.is_final
                    messages = await call.received()
                while messages:  # its status comes after them
                    messages = await call.received()
            finally:
                call.cancel()  # leaving early

    async def _begun(self, method: str, request: bytes) -> tuple[Call, list[bytes]]:
        """A call and the first messages of its answer; one that the server did not begin is made again.

        Raises what `Call.received` does, and NotSent.
        """
        for tries_left in reversed(range(BEGIN_TRIES)):
            try:
                call = await self._channel.call(method, request)
            except OSError as error:
                why = "it does not answer" if isinstance(error, TimeoutError) else str(error)
                raise NotSent(str(no_server(self.url, why))) from None
            try:
                return call, await call.received()
            except Refused:
                if not tries_left:
                    raise
            except BaseException:
                call.cancel()
                raise
        raise AssertionError("unreachable")

    async def _call(self, method: str, request: Any, *, timeout: float) -> Any:
        parse = getattr(self._wire, f"{method}Response").FromString
        with self._telling():
            return parse(await self._channel.ask(f"{_SERVICE}/{method}", request.SerializeToString(), timeout))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn what gRPC raises into ServerError."""
        try:
            yield
        except StreamError as error:
            raise server_error(error, self.url) from None
        except CallError as error:
            raise server_error(Exception(f"[StatusCode.{error.code}] {error}"), self.url) from None
        except TimeoutError:
            raise no_server(self.url, "it does not answer") from None
        except (DecodeError, struct.error):
            raise no_server(self.url, "its answer cannot be read") from None
        except OSError as error:
            raise no_server(self.url, str(error)) from None

    async def _end(self, lease_id: str, tokens: int) -> None:
        for wait_s in END_AGAIN_S:
            try:
                await self.operate("end", request_id=lease_id, tokens=tokens)
            except ServerError as error:
                why = error
            else:
                return
            await asyncio.sleep(wait_s)
        log.warning("lease not given back, its deadline ends it", lease=lease_id, why=str(why))


def _result(response: Response) -> dict[str, Any] | None:
    """What an operation answered."""
    return result_in(dict(zip(response.names, response.contents, strict=False)).get("op_result"))


def _grants_nothing(error: BaseException) -> bool:
    """Whether it says that a lease was not granted: nobody heard of it, or the slot manager refused it."""
    if isinstance(error, Unreachable):
        return isinstance(error, NotSent)
    return isinstance(error, ServerError) and error.code not in NO_REFUSAL
