"""The client of the ensemble for asyncio, over grpc.aio: `Client`'s methods and rules, for any number of tasks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from tenacity import AsyncRetrying
from tritonclient.grpc import service_pb2, service_pb2_grpc

from lora_slots.client import until_after
from lora_slots.client_connection import ADAPTER_HEADER, Connection, Tls
from lora_slots.client_retry import ONCE, REPEATABLE, Retry, rules
from lora_slots.client_wire import (
    ENSEMBLE,
    ROUTER,
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

T = TypeVar("T")


class AsyncClient:
    """A connection to one Triton, or to a router before several. For the tasks of one event loop."""

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
        """Nothing is sent yet; arguments and errors are those of `Client`."""
        self.url = url
        self._connection = Connection(url, tls, metadata or {}, adapter_header)
        self._retry = retry or Retry()
        self._timeout_s = timeout_s
        self._opened: tuple[Any, Any] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, and with it the streams that are open."""
        if self._opened is not None:
            await self._opened[0].close()

    async def generate(self, text: str, *, adapter: str | None = None, **options: Unpack[Options]) -> str:
        """The whole answer to `text`. Arguments and errors are those of `Client.stream`."""
        async with aclosing(self._pieces(text, adapter, options, stream=False)) as pieces:
            return "".join([piece async for piece in pieces])

    def stream(self, text: str, *, adapter: str | None = None, **options: Unpack[Options]) -> AsyncGenerator[str, None]:
        """Pieces of the answer to `text`, as they come; as `Client.stream`.

        A loop that is left early closes the stream when the iterator is gone; `contextlib.aclosing` does it at once.
        """
        return self._pieces(text, adapter, options, stream=True)

    async def warm(self, adapter: str) -> dict[str, Any]:
        """Bring an adapter into a slot; returns when it is there: `found_in` (a tier) and `waited_s`."""
        return await self.operate("warm", adapter=adapter)

    async def pin(self, adapter: str) -> None:
        """Keep an adapter in a slot until it is unpinned."""
        await self.operate("pin", adapter=adapter)

    async def unpin(self, adapter: str) -> None:
        """End a pin."""
        await self.operate("unpin", adapter=adapter)

    async def evict(self, adapter: str) -> None:
        """Take an idle adapter out of its slot."""
        await self.operate("evict", adapter=adapter)

    async def status(self) -> dict[str, Any]:
        """What is in which tier, who holds it, how many slots there are."""
        return await self.operate("status")

    async def explain(self, adapter: str) -> dict[str, Any]:
        """Everything the slot manager knows of one adapter."""
        return await self.operate("explain", adapter=adapter)

    async def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the ensemble and the slot manager say that they can be asked."""
        headers = self._connection.headers(None)
        try:
            for model in (ENSEMBLE, ROUTER):
                asked = service_pb2.ModelReadyRequest(name=model)
                if not (await self._stub().ModelReady(asked, timeout=timeout_s, metadata=headers)).ready:
                    return False
        except grpc.RpcError:
            return False
        return True

    async def operate(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Carry out an operation of the slot manager by its name. Raises ServerError."""
        until = until_after(self._timeout_s)

        async def once() -> dict[str, Any]:
            request = operation_request(op, arguments, uuid.uuid4().hex)
            async with aclosing(self._responses(request, None, until, self._timeout_s)) as responses:
                results = [result_of(response) async for response in responses]
            if not results or results[0] is None:
                raise ServerError(f"{op}: no answer", code="INTERNAL")
            return results[0]

        retry = self._retry if op in REPEATABLE else ONCE
        return await AsyncRetrying(**rules(retry, within_s=self._timeout_s))(once)

    async def _pieces(
        self, text: str, adapter: str | None, options: Options, *, stream: bool
    ) -> AsyncGenerator[str, None]:
        """The texts of one request of the ensemble."""
        timeout_s = options.get("timeout_s", self._timeout_s)
        until = until_after(timeout_s)

        def responses() -> AsyncGenerator[Any, None]:
            request_id = options.get("request_id") or uuid.uuid4().hex
            request = generate_request(text, adapter, stream=stream, request_id=request_id, options=options)
            return self._responses(request, adapter, until, timeout_s)

        async with aclosing(self._tried(responses, adapter, options, timeout_s)) as tried:
            async for response in tried:
                piece = text_of(response)
                if piece is not None:
                    yield piece

    async def _tried(
        self,
        make: Callable[[], AsyncGenerator[T, None]],
        adapter: str | None,
        options: Options,
        timeout_s: float | None,
    ) -> AsyncGenerator[T, None]:
        """What a generator of `make` gives; as long as it gave nothing, another is made where that is safe."""

        async def once() -> tuple[list[T], AsyncGenerator[T, None]]:
            items = make()
            try:
                return [await anext(items)], items
            except StopAsyncIteration:
                return [], items
            except ServerError as error:
                if is_miss(error) and adapter is not None:
                    await self._missed(adapter)
                raise

        own_id, waits = not options.get("request_id"), options.get("cold") != "fail"
        retrying = AsyncRetrying(**rules(self._retry, own_id=own_id, waits=waits, within_s=timeout_s))
        begun: tuple[list[T], AsyncGenerator[T, None]] = await retrying(once)
        first, rest = begun
        async with aclosing(rest):
            for item in first:
                yield item
            async for item in rest:
                yield item

    async def _missed(self, adapter: str) -> None:
        """Tell the slot manager that the engine had forgotten an adapter, so that the next try finds it."""
        with suppress(ServerError):  # it finds out by itself, later
            await self.operate("missed", adapter=adapter)

    async def _responses(
        self, request: Any, adapter: str | None, until: float | None, timeout_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """`ModelInferResponse`s with content. Leaving early cancels the call. `until`: on the monotonic clock."""
        left_s = None if until is None else max(0.0, until - time.monotonic())
        call = self._stub().ModelStreamInfer(
            iter((request,)), timeout=left_s, metadata=self._connection.headers(adapter)
        )
        begun = final = False
        try:
            async for answer in call:
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

    def _stub(self) -> Any:
        """Made on first use: a channel of grpc.aio belongs to the running loop."""
        if self._opened is None:
            channel = self._connection.channel(grpc.aio)
            self._opened = channel, service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return self._opened[1]
