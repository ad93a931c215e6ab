"""Every rule a report can name has its place in docs/conversion-rules.md, and every place there is used."""

from __future__ import annotations

import re
from pathlib import Path

from peft_to_trtllm.fields import MUST_BE_OFF, NO_EFFECT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "conversion-rules.md").read_text()
ANCHORS = set(re.findall(r"^#### ([a-z0-9-]+)$", PAGE, re.MULTILINE))


def rules_in_code() -> set[str]:
    """First arguments of `Findings.add` and `Refused`, and the rules that travel in tables and errors."""
    code = "\n".join(file.read_text() for file in (ROOT / "converters" / "peft_to_trtllm").glob("*.py"))
    found = set(re.findall(r"(?:problems\.add|warnings\.add|Refused|FileProblem)\(\s*\"([a-z0-9-]+)\"", code))
    found |= {rule for rule, _ in MUST_BE_OFF.values()} | {"pickle", "corrupt-file", "unknown-key"}
    return found


def test_every_rule_is_explained() -> None:
    """The anchor in a report line leads somewhere, and no rule on the page is dead."""
    assert rules_in_code() | {"fields"} == ANCHORS


def test_the_passed_over_fields_are_named() -> None:
    """The page lists exactly the fields that the table passes over."""
    assert all(re.search(rf"\b{name}\b", PAGE) for name in NO_EFFECT)
