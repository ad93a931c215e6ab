"""The embedded stack: a real Triton on this machine's CPU, out of a wheel, behind one context manager."""

from lora_slots.stack.config import Ports, StackConfig
from lora_slots.stack.errors import (
    LibpythonMissing,
    ModelsFailed,
    NoTemporary,
    NotReady,
    NumpyTooNew,
    PortTaken,
    ServerDied,
    SetupError,
    StackError,
    StubDied,
    TritonMissing,
    WrongPython,
)
from lora_slots.stack.server import TritonServer
from lora_slots.stack.signals import exit_on_signals

__all__ = [
    "LibpythonMissing",
    "ModelsFailed",
    "NoTemporary",
    "NotReady",
    "NumpyTooNew",
    "PortTaken",
    "Ports",
    "ServerDied",
    "SetupError",
    "StackConfig",
    "StackError",
    "StubDied",
    "TritonMissing",
    "TritonServer",
    "WrongPython",
    "exit_on_signals",
]
