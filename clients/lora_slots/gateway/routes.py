"""The public port: OpenAI's routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware

from lora_slots.gateway.answers import GenerationResponse
from lora_slots.gateway.bodies import ChatBody, CompletionBody, read_body
from lora_slots.gateway.core import Gateway
from lora_slots.gateway.document import document, takes
from lora_slots.gateway.edge import Edge, OwnHost
from lora_slots.gateway.errors import ApiError
from lora_slots.gateway.names import model_object
from lora_slots.gateway.record import PREFIX, REQUEST_ID, Record
from lora_slots.gateway.wire import ChatWire, CompletionWire

EXPOSED = [REQUEST_ID, *(f"{PREFIX}{name}" for name in ("adapter", "digest", "found-in", "wait-ms")), "retry-after"]


def public_app(gateway: Gateway, host: str, cors_origins: tuple[str, ...] = ()) -> Any:
    """The application of the public port, which listens on `host`; pages of `cors_origins` may read its answers."""
    app = FastAPI(title="LoRA Slots", docs_url=None, redoc_url=None, openapi_url=None)
    handle_errors(app)

    @app.post("/v1/chat/completions", openapi_extra=takes(ChatBody, streams=True))
    async def chat_completions(request: Request) -> Response:
        record = admit(gateway, request)
        body = read_body(ChatBody, await read_json(request, gateway))
        return GenerationResponse(gateway, await gateway.generation(body, record, request.headers), ChatWire)

    @app.post("/v1/completions", openapi_extra=takes(CompletionBody, streams=True))
    async def completions(request: Request) -> Response:
        record = admit(gateway, request)
        body = read_body(CompletionBody, await read_json(request, gateway))
        return GenerationResponse(gateway, await gateway.generation(body, record, request.headers), CompletionWire)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        tenant = gateway.authenticate(request.headers.get("authorization")).tenant
        content = gateway.registry.content
        names = gateway.names(tenant)
        return {
            "object": "list",
            "data": [model_object(content, gateway.base, name, gateway.started) for name in names],
        }

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> dict[str, Any]:
        tenant = gateway.authenticate(request.headers.get("authorization")).tenant
        gateway.find(model, tenant, key=None, draw=0.0)
        return model_object(gateway.registry.content, gateway.base, model, gateway.started)

    @app.get("/health")
    async def health() -> Response:
        return await answer_health(gateway)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if gateway.tenants is not None:
            gateway.authenticate_admin(request.headers.get("authorization"))
        return answer_metrics(gateway)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return document(app, ChatBody, CompletionBody)

    wrapped: Any = app
    if gateway.tenants is None:
        wrapped = OwnHost(wrapped, host)
    return Edge(wrapped, gateway.metrics, readable_by(cors_origins) if cors_origins else None)


def readable_by(origins: tuple[str, ...]) -> Callable[[Any], Any]:
    """What lets pages of these origins read the answers of an application."""
    return partial(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
    )


async def answer_health(gateway: Gateway) -> Response:
    """200 and nothing else. Raises ApiError 503: the engine is not ready."""
    if await gateway.door.ready():
        return Response(status_code=200)
    raise ApiError(503, "The engine is not ready.", kind="server_error", code="engine_unavailable")


def answer_metrics(gateway: Gateway) -> Response:
    """The metrics in Prometheus' text format."""
    return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def admit(gateway: Gateway, request: Request) -> Record:
    """Who sends this, and whether a request more is allowed. Raises ApiError 401, 429."""
    record: Record = request.state.record
    record.caller = gateway.authenticate(request.headers.get("authorization"))
    if record.caller.tenant is not None:
        gateway.limits.request(record.caller.tenant)
    return record


async def read_json(request: Request, gateway: Gateway) -> bytes:
    """The body. Raises ApiError 408, 413, 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # a page in a browser may send other types to any address without being asked
        raise ApiError(
            415, f"The content type must be application/json, found {kind[:60] or 'none'}", code="invalid_type"
        )
    chunks, size = [], 0
    try:
        async with asyncio.timeout(gateway.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > gateway.max_body_bytes:
                    text = f"The body is larger than {gateway.max_body_bytes} bytes"
                    raise ApiError(413, text, code="request_too_large")
                chunks.append(chunk)
    except TimeoutError:
        text = f"The body was not here within {gateway.body_timeout_s:g} s"
        raise ApiError(408, text, code="request_timeout", headers={"connection": "close"}) from None
    return b"".join(chunks)


def handle_errors(app: FastAPI) -> None:
    """Every error of an application is answered in OpenAI's envelope."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        request.state.record.outcome = error.code or error.kind
        return Response(error.body(), error.status, error.headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def no_such_path(request: Request, error: RequestValidationError) -> Response:  # noqa: ARG001 - its form
        # bodies are read by read_body: what FastAPI checks is parts of a path
        return await http_error(request, StarletteHTTPException(404))

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        texts = {
            404: f"There is no route {request.method} {request.url.path[:200]}.",
            405: "This route has other methods.",
        }
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        text = texts.get(error.status_code, "The request cannot be answered.")
        return await api_error(request, ApiError(error.status_code, text, code=code, headers=dict(error.headers or {})))
