"""A gateway's application without a server: what needs no engine is asked of it directly."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fakes.gateways import Reply
from lora_slots.gateway.core import Gateway
from lora_slots.gateway.jobs import EngineFacts
from lora_slots.text import Tokenizer


def offline(tokenizer: Tokenizer, *, base: str = "llama", max_body_bytes: int = 2**22) -> Gateway:
    """A gateway before an engine of 21,000 tokens that is not there; it has no adapters."""
    registry = cast(Any, type("Registry", (), {"content": None}))
    facts = EngineFacts(context=21_000, max_prompt=20_000, vocab_size=400)
    return Gateway(cast(Any, None), registry, tokenizer, facts, base, None, max_body_bytes, 60.0, None)


def call(app: Any, path: str, body: bytes = b"", *, method: str = "POST", **headers: str) -> Reply:
    """One request to an application."""
    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    given = {"host": "localhost", "content-type": "application/json", **asked}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "http_version": "1.1", "scheme": "http", "server": ("localhost", 1), "client": ("localhost", 2),
        "root_path": "", "state": {},
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent))
