"""The OpenAPI document of a port: FastAPI's, with the bodies that routes read themselves, and the error envelope."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}


def takes(kind: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `kind` itself; `streams`: its answer may be server-sent events."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if streams:
        content: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
        extra["responses"] = {"200": {"description": "The answer, whole or as a stream", "content": content}}
    return extra


def document(app: FastAPI, *kinds: type[BaseModel]) -> dict[str, Any]:
    """The document of an application whose routes read `kinds` themselves."""
    made = app.openapi()
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    made.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"], Error=_ERROR)
    failed = {
        "description": "Refused or failed",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
    }
    for path in made["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own form, which is never sent
            operation["responses"]["default"] = failed
    return made
