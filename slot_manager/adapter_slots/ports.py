"""What the manager needs from the world, as protocols; the modules beside this one are the real things."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from adapter_slots.host import Region

Clock = Callable[[], float]
"""Seconds that never go back (`time.monotonic`)."""


class Engine(Protocol):
    """The engine behind `tensorrt_llm` (engine.py)."""

    async def ready(self) -> bool:
        """Whether the engine takes requests. Never raises."""

    async def register(self, region: Region) -> None:
        """Let the engine's server map a region."""

    async def unregister(self, region: Region) -> None:
        """Let it unmap the region."""

    async def bind(self, task_id: int, region: Region) -> None:
        """One token with weights."""

    async def touch(self, task_id: int) -> None:
        """One token with the id alone."""

    async def close(self) -> None:
        """End of the connection."""


class Metric(Protocol):
    """One labelled series."""

    def increment(self, value: float) -> None:
        """Add to a counter."""

    def set(self, value: float) -> None:
        """Set a gauge."""


class MetricSink(Protocol):
    """Where metrics go: Triton's custom metrics in `lora_router`, a dictionary in tests."""

    def series(self, name: str, labels: Mapping[str, str]) -> Metric:
        """The series of a family (see docs/metrics.md) with these labels; made on first use."""
        ...

    def only(self, name: str, labels: Mapping[str, str]) -> Metric:
        """The one series of a family whose labels are its content: any other of the family is dropped."""
        ...
