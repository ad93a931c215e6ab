"""The example adapters and their styles: packed into the wheel, or those of the checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from lora_slots.errors import UsageError


def folder() -> Path:
    """Where the examples are."""
    packed = Path(__file__).with_name("_examples")
    return packed if packed.is_dir() else Path(__file__).parents[2] / "examples"


def adapters() -> dict[str, Path]:
    """Name -> PEFT directory of each example adapter."""
    home = folder() / "adapters"
    return {path.name: path for path in sorted(home.iterdir()) if path.is_dir()} if home.is_dir() else {}


def styles() -> ModuleType:
    """`examples/styles.py`: DEMO_PROMPT, STYLES and looks_right(name, text). Raises UsageError if it is not there."""
    file = folder() / "styles.py"
    spec = importlib.util.spec_from_file_location("lora_slots_example_styles", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UsageError(f"{file}: the examples are not here")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
