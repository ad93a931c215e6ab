"""adapters.yaml that somebody broke: the last good one stays, and what is wrong is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapter_slots.registry import FILE_NAME, Registry

GOOD = "schema: 1\nadapters:\n  ant:\n    versions: [{version: 1, digest: d, path: x}]\n"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (GOOD.replace("digest: d", "digest: 2001-99-99"), "month must be in"),
        (GOOD.replace("version: 1", "version: !!int x"), "invalid literal"),
        (GOOD.replace("version: 1", "version: " + "9" * 5000), "5000 digits"),
        (GOOD + "    pool: [g]\n", r"there is no pool \['g'\]"),
        (GOOD + "    pool: {a: 1}\n", "there is no pool"),
        ("schema: 1\nadapters: [", "not YAML"),
    ],
)
def test_a_broken_registry_is_a_problem_told(tmp_path: Path, broken: str, words: str) -> None:
    """Whatever Python says of a value, `refresh` never raises."""
    file = tmp_path / FILE_NAME
    file.write_text(GOOD)
    registry = Registry(file)
    file.write_text(broken)
    assert not registry.refresh()
    assert re.search(words, registry.problem or "")
    assert set(registry.entries) == {"ant"}
