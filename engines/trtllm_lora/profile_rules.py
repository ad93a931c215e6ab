"""All rules of an engine profile, and what they say of one."""

from __future__ import annotations

from trtllm_lora import engine_rules, lora_rules, serving_rules
from trtllm_lora.profile_rule import Rule, Values, broken
from trtllm_lora.yaml_lines import Document, Problem

RULES: tuple[Rule, ...] = (*lora_rules.TABLE.rules, *serving_rules.TABLE.rules, *engine_rules.TABLE.rules)


def rule_problems(document: Document, values: Values) -> list[Problem]:
    """What the rules say of a profile's values; a rule whose values are missing or wrong is passed over."""
    return list(broken(RULES, document, values))
