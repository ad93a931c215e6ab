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


def test_numbers_that_nothing_could_be_done_with_are_refused() -> None:
    """No slots, no disk, no time at all, and what is no number; each is told, and is there one by one."""
    given = {
        "num_slots": "0",
        "disk_bytes": "-4",
        "wait_s": "-1",
        "idle_s": "nan",
        "tick_s": "0",
        "low_watermark": "-1",
    }
    with pytest.raises(SettingsError) as told:
        Settings.parse({**NEEDED, **given, "host_bytes": "many"})
    assert {problem.partition(":")[0] for problem in told.value.problems} == {*given, "host_bytes"}
    assert "disk_bytes: at least 1 is expected, found '-4'" in str(told.value)
    assert Settings.parse({**NEEDED, "low_watermark": "0", "wait_s": "0"}).low_watermark == 0
