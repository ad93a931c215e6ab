"""A stack for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lora_slots import embedded
from lora_slots.embedded import Prepared
from lora_slots.stack import TritonServer


@contextmanager
def running(prepared: Prepared, **settings: Any) -> Iterator[TritonServer]:
    """As `embedded.running`; in the end it is killed, since nobody waits for what it still does."""
    with embedded.running(prepared, **settings) as server:
        yield server
        server.kill()
