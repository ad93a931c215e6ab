"""Puts a slot manager together from its settings: what `lora_router` calls once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.disk import DiskTier
from adapter_slots.engine import TritonEngine
from adapter_slots.machine import SlotMachine
from adapter_slots.manager import SlotManager
from adapter_slots.ports import MetricSink
from adapter_slots.registry import Registry
from adapter_slots.router import Router
from adapter_slots.settings import Settings


@dataclass(frozen=True, slots=True)
class Service:
    """A running router and the manager behind it."""

    router: Router
    manager: SlotManager

    def close(self) -> None:
        """Stop the manager."""
        self.manager.close()


def open_service(parameters: Mapping[str, str], metrics: MetricSink | None = None) -> Service:
    """Start a manager from `lora_router`'s parameters.

    Raises:
        SettingsError, RegistryError: with every reason; nothing is left running.
    """
    settings = Settings.parse(parameters)
    geometry = settings.geometry()
    machine = SlotMachine(settings.machine(geometry))
    registry = Registry(Path(settings.registry))
    engine = TritonEngine(settings.engine_url, bind_timeout_s=settings.bind_timeout_s)
    manager = SlotManager(machine, registry, DiskTier(geometry), engine, metrics=metrics)
    manager.start()
    return Service(Router(manager, wait_s=settings.wait_s), manager)
