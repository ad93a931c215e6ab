"""Where a command without --url finds its server."""

from __future__ import annotations

import os

from lora_slots import stack_folders

DEFAULT_URL = "127.0.0.1:8001"
VARIABLE = "LORA_SLOTS_URL"


def find() -> str:
    """host:port of Triton's gRPC door: $LORA_SLOTS_URL, this user's newest running stack, else 127.0.0.1:8001."""
    return os.environ.get(VARIABLE) or next(iter(stack_folders.running()), DEFAULT_URL)
