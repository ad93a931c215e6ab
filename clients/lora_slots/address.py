"""Where the embedded stack of this user listens: a small file in the cache, so that `lora-slots generate` finds it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_slots.base_model.store import cache_folder

DEFAULT_URL = "127.0.0.1:8001"
VARIABLE = "LORA_SLOTS_URL"


def _file() -> Path:
    return cache_folder(None) / "stack.json"


@contextmanager
def published(grpc_url: str) -> Iterator[None]:
    """Tell other commands of this user where the stack is, while the block runs."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"grpc": grpc_url, "pid": os.getpid()}), encoding="utf-8")
    try:
        yield
    finally:
        if _read().get("pid") == os.getpid():
            file.unlink(missing_ok=True)


def find() -> str:
    """host:port of Triton's gRPC door: $LORA_SLOTS_URL, the running embedded stack, else 127.0.0.1:8001."""
    given = os.environ.get(VARIABLE)
    return given or str(_read().get("grpc", DEFAULT_URL))


def running() -> str | None:
    """host:port of this user's embedded stack, if one runs."""
    said = _read()
    pid = said.get("pid")
    return str(said["grpc"]) if isinstance(pid, int) and Path(f"/proc/{pid}").is_dir() else None


def _read() -> dict[str, object]:
    try:
        value = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
