"""What the two generating routes take, field by field: used or refused by its name, never passed over.

A field of OpenAI's API that this server cannot honour is taken where its value changes nothing (`tools: null`), else
refused. A field nobody knows is refused. `user` and `metadata` are taken: the one keeps an alias sticky, the other is
for the client's own records; so are fields that could change nothing here, whatever they say (`parallel_tool_calls`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from lora_slots.gateway.body_errors import refusal
from lora_slots.gateway.body_size import read_document

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1000
MAX_BIASES: Final = 1024
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 4096
"""Content parts of one message."""


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
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise wrong(f"at most {MAX_STOPS} stop texts, found {len(stops)}")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong(f"must be a text or a list of up to {MAX_STOPS} texts")
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
    if len(value) > MAX_PARTS:
        raise wrong(f"at most {MAX_PARTS} parts, found {len(value)}")
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
    if isinstance(value, str) or _are_tokens(value):
        return (value,)
    if isinstance(value, list) and value and (_are_texts(value) or all(map(_are_tokens, value))):
        return tuple(value)
    raise wrong("must be a text, a list of texts, a list of token ids, or a list of lists of token ids; none empty")


def _are_texts(value: list[Any]) -> bool:
    return all(isinstance(one, str) for one in value)


def _are_tokens(value: Any) -> bool:
    # set and min: there may be hundreds of thousands
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31


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
                    "maxItems": MAX_PARTS,
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
Label = Annotated[str, Field(max_length=512)]
"""A client's own name for something."""
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
    name: Label | None = None


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
    user: Label | None = None
    metadata: dict[str, str] | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Any = only(0, why="the engine gives the log-probabilities of chosen tokens only: 0 or nothing")
    tools: Any = only([])
    tool_choice: Any = only("none")
    parallel_tool_calls: bool | None = None
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
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Any = only(0, why="the engine gives the log-probabilities of chosen tokens only: 0 or nothing")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Any = only()


Body = TypeVar("Body", bound=BaseModel)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """A body as its model. Raises ApiError 400 with every wrong field, and of a list the first; `param` names one."""
    document = read_document(raw)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise refusal(error, tuple(kind.model_fields)) from None
