"""Why a body is refused, in our words: every wrong field at once. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lora_slots.gateway.body_size import path_of
from lora_slots.gateway.errors import ApiError

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
    "invalid_value": "invalid_value",
}
_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "missing": lambda _: "is required",
    "string_type": lambda _: "must be a text",
    "int_type": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "bool_type": lambda _: "must be true or false",
    "list_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be an object",
    "model_type": lambda _: "must be an object",
    "finite_number": lambda _: "must be a finite number",
    "too_short": lambda c: f"needs at least {c['min_length']}",
    "too_long": lambda c: f"takes at most {c['max_length']}",
    "string_too_short": lambda c: f"needs at least {c['min_length']} characters",
    "string_too_long": lambda c: f"takes at most {c['max_length']} characters",
    "greater_than": lambda c: f"must be above {c['gt']}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']}",
    "less_than": lambda c: f"must be below {c['lt']}",
    "less_than_equal": lambda c: f"must be at most {c['le']}",
    "literal_error": lambda c: f"must be {c['expected']}",
    "int_parsing_size": lambda _: "is too large a number",
}


def refusal(error: ValidationError, known: Sequence[str]) -> ApiError:
    """Every problem of a body in one answer; `known` are the fields it could have had."""
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    texts = [_text(problem, known) for problem in problems[:10]]
    if len(problems) > 10:
        texts.append(f"and {len(problems) - 10} more")
    kind = first["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return ApiError(400, "; ".join(texts), code=code, param=path_of(first["loc"]))


def _text(problem: Any, known: Sequence[str]) -> str:
    path, kind = path_of(problem["loc"]), problem["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(path, known, n=1) if len(problem["loc"]) == 1 else []
        return f"there is no parameter {path!r}" + (f", did you mean {near[0]!r}?" if near else "")
    words = _WORDS.get(kind)
    return f"{path}: {words(problem.get('ctx', {})) if words else problem['msg']}"
