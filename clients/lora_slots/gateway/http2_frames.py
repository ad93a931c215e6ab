"""Frames of HTTP/2: their numbers, and how a client writes them. Pure.

Numbers in brackets are sections of RFC 9113.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client says first (3.4)."""

# kinds (6)
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
# flags (6)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
# reasons (7)
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM = 1, 3, 6, 7
CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 8, 9, 11
# settings (6.5.2)
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 3, 4, 5
MAX_HEADER_LIST_SIZE = 6

DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
LEAST_FRAME, LARGEST_FRAME = 2**14, 2**24 - 1
HEAD = struct.Struct(">HBBBI")
"""A frame's first nine bytes (4.1): the length's upper 16 bits and lower 8, kind, flags, stream."""
NUMBER = struct.Struct(">I")
SETTING = struct.Struct(">HI")


class Http2Error(Exception):
    """The peer breaks the protocol; what is wrong with one stream ends the connection too (5.4)."""

    def __init__(self, reason: int, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A frame (4.1)."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """What holds for the peer from now on (6.5)."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*one) for one in values.items()))


def window_update(stream_id: int, size: int) -> bytes:
    """Leave to send `size` bytes more (6.9); stream 0: all streams together."""
    return frame(WINDOW_UPDATE, 0, stream_id, NUMBER.pack(size))


def rst_stream(stream_id: int, reason: int) -> bytes:
    """The end of a stream at once (6.4)."""
    return frame(RST_STREAM, 0, stream_id, NUMBER.pack(reason))


def goaway(reason: int) -> bytes:
    """The end of the connection (6.8); a server opens no streams here, so the last one of them is 0."""
    return frame(GOAWAY, 0, 0, NUMBER.pack(0) + NUMBER.pack(reason))


def headers(stream_id: int, block: bytes, largest: int) -> bytes:
    """A block of headers, over several frames if it is larger than one may be (6.2, 6.10)."""
    pieces = [block[at : at + largest] for at in range(0, len(block), largest)] or [b""]
    kinds = [HEADERS, *[CONTINUATION] * (len(pieces) - 1)]
    flags = [*[0] * (len(pieces) - 1), END_HEADERS]
    return b"".join(frame(kind, flag, stream_id, piece) for kind, flag, piece in zip(kinds, flags, pieces, strict=True))


def unpadded(flags: int, payload: bytes) -> bytes:
    """The payload of DATA or HEADERS without padding and priority (6.1, 6.2). Raises Http2Error."""
    end = len(payload)
    at = 1 if flags & PADDED else 0
    if at:
        if not end:
            raise Http2Error(FRAME_SIZE_ERROR, "no length of padding")
        end -= payload[0]
    if flags & PRIORITY:
        at += 5
    if at > end:
        raise Http2Error(PROTOCOL_ERROR, "more padding than payload")
    return payload[at:end]


def read_settings(payload: bytes) -> dict[int, int]:
    """The peer's settings; an unknown one is nobody's business (6.5.2). Raises Http2Error."""
    if len(payload) % SETTING.size:
        raise Http2Error(FRAME_SIZE_ERROR, "broken settings")
    found = dict(SETTING.iter_unpack(payload))
    if found.get(ENABLE_PUSH, 0):
        raise Http2Error(PROTOCOL_ERROR, "a server cannot ask for pushes")
    if found.get(INITIAL_WINDOW_SIZE, 0) > LARGEST_WINDOW:
        raise Http2Error(FLOW_CONTROL_ERROR, "a window beyond the largest")
    if not LEAST_FRAME <= found.get(MAX_FRAME_SIZE, LEAST_FRAME) <= LARGEST_FRAME:
        raise Http2Error(PROTOCOL_ERROR, "a largest frame that cannot be")
    return found
