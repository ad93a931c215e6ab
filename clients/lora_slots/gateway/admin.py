"""The admin port: adapters come and go, the working set is looked at and held. Its own port, its own keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from lora_slots.errors import ServerError
from lora_slots.gateway.bodies import read_body
from lora_slots.gateway.core import Gateway
from lora_slots.gateway.document import document, takes
from lora_slots.gateway.edge import Edge, OwnHost, is_loopback
from lora_slots.gateway.errors import from_operation
from lora_slots.gateway.publishing import Publisher
from lora_slots.gateway.routes import answer_health, answer_metrics, handle_errors, read_json


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadBody(_Strict):
    """vLLM's body of `/v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A bundle or a PEFT adapter: a directory of the server's machine, or s3://bucket/prefix."""
    load_inplace: bool = False
    """Take what is there as a new version of an adapter of that name; without it that is refused."""


class UnloadBody(_Strict):
    """vLLM's body of `/v1/unload_lora_adapter`."""

    lora_name: Name
    lora_int_id: int | None = None
    """vLLM's number of the adapter; names are enough here, and it is not looked at."""


class AdapterBody(_Strict):
    """Which adapter an operation is for."""

    adapter: Name


class DrainBody(_Strict):
    """Whether to drain."""

    on: bool = True


def admin_app(gateway: Gateway, host: str, endpoint_url: str | None = None) -> Any:
    """The application of the admin port, which listens on `host`; `endpoint_url` is of S3 that is not AWS."""
    app = FastAPI(title="LoRA Slots, administration", docs_url=None, redoc_url=None, openapi_url=None)
    # decided once: a port that others can reach does not open when its last key is taken out
    is_open = is_loopback(host) and not has_keys(gateway)
    publisher = Publisher(gateway, endpoint_url)
    handle_errors(app)

    def check(request: Request) -> None:
        if has_keys(gateway) or not is_open:
            gateway.authenticate_admin(request.headers.get("authorization"))

    async def operate(op: str, **arguments: Any) -> dict[str, Any]:
        try:
            return await gateway.door.operate(op, **arguments)
        except ServerError as error:
            raise from_operation(error) from None

    async def body_of(request: Request, kind: type[Any]) -> Any:
        check(request)
        return read_body(kind, await read_json(request, gateway))

    @app.post("/v1/load_lora_adapter", openapi_extra=takes(LoadBody))
    async def load(request: Request) -> Response:
        body: LoadBody = await body_of(request, LoadBody)
        await publisher.load(body.lora_name, body.lora_path, new_version=body.load_inplace)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @app.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadBody))
    async def unload(request: Request) -> Response:
        body: UnloadBody = await body_of(request, UnloadBody)
        await publisher.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    @app.get("/admin/status")
    async def status(request: Request) -> dict[str, Any]:
        check(request)
        return await operate("status")

    @app.get("/admin/adapters/{adapter:path}")
    async def explain(request: Request, adapter: str) -> dict[str, Any]:
        check(request)
        return await operate("explain", adapter=adapter)

    @app.post("/admin/drain", openapi_extra=takes(DrainBody))
    async def drain(request: Request) -> dict[str, Any]:
        body: DrainBody = await body_of(request, DrainBody)
        return await operate("drain", on=body.on)

    @app.post("/admin/{op}", openapi_extra=takes(AdapterBody))
    async def one(request: Request, op: Literal["warm", "pin", "unpin", "evict"]) -> dict[str, Any]:
        body: AdapterBody = await body_of(request, AdapterBody)
        return await operate(op, adapter=body.adapter)

    @app.get("/health")
    async def health() -> Response:
        return await answer_health(gateway)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check(request)
        return answer_metrics(gateway)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return document(app, LoadBody, UnloadBody, AdapterBody, DrainBody)

    wrapped: Any = app
    if is_open:
        wrapped = OwnHost(wrapped, host)
    return Edge(wrapped)


def has_keys(gateway: Gateway) -> bool:
    """Whether the admin port asks for a key."""
    return gateway.tenants is not None and bool(gateway.tenants.current().admin_keys)
