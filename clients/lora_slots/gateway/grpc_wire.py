"""gRPC over HTTP/2: messages in a stream's bytes, how a call ends. Pure.

The form is that of the document "gRPC over HTTP2" (PROTOCOL-HTTP2.md of grpc/grpc).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

LARGEST_MESSAGE = 2**26
"""Bytes. The largest answers here are lists of every adapter, a few MB."""
_HEAD = struct.Struct(">BI")
"""A message's first five bytes: whether it is compressed, and its length."""
CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""By their numbers."""
_OF_HTTP = {
    b"400": "INTERNAL",
    b"401": "UNAUTHENTICATED",
    b"403": "PERMISSION_DENIED",
    b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE",
    b"502": "UNAVAILABLE",
    b"503": "UNAVAILABLE",
    b"504": "UNAVAILABLE",
}
"""What the status of an answer means that is not gRPC's (http-grpc-status-mapping.md); others: UNKNOWN."""


class CallError(Exception):
    """The call ended with this status."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Messages:
    """Cuts the bytes of a stream into messages, however they came in pieces."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = bytearray()

    @property
    def is_amid(self) -> bool:
        """Whether a message has begun and is not whole."""
        return bool(self._left)

    def push(self, data: bytes) -> list[bytes]:
        """The messages that are whole after these bytes. Raises CallError: one that cannot be taken."""
        left = self._left
        if not left and len(data) >= 5:
            compressed, size = _HEAD.unpack_from(data)
            if len(data) == 5 + size and not compressed:  # nearly every token: a frame is a message
                return [data[5:]]
        left += data
        found, at = [], 0
        while len(left) - at >= 5:
            compressed, size = _HEAD.unpack_from(left, at)
            if compressed:
                raise CallError("INTERNAL", "the server sent a compressed message unasked")
            if size > LARGEST_MESSAGE:
                raise CallError("RESOURCE_EXHAUSTED", f"the server sent a message of {size} bytes")
            if len(left) - at - 5 < size:
                break
            found.append(bytes(left[at + 5 : at + 5 + size]))
            at += 5 + size
        del left[:at]
        return found


def message(content: bytes) -> bytes:
    """A message as it is sent."""
    return _HEAD.pack(0, len(content)) + content


def request_fields(authority: str, method: str) -> list[tuple[bytes, bytes]]:
    """The headers of a call; `authority` is host:port, `method` /service/name."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"lora-slots"),
    ]


def check_answer(fields: Mapping[bytes, bytes]) -> None:
    """Look at an answer's headers. Raises CallError: it is none of gRPC's."""
    status, kind = fields.get(b":status", b""), fields.get(b"content-type", b"")
    if status != b"200":
        code = _OF_HTTP.get(status, "UNKNOWN")
        raise CallError(code, f"the server answers with HTTP status {status[:20].decode('ascii', 'replace')}")
    if not kind.startswith(b"application/grpc"):
        raise CallError("UNKNOWN", f"the server answers with the type {kind[:60].decode('ascii', 'replace')}")


def check_end(trailers: Mapping[bytes, bytes]) -> None:
    """Look at how a call ended. Raises CallError: not well."""
    number = trailers.get(b"grpc-status", b"")
    if number == b"0":
        return
    text = unquote_to_bytes(trailers.get(b"grpc-message", b"")).decode("utf-8", "replace")
    known = number.isdigit() and len(number) <= 2 and int(number) < len(CODES)
    raise CallError(CODES[int(number)] if known else "UNKNOWN", text or "the server gives no reason")
