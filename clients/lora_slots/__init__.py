"""LoRA Slots from outside: `Client` and `AsyncClient` ask a server; the rest is the command line and what it starts.

`import lora_slots` alone brings in nothing: the clients and what belongs to them come when they are first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_slots.async_client import AsyncClient
    from lora_slots.client import Client
    from lora_slots.client_connection import Tls
    from lora_slots.client_retry import ONCE, Retry
    from lora_slots.errors import ServerError, Unreachable, UsageError

__all__ = ["ONCE", "AsyncClient", "Client", "Retry", "ServerError", "Tls", "Unreachable", "UsageError"]

_HOMES = {
    "AsyncClient": "async_client",
    "Client": "client",
    "ONCE": "client_retry",
    "Retry": "client_retry",
    "ServerError": "errors",
    "Tls": "client_connection",
    "Unreachable": "errors",
    "UsageError": "errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"lora_slots.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'lora_slots' has no attribute {name!r}")
