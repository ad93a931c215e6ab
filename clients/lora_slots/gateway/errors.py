"""What a client of the gateway is told, in OpenAI's envelope: {"error": {message, type, param, code}}.

ApiError
├── invalid       400 invalid_request_error   a field is wrong; `param` names it
├── not_found     404 invalid_request_error   model_not_found, or no such route
├── unauthorized  401 authentication_error    no key, or a wrong one
├── limited       429 rate_limit_error        with Retry-After
└── unavailable   503 server_error            the adapter cannot be had now; the engine cannot be reached
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from lora_slots.errors import ServerError, Unreachable

_PATH = re.compile(r"(?<![\w/])(?:[A-Za-z][\w+.-]*://\S+|(?:/[\w.@+-]+){2,}/?)")
_TOO_LONG = re.compile(r"Prompt length \((\d+)\) exceeds maximum input length \((\d+)\)")
_FOR_OPERATORS = re.compile(r"; `lora-slots .*")
_UNAVAILABLE_RETRY_S = 1.0


class ApiError(Exception):
    """An answer that is no success. `message` is for a person; `code` and `param` for a program."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers: dict[str, str] = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """The envelope as plain data."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """The envelope as JSON."""
        return orjson.dumps(self.document())


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A field of the request is wrong."""
    return ApiError(400, message, code=code, param=param)


def unauthorized(message: str) -> ApiError:
    """No key, or a wrong one."""
    return ApiError(
        401, message, kind="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
    )


def limited(message: str, code: str, retry_after_s: float | None) -> ApiError:
    """A limit is reached; None: it can never pass, so that a client must not try again."""
    if retry_after_s is None:
        headers = {"x-should-retry": "false"}
    else:
        headers = {"retry-after": str(int(max(0.0, retry_after_s)) + 1)}
    return ApiError(429, message, kind="rate_limit_error", code=code, headers=headers)


def unavailable(message: str, code: str, retry_after_s: float = _UNAVAILABLE_RETRY_S) -> ApiError:
    """Not now; the same request may work in a while."""
    headers = {"retry-after": str(int(max(0.0, retry_after_s)) + 1)}
    return ApiError(503, message, kind="server_error", code=code, headers=headers)


def context_too_long(prompt: int, answer: int | None, limit: int, param: str, *, at_least: bool = False) -> ApiError:
    """A prompt (and the answer that was asked for) beyond the engine; every length is named.

    `at_least`: the prompt was not tokenised, it has `prompt` tokens or more.
    """
    if answer is None:
        text = f"The prompt has {'at least ' * at_least}{prompt} tokens, and the engine takes at most {limit}."
    else:
        text = (
            f"The prompt has {prompt} tokens and {answer} were asked for in the answer: {prompt + answer} together, "
            f"and the engine's context is {limit} tokens."
        )
    return ApiError(400, text, code="context_length_exceeded", param=param)


def from_lease(error: ServerError, asked: str) -> ApiError:
    """Why the slot manager granted no lease for the model name `asked`."""
    if isinstance(error, Unreachable):  # its words are for an operator
        return from_engine(error)
    text = without_paths(_FOR_OPERATORS.sub("", str(error)))
    match error.code:
        case "UNAVAILABLE" | "DEADLINE_EXCEEDED" | "CANCELLED":
            return unavailable(text, "adapter_unavailable", error.retry_after_s or _UNAVAILABLE_RETRY_S)
        case "RESOURCE_EXHAUSTED":
            return limited(text, "no_slot", None)
        case "INVALID_ARGUMENT" | "INVALID_ARG" | "FAILED_PRECONDITION":
            return ApiError(422, text, code="adapter_rejected", param="model")
        case "NOT_FOUND":
            return unavailable(f"{asked} is published, and the server does not know it yet", "adapter_unavailable")
        case _:
            return ApiError(500, "The slot manager failed.", kind="server_error", code="internal_error")


def from_operation(error: ServerError) -> ApiError:
    """Why an operation of the slot manager failed, for its operator: nothing is left out."""
    status = {"NOT_FOUND": 404, "ALREADY_EXISTS": 409, "UNAVAILABLE": 503, "INTERNAL": 500}.get(error.code, 400)
    if status == 503:
        return unavailable(str(error), "operation_failed")
    kind = "server_error" if status == 500 else "invalid_request_error"
    return ApiError(status, str(error), kind=kind, code="operation_failed")


def from_engine(error: ServerError) -> ApiError:
    """Why the engine gave no answer, or broke off."""
    too_long = _TOO_LONG.search(str(error))
    if too_long:
        return context_too_long(int(too_long.group(1)), None, int(too_long.group(2)), "messages")
    if error.code == "UNAVAILABLE":
        return unavailable("The engine cannot be reached.", "engine_unavailable")
    if "Maximum queue size" in str(error):
        return unavailable("The engine's queue is full.", "engine_overloaded")
    return ApiError(500, "The engine failed on this request.", kind="server_error", code="engine_error")


def without_paths(text: str) -> str:
    """A text without the server's paths and URLs."""
    return _PATH.sub("…", text)
