"""Puts a slot manager together from its settings: what `lora_router` calls once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.disk import Converter, DiskTier
from adapter_slots.engine import TritonEngine
from adapter_slots.machine import SlotMachine
from adapter_slots.manager import SlotManager
from adapter_slots.mover import Limits, Mover
from adapter_slots.policy import POLICIES
from adapter_slots.ports import MetricSink
from adapter_slots.registry import Registry
from adapter_slots.router import Router
from adapter_slots.settings import Settings
from adapter_slots.store import Stores, StoreSettings

MakeConverter = Callable[[Settings], Converter | None]


@dataclass(frozen=True, slots=True)
class Service:
    """A running router and the manager behind it."""

    router: Router
    manager: SlotManager

    def close(self) -> None:
        """Stop the manager."""
        self.manager.close()


def open_service(
    parameters: Mapping[str, str], metrics: MetricSink | None = None, converter: MakeConverter | None = None
) -> Service:
    """Start a manager from `lora_router`'s parameters.

    `converter` makes, from the settings, what turns a raw PEFT adapter into a bundle; without it raw ones are refused.

    Raises:
        SettingsError, RegistryError, TierError: with every reason; nothing is left running.
    """
    settings = Settings.parse(parameters)
    shape = settings.shape()
    geometry = settings.geometry(shape)
    registry = Registry(
        settings.registry,
        base_model=settings.base_model,
        endpoint_url=settings.s3_endpoint_url,
        refresh_s=settings.registry_refresh_s,
    )
    machine = SlotMachine(settings.machine(geometry, registry.pools), POLICIES[settings.policy]())
    disk = DiskTier(
        geometry,
        Path(settings.disk_dir) if settings.disk_dir else None,
        max_bytes=settings.disk_bytes,
        converter=converter(settings) if converter else None,
    )
    mover = Mover(
        disk,
        TritonEngine(settings.engine_url, bind_timeout_s=settings.bind_timeout_s),
        Stores(StoreSettings(endpoint_url=settings.s3_endpoint_url)),
        Limits(settings.to_disk_timeout_s, settings.to_host_timeout_s),
        lambda: registry.terms,
    )
    state_file = Path(settings.state_file) if settings.state_file else None
    manager = SlotManager(machine, registry, mover, metrics=metrics, state_file=state_file)
    manager.start()
    router = Router(
        manager,
        shape.request_limits,
        wait_s=settings.wait_s,
        cold=settings.cold,
        first_token_s=settings.first_token_s,
    )
    return Service(router, manager)
