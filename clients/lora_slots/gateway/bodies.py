"""What the two generating routes take, field by field: used or refused by its name, never passed over.

A field of OpenAI's API that this server cannot honour is taken where its value changes nothing (`tools: null`), else
refused. A field nobody knows is refused. `user` and `metadata` are taken: the one keeps an alias sticky, the other is
for the client's own records.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from lora_slots.gateway.errors import ApiError

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1000
MAX_BIASES: Final = 1024


def only(*values: Any, why: str = "is not supported by this server") -> Any:
    """The default of a field that may only have values that change nothing: these, or null."""
    return Field(None, json_schema_extra={"enum": [None, *values], "x-reason": why})


def wrong(text: str) -> PydanticCustomError:
    """A value that cannot be used, in our words."""
    return PydanticCustomError("invalid_value", "{text}", {"text": text})


def _stops(value: Any) -> Any:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong(f"must be a text or a list of up to {MAX_STOPS} texts")
    if len(stops) > MAX_STOPS:
        raise wrong(f"at most {MAX_STOPS} stop texts, found {len(stops)}")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise wrong(f"a stop text has 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _biases(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise wrong(f"must be an object of at most {MAX_BIASES} token ids with numbers")
    found = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10):
            raise wrong(f"{token[:20]!r} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise wrong(f"the bias of token {token} must be a number from -100 to 100")
        found[int(token)] = float(bias)
    return found


def _content(value: Any) -> Any:
    """Text parts become one text, a line break between them (as vLLM joins them)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong("must be a text or a list of text parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong(f"part [{i}] must be an object with a 'type'")
        if kind != "text":
            raise PydanticCustomError(
                "unsupported_parameter", "part [{i}] is of type '{kind}': this server takes text parts only",
                {"i": i, "kind": kind[:40]},
            )  # fmt: skip
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise wrong(f"part [{i}] must have 'type' and 'text', a text, and nothing else")
        texts.append(part["text"])
    return "\n".join(texts)


def _prompts(value: Any) -> Any:
    """Each prompt is a text or a list of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(_is_token(one) for one in value)):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value):
            return tuple(value)
        if all(isinstance(one, list) and one and all(_is_token(token) for token in one) for one in value):
            return tuple(value)
    raise wrong("must be a text, a list of texts, a list of token ids, or a list of lists of token ids; none empty")


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}, {"type": "null"}]}),
]
Biases = Annotated[
    dict[int, float],
    BeforeValidator(_biases),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}),
]
Content = Annotated[
    str,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": _TEXT},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]
Prompts = Annotated[
    tuple[Any, ...],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
Real = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _neutral(cls, value: Any, info: ValidationInfo) -> Any:
        """Hold a field made by `only` to its values."""
        extra = cls.model_fields[str(info.field_name)].json_schema_extra
        if isinstance(extra, dict) and "x-reason" in extra:
            allowed = extra["enum"]
            if not any(type(value) is type(one) and value == one for one in allowed):  # type: ignore[union-attr]
                raise PydanticCustomError("unsupported_parameter", "{why}", {"why": extra["x-reason"]})
        return value


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Any = only(False)


class Message(_Strict):
    """One message of a conversation. `developer` is what newer clients call `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    refusal: Any = only()
    audio: Any = only()
    annotations: Any = only([])
    function_call: Any = only()
    tool_calls: Any = only([])
    name: Any = only()


class GenerationBody(_Strict):
    """What both routes take."""

    model: Annotated[str, Field(min_length=1, max_length=300)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stops = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Real, Field(ge=0.01, le=10)] | None = None
    logit_bias: Biases = {}
    ignore_eos: bool | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: dict[str, str] | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Any = only(0, why="the engine gives the log-probabilities of chosen tokens only: 0 or nothing")
    tools: Any = only([])
    tool_choice: Any = only("none")
    parallel_tool_calls: Any = only()
    functions: Any = only([])
    function_call: Any = only("none")
    response_format: Any = only({"type": "text"})
    modalities: Any = only(["text"])
    audio: Any = only()
    prediction: Any = only()
    reasoning_effort: Any = only("none")
    verbosity: Any = only()
    service_tier: Any = only("auto", "default")
    store: Any = only(False)
    web_search_options: Any = only()
    safety_identifier: Any = only()
    prompt_cache_key: Any = only()


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Any = only(0, why="the engine gives the log-probabilities of chosen tokens only: 0 or nothing")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Any = only()


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
    "string_too_short": lambda c: f"needs at least {c['min_length']} characters",
    "string_too_long": lambda c: f"takes at most {c['max_length']} characters",
    "greater_than": lambda c: f"must be above {c['gt']}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']}",
    "less_than": lambda c: f"must be below {c['lt']}",
    "less_than_equal": lambda c: f"must be at most {c['le']}",
    "literal_error": lambda c: f"must be {c['expected']}",
    "int_parsing_size": lambda _: "is too large a number",
}


Body = TypeVar("Body", bound=BaseModel)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """A body as its model. Raises ApiError 400 with every wrong field; `param` names the first."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise refusal(error, tuple(kind.model_fields)) from None


def refusal(error: ValidationError, known: Sequence[str]) -> ApiError:
    """Every problem of a body in one answer; `known` are the fields it could have had."""
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if not first["loc"]:
        return ApiError(400, "The body must be a JSON object", code="invalid_type")
    texts = [_text(problem, known) for problem in problems[:10]]
    if len(problems) > 10:
        texts.append(f"and {len(problems) - 10} more")
    kind = first["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return ApiError(400, "; ".join(texts), code=code, param=path_of(first["loc"]))


def path_of(loc: Sequence[int | str]) -> str:
    """`messages[0].content`."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:60]}" if path else step[:60]
    return path


def _text(problem: Any, known: Sequence[str]) -> str:
    path, kind = path_of(problem["loc"]), problem["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(path, known, n=1) if len(problem["loc"]) == 1 else []
        return f"there is no parameter {path!r}" + (f", did you mean {near[0]!r}?" if near else "")
    words = _WORDS.get(kind)
    return f"{path}: {words(problem.get('ctx', {})) if words else problem['msg']}"
