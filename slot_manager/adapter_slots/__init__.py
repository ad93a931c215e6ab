"""The bounded, pinnable working set of adapters of one engine.

Start reading at `machine.py` (what is decided), then `manager.py` (how it is carried out).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapter_slots.errors import SlotError, TierError
    from adapter_slots.events import Tier
    from adapter_slots.machine import SlotMachine
    from adapter_slots.manager import Owner, SlotManager
    from adapter_slots.records import MachineConfig
    from adapter_slots.registry import Registry, publish
    from adapter_slots.router import Incoming, Router
    from adapter_slots.serve import Service, open_service
    from adapter_slots.settings import Settings, SettingsError

__all__ = [
    "Incoming",
    "MachineConfig",
    "Owner",
    "Registry",
    "Router",
    "Service",
    "Settings",
    "SettingsError",
    "SlotError",
    "SlotMachine",
    "SlotManager",
    "Tier",
    "TierError",
    "open_service",
    "publish",
]

_HOMES = {
    "Incoming": "router",
    "MachineConfig": "records",
    "Owner": "manager",
    "Registry": "registry",
    "Router": "router",
    "Service": "serve",
    "Settings": "settings",
    "SettingsError": "settings",
    "SlotError": "errors",
    "SlotMachine": "machine",
    "SlotManager": "manager",
    "Tier": "events",
    "TierError": "errors",
    "open_service": "serve",
    "publish": "registry",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"adapter_slots.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'adapter_slots' has no attribute {name!r}")
