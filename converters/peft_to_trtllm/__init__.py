"""PEFT LoRA adapter -> TensorRT-LLM bundle, or a report of every reason why not.

`convert` writes a bundle, `inspect` only judges. Rules: docs/conversion-rules.md. torch is never imported here.

The names are brought in when they are first asked for: the command line starts hashing an adapter before numpy is
imported (file_hash.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft_to_trtllm.api import convert, inspect
    from peft_to_trtllm.errors import AdapterRefused, ConversionError, InputError
    from peft_to_trtllm.report import Problem, Report

__all__ = ["AdapterRefused", "ConversionError", "InputError", "Problem", "Report", "convert", "inspect"]

_HOMES = {"convert": "api", "inspect": "api", "Problem": "report", "Report": "report"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
