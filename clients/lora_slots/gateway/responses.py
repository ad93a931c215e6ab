"""Triton's streamed responses, read from their bytes. Pure.

The responses of one stream differ in their tensors' bytes alone, which stand at the end. So one is parsed, and those
that are the same up to there are only cut: byte for byte the same is the same to any parser. A token costs a quarter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from tritonclient.grpc import service_pb2

from lora_slots.client_wire import is_final

_RAW = 6 << 3 | 2
"""What stands before each tensor's bytes: the number of `raw_output_contents`, and that a length follows."""
_parse = service_pb2.ModelStreamInferResponse.FromString


class Response(NamedTuple):
    """One response."""

    names: Sequence[str]
    """Of its tensors."""
    contents: Sequence[bytes]
    is_final: bool
    """Nothing follows."""


class _Form(NamedTuple):
    """What the responses of a stream have in common."""

    size: int
    """Of the whole message."""
    head: bytes
    """All before the tensors' bytes."""
    cut: struct.Struct
    """How the rest falls into what stands before each tensor's bytes, and those."""
    between: tuple[bytes, ...]
    names: tuple[str, ...]


class Piece(NamedTuple):
    """New tokens of one sequence."""

    prompt: int
    """As it was given to `generate`."""
    sequence: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    """Of `tokens`; empty unless they were asked for."""


class StreamError(Exception):
    """The stream's error, in Triton's words."""


class Responses:
    """Reads the messages (`ModelStreamInferResponse`) of one stream."""

    __slots__ = ("_form",)

    def __init__(self) -> None:
        self._form: _Form | None = None

    def read(self, message: bytes) -> Response:
        """A message. Raises StreamError, and DecodeError: it cannot be parsed."""
        form = self._form
        if form is not None and len(message) == form.size and message.startswith(form.head):
            cut = form.cut.unpack_from(message, len(form.head))
            if cut[::2] == form.between:
                return Response(form.names, cut[1::2], False)
        answer = _parse(message)
        if answer.error_message:
            raise StreamError(answer.error_message)
        response = answer.infer_response
        names, contents = tuple(one.name for one in response.outputs), tuple(response.raw_output_contents)
        ended = is_final(response)
        self._form = None if ended or not contents else _form_of(message, names, contents)
        return Response(names, contents, ended)


def read_piece(number: int, response: Response) -> Piece:
    """A response of `tensorrt_llm` as a piece: its tensors are little-endian."""
    sequence, length = 0, None
    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    for name, raw in zip(response.names, response.contents, strict=False):
        if name == "output_ids":
            tokens = struct.unpack(f"<{len(raw) // 4}i", raw)
        elif name == "sequence_length":
            (length,) = struct.unpack_from("<i", raw)
        elif name == "output_log_probs":
            log_probs = struct.unpack(f"<{len(raw) // 4}f", raw)
        elif name == "sequence_index":
            (sequence,) = struct.unpack_from("<i", raw)
    if length is not None and length < len(tokens):
        tokens = tokens[:length]
    return Piece(number, sequence, tokens, log_probs[: len(tokens)])


def _form_of(message: bytes, names: tuple[str, ...], contents: tuple[bytes, ...]) -> _Form | None:
    """None: the tensors' bytes are not the message's end."""
    between = tuple(bytes([_RAW]) + _varint(len(content)) for content in contents)
    end = b"".join(part for pair in zip(between, contents, strict=True) for part in pair)
    if not message.endswith(end):
        return None
    cut = struct.Struct("".join(f"{len(a)}s{len(b)}s" for a, b in zip(between, contents, strict=True)))
    return _Form(len(message), message[: len(message) - len(end)], cut, between, names)


def _varint(number: int) -> bytes:
    """A number as protobuf writes lengths: seven bits a byte, the lower ones first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
