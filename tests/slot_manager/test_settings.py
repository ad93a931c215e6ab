"""Settings of lora_router: every parameter of the template is one of them, and all mistakes are told at once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from adapter_slots.settings import Settings, SettingsError

TEMPLATE = Path(__file__).parents[2] / "triton_repo" / "lora_router" / "config.pbtxt"
NEEDED = {"engine_dir": "e", "registry": "r", "engine_url": "u"}


def test_the_template_has_exactly_the_settings() -> None:
    """A setting that cannot be given, or a parameter that is none, would be a trap."""
    config = text_format.Parse(TEMPLATE.read_text(), model_config_pb2.ModelConfig())
    assert set(config.parameters) == {field.name for field in fields(Settings)}


def test_values_have_their_types_and_empty_means_default() -> None:
    """Strings from Triton become numbers and texts; an empty one is not given."""
    given = {"num_slots": "3", "idle_s": "1.5", "low_watermark": "", "disk_dir": "/d", "state_file": "/s"}
    settings = Settings.parse({**NEEDED, **given})
    assert (settings.num_slots, settings.idle_s, settings.low_watermark) == (3, 1.5, None)
    assert (settings.disk_dir, settings.state_file, settings.policy) == ("/d", "/s", "lru")


def test_every_mistake_is_told_at_once() -> None:
    """Unknown, missing, not a number, not a choice."""
    with pytest.raises(SettingsError) as told:
        Settings.parse({"registry": "r", "engine_url": "u", "num_slot": "3", "tick_s": "often", "policy": "mru"})
    for words in ("num_slot: no such parameter", "engine_dir: missing", "tick_s: a number", "policy: 'mru' is none of"):
        assert words in str(told.value)
