"""The JSON schema of `adapters.yaml`, for editors and other programs. `docs/adapters.schema.json` is this.

It says the shape. What goes beyond it (names that collide, targets that are not there, weights that do not sum to
100) registry_rules says; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapter_slots.registry_entries import COLD_POLICIES, NAME_RULE
from adapter_slots.registry_rules import SCHEMA

_TEXT = {"type": "string", "minLength": 1}
_NAME = "^(?!base$)(?!.*\\.\\.)[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}$"
_BASE = {**_TEXT, "description": "name@revision of a base model"}


def schema() -> Mapping[str, Any]:
    """The schema (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "adapters.yaml",
        "description": f"Adapters, their versions and aliases. A name is {NAME_RULE}.",
        **_object(
            {
                "schema": {"const": SCHEMA},
                "base_model": {**_BASE, "description": "name@revision of the base that is served"},
                "require_signatures": {
                    "type": "boolean",
                    "description": "serve only versions that a trusted key has signed",
                },
                "trusted_keys": {
                    **_list(),
                    "description": "ed25519 public keys: base64 of 32 bytes, PEM text, or a PEM file beside this one",
                },
                "last_versions": {
                    **_names({"type": "integer"}),
                    "description": "highest version number ever given, of adapters and versions that were removed",
                },
                "pools": {"type": "object", "additionalProperties": _pool()},
                "aliases": _names(_alias()),
                "adapters": _names(_adapter()),
            },
            required=["schema", "adapters"],
        ),
    }


def _adapter() -> dict[str, Any]:
    return _object(
        {
            "pool": {"type": ["string", "null"], "description": "one of `pools`"},
            "pinned": {"type": "boolean", "description": "keep its current version in a slot"},
            "cold": {"enum": list(COLD_POLICIES), "description": "what its requests do while it is cold"},
            "tenants": {**_list(), "description": "who may use it; absent: everybody, empty: nobody"},
            "current": {"type": "integer", "description": "version that its name means; absent: the last"},
            "versions": {"type": "array", "minItems": 1, "items": _version()},
        },
        required=["versions"],
    )


def _version() -> dict[str, Any]:
    return _object(
        {
            "version": {"type": "integer"},
            "digest": {**_TEXT, "description": "of the bundle; of a raw PEFT adapter its source digest"},
            "path": {**_TEXT, "description": "directory, relative to this file, or s3://bucket/prefix"},
            "base_model": {**_BASE, "description": "name@revision of the base it was trained on"},
            "rank": {"type": "integer", "minimum": 1, "description": "the highest that occurs"},
            "target_modules": _list(),
            "created": {**_TEXT, "description": "ISO 8601"},
            "signature": {**_TEXT, "description": "over the digest: ed25519:<key id>:<base64>"},
        },
        required=["version", "digest", "path"],
    )


def _alias() -> dict[str, Any]:
    percent = {"type": "number", "minimum": 0, "maximum": 100}
    targets = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": percent,
        "description": "adapter or adapter@version -> percent; they sum to 100",
    }
    return _object({"targets": targets}, required=["targets"])


def _pool() -> dict[str, Any]:
    count = {"type": "integer", "minimum": 0}
    return _object({"reserved": count, "cap": count})


def _object(properties: Mapping[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    needed = {"required": required} if required else {}
    return {"type": "object", "properties": dict(properties), **needed, "additionalProperties": False}


def _names(value: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {_NAME: dict(value)}, "additionalProperties": False}


def _list() -> dict[str, Any]:
    return {"type": "array", "items": _TEXT}
