"""What a client says to Triton and what it hears, as KServe messages: requests of the ensemble, operations of
`lora_router`, errors. No connection is made here.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tritonclient.grpc import service_pb2

from lora_slots.errors import ServerError, Unreachable, UsageError

ENSEMBLE, ROUTER = "ensemble", "lora_router"
SAMPLING: Mapping[str, str] = {
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "seed": "UINT64",
    "min_tokens": "INT32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
}
"""Sampling options of the ensemble, and Triton's type of each."""
COLD = ("wait", "fail")
"""What an ensemble's request can do about an adapter that is in no slot."""
_FORMATS = {"INT32": "<i", "FP32": "<f", "UINT64": "<Q", "BOOL": "<?"}
_STATUS = re.compile(r"^\[?StatusCode\.(\w+)\]?\s*")
_TAG = re.compile(r"^\[([A-Z_]+)\] ")
"""`lora_router` begins its error texts with their code: a stream carries no status of its own (and the header that asks
Triton 2.51 for one, triton_grpc_error, crashes that server)."""
_IN_ENSEMBLE = re.compile(r"^in ensemble '[^']*', (\[request id: [^\]]*\] )?")
_TRACE = re.compile(r"\s*\bAt:\s*\n.*|\s*Traceback \(most recent call last\).*", re.DOTALL)
_RETRY_AFTER = re.compile(r"(?:ready in about|retry after|retry-after:?) (\d+(?:\.\d+)?) ?s\b", re.IGNORECASE)
_MISS = "not found in cache"


class Message:
    """One request being put together; `made` is what is sent."""

    def __init__(self, model: str, request_id: str, outputs: Sequence[str]) -> None:
        self.made = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        for name in outputs:
            self.made.outputs.add(name=name)
        self.made.parameters["triton_enable_empty_final_response"].bool_param = True

    def texts(self, name: str, values: Sequence[str]) -> None:
        """An input of texts, shape [1, count]. Raises UsageError: one that is no text."""
        try:
            encoded = [value.encode() for value in values]
        except UnicodeEncodeError as error:  # which would carry the whole text along
            raise UsageError(f"{name}: half a character at position {error.start}") from None
        self.add(name, "BYTES", (1, len(encoded)), b"".join(struct.pack("<I", len(text)) + text for text in encoded))

    def value(self, name: str, value: float, kind: str) -> None:
        """An input of one number, shape [1, 1]. Raises UsageError: it is none of that kind."""
        try:
            number = value if kind == "FP32" or value != int(value) else int(value)
            self.add(name, kind, (1, 1), struct.pack(_FORMATS[kind], number))
        except (struct.error, OverflowError, ValueError, TypeError):
            raise UsageError(f"{name}: {str(value)[:40]} is no {kind}") from None

    def ids(self, name: str, ids: Sequence[int], shape: Sequence[int] | None = None) -> None:
        """An input of token ids, INT32, shape [1, count] if no other is given."""
        self.add(name, "INT32", shape or (1, len(ids)), struct.pack(f"<{len(ids)}i", *ids))

    def add(self, name: str, kind: str, shape: Sequence[int], content: bytes) -> None:
        """An input as bytes, little-endian; `kind` is Triton's type."""
        self.made.inputs.add(name=name, datatype=kind, shape=shape)
        self.made.raw_input_contents.append(content)


class Options(TypedDict, total=False):
    """What may be said about a request."""

    max_tokens: int
    """Tokens of the answer at most; 64 if not said."""
    request_id: str | None
    """Unique among running requests; None: one is made, a new one for each try."""
    end_id: int | None
    """Token that ends the answer; None: the tokenizer's."""
    sampling: Mapping[str, float] | None
    """Names of SAMPLING; without any, the most likely token is taken."""
    stop: Sequence[str]
    """Texts that end the answer."""
    session: str | None
    """The same session has the same version of an alias."""
    cold: str | None
    """`wait` for a slot, or `fail` at once (it is warmed meanwhile); None: as the adapter or the server says."""
    timeout_s: float | None
    """Of all tries and the whole answer; None: the client's own."""


def generate_request(text: str, adapter: str | None, *, stream: bool, request_id: str, options: Options) -> Any:
    """A request of the ensemble (`ModelInferRequest`). Raises UsageError: an option that cannot be meant."""
    strange = sorted(options.keys() - Options.__annotations__.keys())
    if strange:
        raise UsageError(f"no option {', '.join(strange)}; there are {', '.join(Options.__annotations__)}")
    message = Message(ENSEMBLE, request_id, ["text_output"])
    message.texts("text_input", [text])
    message.value("max_tokens", options.get("max_tokens", 64), "INT32")
    message.value("stream", stream, "BOOL")
    if adapter is not None:
        message.texts("adapter", [adapter])
    if (end_id := options.get("end_id")) is not None:
        message.value("end_id", end_id, "INT32")
    for name, value in checked_sampling(options.get("sampling")).items():
        message.value(name, value, SAMPLING[name])
    if isinstance(stop := options.get("stop", ()), str):
        raise UsageError("stop: a sequence of texts is expected, found one text")
    if stop:
        message.texts("stop_words", stop)
    if (session := options.get("session")) is not None:
        message.made.parameters["session"].string_param = session
    if (cold := options.get("cold")) is not None:
        if cold not in COLD:
            raise UsageError(f"cold: an ensemble's request can {' or '.join(map(repr, COLD))}, found {cold[:20]!r}")
        message.made.parameters["cold"].string_param = cold
    return message.made


def checked_sampling(sampling: Mapping[str, float] | None) -> Mapping[str, float]:
    """The options, all of which exist. Raises UsageError."""
    strange = [name for name in sampling or {} if name not in SAMPLING]
    if strange:
        raise UsageError(f"sampling: no option {', '.join(map(repr, strange))}; there are {', '.join(SAMPLING)}")
    return sampling or {}


def operation_request(op: str, arguments: Mapping[str, Any], request_id: str) -> Any:
    """A request of `lora_router` (`ModelInferRequest`)."""
    message = Message(ROUTER, request_id, ["op_result"])
    message.texts("op", [op])
    message.texts("op_args", [json.dumps(arguments)])
    return message.made


def text_of(response: Any) -> str | None:
    """The text of an ensemble's `ModelInferResponse`; None if it has none."""
    content = _content(response, "text_output")
    return None if content is None else "".join(text.decode("utf-8", "replace") for text in _texts(content))


def result_of(response: Any) -> dict[str, Any] | None:
    """What an operation answered; None if the response has no answer."""
    return result_in(_content(response, "op_result"))


def result_in(content: bytes | None) -> dict[str, Any] | None:
    """The answer in an operation's `op_result`; None if there is none."""
    return None if content is None else dict(json.loads(_texts(content)[0]))


def tokens_of(response: Any) -> list[int]:
    """New token ids in a `ModelInferResponse` of `tensorrt_llm`, asked for `output_ids` and `sequence_length`."""
    ids, length = _content(response, "output_ids"), _content(response, "sequence_length")
    if ids is None or length is None:
        return []
    return list(struct.unpack(f"<{len(ids) // 4}i", ids))[: struct.unpack_from("<i", length)[0]]


def is_final(response: Any) -> bool:
    """Whether no further response of the request follows."""
    return bool(response.parameters["triton_final_response"].bool_param)


def is_miss(error: BaseException | None) -> bool:
    """Whether the engine had forgotten the adapter."""
    return isinstance(error, ServerError) and _MISS in str(error)


def server_error(error: Exception, url: str) -> ServerError:
    """Triton's error as ours: the status name, and the text without Triton's wrapping or a trace."""
    text = str(error)
    status = _STATUS.match(text)
    message = _IN_ENSEMBLE.sub("", _TRACE.sub("", _STATUS.sub("", text))).strip()
    tag = _TAG.match(message)
    code = tag.group(1) if tag else status.group(1) if status else "UNKNOWN"
    message = _TAG.sub("", message)
    if code == "UNAVAILABLE" and not tag and "connect" in message:
        return no_server(url, message)
    later = _RETRY_AFTER.search(message)
    return ServerError(message, code=code, retry_after_s=float(later.group(1)) if later else None)


def rpc_error(error: Any, url: str, timeout_s: float | None, *, begun: bool) -> ServerError:
    """What gRPC itself says (`grpc.RpcError`) when a call fails; `begun`: part of the answer had come."""
    status, details = error.code().name, error.details() or ""
    if status == "DEADLINE_EXCEEDED" and timeout_s is not None:
        return ServerError(f"no whole answer within {timeout_s:g} s", code=status)
    if status == "CANCELLED":
        return ServerError("the request was cancelled", code=status)
    if status == "UNAVAILABLE" and "is restricted" not in details:
        return broken_off(url) if begun else no_server(url, details)
    return server_error(Exception(f"[StatusCode.{status}] {details}"), url)


def no_server(url: str, why: str) -> Unreachable:
    """Nobody answers there; of gRPC's chain of reasons the last one is told."""
    reason = why.rpartition(": ")[2].strip() or why
    return Unreachable(f"no server answers at {url}; start one with `lora-slots up`, or give --url ({reason})")


def broken_off(url: str) -> Unreachable:
    """The server ended a stream before its last response."""
    return Unreachable(f"the server at {url} broke the answer off")


def _content(response: Any, name: str) -> bytes | None:
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if tensor.name == name:
            return bytes(raw)
    return None


def _texts(content: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(content):
        (size,) = struct.unpack_from("<I", content, at)
        found.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    return found
