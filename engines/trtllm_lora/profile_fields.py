"""What is said of one field of a profile that is wrong by itself: what was found, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from trtllm_lora.profile import SCHEMA, SECTIONS, EngineProfile
from trtllm_lora.yaml_lines import Document, Problem, Where

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a number",
    "bool": "true or false",
    "list": "a list, such as [attn_q, attn_k, attn_v]",
    "string": "a text",
}
"""Beginning of pydantic's name of a problem -> what is expected."""
_MISSING = {
    "schema": f"write schema: {SCHEMA}",
    "name": "write name: with lower-case letters, digits, dots and hyphens",
    "lora.modules": "write modules: [attn_q, attn_k, attn_v], or all that adapters may have",
}


def field_problem(document: Document, details: Mapping[str, Any]) -> Problem:
    """One of pydantic's errors as a problem of the document."""
    where: Where = tuple(details["loc"])
    kind, found = details["type"], details["input"]
    if kind == "missing":
        return document.problem(where, "is missing", _missing(where))
    if kind == "extra_forbidden":
        return document.problem(where, "no such key", _instead(where))
    if kind == "value_error":
        what, _, write = details["msg"].removeprefix("Value error, ").partition(": write ")
        return document.problem(where, what, f"write {write}" if write else "")
    if kind == "string_type" and found is not None and not isinstance(found, dict | list):
        what = f"{str(found)[:40]} was read as {type(found).__name__}, not as text"
        return document.problem(where, what, "write it in quotes")
    wanted = _wanted(kind, details.get("ctx") or {}, where)
    if kind == "literal_error":
        options = [word.strip("'") for word in wanted.replace(" or ", ", ").split(", ")]
        near = difflib.get_close_matches(str(found), options, n=1)
        what = (
            f"{str(found)[:80]!r} is none of {', '.join(options)}" if len(options) > 1 else f"{found!r:.80} is unknown"
        )
        return document.problem(where, what, f"write {near[0] if near else wanted}")
    shown = "nothing stands there" if found is None else f"{found!r:.80} is not {wanted}"
    return document.problem(where, shown, f"write {wanted}")


def _wanted(kind: str, context: Mapping[str, Any], where: Where) -> str:
    """What is expected, in words that follow `write`."""
    match kind:
        case "literal_error":
            return str(context["expected"]).replace("'", "")
        case "greater_than_equal":
            return f"a whole number of at least {context['ge']}"
        case "greater_than" | "less_than":
            return "a number above 0 and below 1" if where[-1] in _FRACTIONS else "a number above 0"
        case "string_pattern_mismatch":
            return "lower-case letters, digits, dots and hyphens, 63 at most, a letter or digit first"
        case "string_too_short":
            return "a text that is not empty"
        case "too_short":
            return "at least one, such as [attn_q, attn_k, attn_v]"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"a section: keys below {where[-1]}:, such as {', '.join(list(_known(where))[:3])}"
    return next((words for name, words in _KINDS.items() if kind.startswith(name)), "a value of another kind")


_FRACTIONS = ("kv_cache_fraction", "lora_gpu_fraction")


def _missing(where: Where) -> str:
    key, dotted = str(where[-1]), ".".join(map(str, where))
    if dotted in _MISSING:
        return _MISSING[dotted]
    cls = SECTIONS.get(key)
    if cls is not None and len(where) == 1:
        needed = [name for name, field in cls.model_fields.items() if field.is_required()]
        return f"write {key}: with {', '.join(needed)} below it"
    field = SECTIONS[str(where[0])].model_fields[key]
    return f"write {key}: {field.description or 'a whole number, as config.json of the base has it'}"


def _instead(where: Where) -> str:
    """What may be meant by a key that is not known: the same of another section, or one nearly named so."""
    key = str(where[-1])
    for section, cls in SECTIONS.items():
        for name in cls.model_fields:
            if section != where[0] and key in (name, f"{section}_{name}"):
                return f"write {name} under {section}:"
    near = difflib.get_close_matches(key, list(_known(where[:-1])), n=1, cutoff=0.7)
    return f"write {near[0]}" if near else f"known are {', '.join(_known(where[:-1]))}"


def _known(where: Where) -> Iterator[str]:
    cls = SECTIONS.get(str(where[0])) if where else EngineProfile
    for name, field in (cls.model_fields if cls else {}).items():
        yield field.alias or name
