"""The client of the ensemble: whole or streamed texts, and the operations of `lora_router`, over Triton's gRPC.

Each request is a stream of its own on one connection, so any number of threads may use one Client at once. What is safe
is tried again (client_retry.py). `AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from tenacity import Retrying
from tritonclient.grpc import service_pb2, service_pb2_grpc

from lora_slots.client_connection import ADAPTER_HEADER, Connection, Tls
from lora_slots.client_retry import ONCE, REPEATABLE, Retry, rules
from lora_slots.client_wire import (
    ENSEMBLE,
    ROUTER,
    SAMPLING,
    Options,
    broken_off,
    generate_request,
    is_final,
    is_miss,
    operation_request,
    result_of,
    rpc_error,
    server_error,
    text_of,
)
from lora_slots.errors import ServerError

__all__ = [
    "ADAPTER_HEADER",
    "ENSEMBLE",
    "ONCE",
    "ROUTER",
    "SAMPLING",
    "Client",
    "Options",
    "Retry",
    "Tls",
    "server_error",
]

T = TypeVar("T")


class Client:
    """A connection to one Triton, or to a router before several. For any number of threads at once."""

    def __init__(
        self,
        url: str,
        *,
        tls: Tls | None = None,
        metadata: Mapping[str, str] | None = None,
        adapter_header: str | None = ADAPTER_HEADER,
        retry: Retry | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: host:port of Triton's gRPC door.
            metadata: sent with every call, such as a key for a router.
            adapter_header: metadata key that carries a request's adapter, for routers; None: none does.
            retry: how often what is safe is tried; `ONCE` never tries again.
            timeout_s: of a request with all its tries and its whole answer, unless the request says; None: no limit.

        Raises:
            UsageError: what cannot be meant.
        """
        self.url = url
        self._connection = Connection(url, tls, metadata or {}, adapter_header)
        self._retry = retry or Retry()
        self._timeout_s = timeout_s
        self._channel = self._connection.channel()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and with it the streams that are open."""
        self._channel.close()

    def generate(self, text: str, *, adapter: str | None = None, **options: Unpack[Options]) -> str:
        """The whole answer to `text`. Arguments and errors are those of `stream`."""
        with closing(self._pieces(text, adapter, options, stream=False)) as pieces:
            return "".join(pieces)

    def stream(
        self, text: str, *, adapter: str | None = None, **options: Unpack[Options]
    ) -> Generator[str, None, None]:
        """Pieces of the answer to `text`, as they come.

        Leaving the iterator early closes the stream; Triton's ensemble does not pass that on: the engine goes on to the
        answer's end, and the adapter stays leased until then. `DirectClient` stops the engine.

        Args:
            text: a finished prompt: no chat template is applied.
            adapter: an adapter, `adapter@version` or an alias; None asks the base model.
            options: see Options.

        Raises:
            ServerError: the server refused or failed (Unreachable: it is not there), once no further try is safe.
            UsageError: an option that cannot be meant.
        """
        return self._pieces(text, adapter, options, stream=True)

    def warm(self, adapter: str) -> dict[str, Any]:
        """Bring an adapter into a slot; returns when it is there: `found_in` (a tier) and `waited_s`."""
        return self.operate("warm", adapter=adapter)

    def pin(self, adapter: str) -> None:
        """Keep an adapter in a slot until it is unpinned."""
        self.operate("pin", adapter=adapter)

    def unpin(self, adapter: str) -> None:
        """End a pin."""
        self.operate("unpin", adapter=adapter)

    def evict(self, adapter: str) -> None:
        """Take an idle adapter out of its slot."""
        self.operate("evict", adapter=adapter)

    def status(self) -> dict[str, Any]:
        """What is in which tier, who holds it, how many slots there are."""
        return self.operate("status")

    def explain(self, adapter: str) -> dict[str, Any]:
        """Everything the slot manager knows of one adapter."""
        return self.operate("explain", adapter=adapter)

    def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the ensemble and the slot manager say that they can be asked."""
        headers = self._connection.headers(None)
        try:
            return all(
                self._stub.ModelReady(
                    service_pb2.ModelReadyRequest(name=model), timeout=timeout_s, metadata=headers
                ).ready
                for model in (ENSEMBLE, ROUTER)
            )
        except grpc.RpcError:
            return False

    def operate(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Carry out an operation of the slot manager by its name. Raises ServerError."""
        until = until_after(self._timeout_s)
        retry = self._retry if op in REPEATABLE else ONCE
        retrying = Retrying(**rules(retry, within_s=self._timeout_s))
        return retrying(lambda: self._operation(op, arguments, until, self._timeout_s))

    def _operation(
        self, op: str, arguments: Mapping[str, Any], until: float | None, timeout_s: float | None
    ) -> dict[str, Any]:
        """One try of an operation."""
        request = operation_request(op, arguments, uuid.uuid4().hex)
        results = [result_of(response) for response in self._responses(request, None, until, timeout_s)]
        if not results or results[0] is None:
            raise ServerError(f"{op}: no answer", code="INTERNAL")
        return results[0]

    def _pieces(self, text: str, adapter: str | None, options: Options, *, stream: bool) -> Generator[str, None, None]:
        """The texts of one request of the ensemble."""
        timeout_s = options.get("timeout_s", self._timeout_s)
        until = until_after(timeout_s)

        def responses() -> Generator[Any, None, None]:
            request_id = options.get("request_id") or uuid.uuid4().hex
            request = generate_request(text, adapter, stream=stream, request_id=request_id, options=options)
            return self._responses(request, adapter, until, timeout_s)

        with closing(self._tried(responses, adapter, options, timeout_s)) as tried:
            for response in tried:
                piece = text_of(response)
                if piece is not None:
                    yield piece

    def _tried(
        self,
        make: Callable[[], Generator[T, None, None]],
        adapter: str | None,
        options: Options,
        timeout_s: float | None,
    ) -> Generator[T, None, None]:
        """What a generator of `make` gives; as long as it gave nothing, another is made where that is safe."""

        def once() -> tuple[list[T], Generator[T, None, None]]:
            items = make()
            try:
                return [item for item in (next(items, None),) if item is not None], items
            except ServerError as error:
                if is_miss(error) and adapter is not None:
                    self._missed(adapter)
                raise

        own_id, waits = not options.get("request_id"), options.get("cold") != "fail"
        first, rest = Retrying(**rules(self._retry, own_id=own_id, waits=waits, within_s=timeout_s))(once)
        with closing(rest):
            yield from first
            yield from rest

    def _missed(self, adapter: str) -> None:
        """Tell the slot manager that the engine had forgotten an adapter, so that the next try finds it."""
        with suppress(ServerError):  # it finds out by itself, later
            self.operate("missed", adapter=adapter)

    def _responses(
        self, request: Any, adapter: str | None, until: float | None, timeout_s: float | None
    ) -> Generator[Any, None, None]:
        """`ModelInferResponse`s with content. Leaving early cancels the call. `until`: on the monotonic clock."""
        left_s = None if until is None else max(0.0, until - time.monotonic())
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=left_s, metadata=self._connection.headers(adapter))
        begun = final = False
        try:
            for answer in call:
                if answer.error_message:
                    raise server_error(Exception(answer.error_message), self.url)
                begun, final = True, is_final(answer.infer_response)
                if answer.infer_response.outputs:
                    yield answer.infer_response
            if not final:
                raise broken_off(self.url)
        except grpc.RpcError as error:
            raise rpc_error(error, self.url, timeout_s, begun=begun) from None
        finally:
            call.cancel()


def until_after(timeout_s: float | None) -> float | None:
    """The moment on the monotonic clock by which all must be over; None: never."""
    return None if timeout_s is None else time.monotonic() + timeout_s
