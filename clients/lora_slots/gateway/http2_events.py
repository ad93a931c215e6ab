"""What an HTTP/2 connection's peer has said, as `http2` tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Settings(NamedTuple):
    """The peer has said what it allows; the first one is its greeting."""


class Headers(NamedTuple):
    """Headers, or with `ended` trailers. Of a name that is there twice the last one."""

    stream_id: int
    fields: Mapping[bytes, bytes]
    ended: bool


class Data(NamedTuple):
    """A part of the answer's body; `ended`: the last one, and no trailers follow."""

    stream_id: int
    content: bytes
    ended: bool


class Reset(NamedTuple):
    """The peer has ended a stream before its end; REFUSED_STREAM: it has not even begun it."""

    stream_id: int
    reason: int


class GoingAway(NamedTuple):
    """No further stream may begin; those that run go on."""

    reason: int


class Failed(NamedTuple):
    """The peer does not speak HTTP/2. The connection is over, and all its streams."""

    why: str


Event = Settings | Headers | Data | Reset | GoingAway | Failed
