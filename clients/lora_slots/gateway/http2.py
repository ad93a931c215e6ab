"""A client's end of one HTTP/2 connection: bytes in, events and bytes out. Pure; numbers are sections of RFC 9113.

Rules:
1. `receive` never raises: whatever breaks the protocol is one last event, Failed, and nothing follows it.
2. The events do not depend on how the bytes came in pieces.
3. The connection's window is as large as may be and given back on arrival, a stream's is WINDOW and given back when
   what came was read (`read`): who does not read holds up no other stream.
4. No frame is longer, no window smaller and no stream more than the peer allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpack import Decoder, Encoder, HPACKError

from lora_slots.gateway import http2_frames as h2
from lora_slots.gateway.http2_events import Data, Event, Failed, GoingAway, Headers, Reset, Settings
from lora_slots.gateway.http2_frames import Http2Error, frame, rst_stream, unpadded, window_update

WINDOW = 2**20
"""Of a stream: bytes that may have come and were not read."""
_CREDIT = 2**24
"""Bytes after which the connection's window is given back."""
_MAX_HEADERS = 2**16
"""Bytes of one block of headers, packed or not."""
_NO_LIMIT = 2**31


class _Stream:
    """One that runs."""

    __slots__ = ("headed", "left", "receive_window", "send_window")

    def __init__(self, send_window: int, body: bytes) -> None:
        self.send_window, self.left = send_window, memoryview(body)
        """`left`: what was not sent yet."""
        self.receive_window = WINDOW
        self.headed = False
        """Its headers have come."""


class Http2:
    """The machine. After every call `take` has what is to be sent."""

    def __init__(self) -> None:
        ours = {
            h2.ENABLE_PUSH: 0,
            h2.INITIAL_WINDOW_SIZE: WINDOW,
            h2.MAX_HEADER_LIST_SIZE: _MAX_HEADERS,
        }
        more = window_update(0, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW)
        self._out = [h2.PREFACE, h2.settings(ours), more]
        self._rest = b""
        """The beginning of a frame."""
        self._encoder, self._decoder = Encoder(), Decoder(_MAX_HEADERS)
        self._streams: dict[int, _Stream] = {}
        self._next_id = 1
        self._block: tuple[int, int, bytes] | None = None
        """Stream, flags and beginning of a block of headers that goes on."""
        self._send_window = self._first_window = h2.DEFAULT_WINDOW
        self._largest = h2.LEAST_FRAME
        self._max_streams = _NO_LIMIT
        self._unreturned = 0
        self._greeted = self._away = self._failed = False

    @property
    def is_open(self) -> bool:
        """Whether streams may begin here, now or when others have ended."""
        return not (self._away or self._failed or self._next_id >= _NO_LIMIT)

    @property
    def has_room(self) -> bool:
        """Whether one more stream may run beside the others (5.1.2)."""
        return len(self._streams) < self._max_streams

    def take(self) -> bytes:
        """What is to be sent; the caller sends it."""
        if not self._out:
            return b""
        out, self._out = self._out, []
        return b"".join(out)

    def request(self, fields: Sequence[tuple[bytes, bytes]], body: bytes) -> int:
        """Begin a stream with its whole body, which is not empty; call it if `is_open` and `has_room`."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        stream = self._streams[stream_id] = _Stream(self._first_window, body)
        self._out.append(h2.headers(stream_id, self._encoder.encode(fields), self._largest))
        self._send(stream_id, stream)
        return stream_id

    def cancel(self, stream_id: int) -> None:
        """End a stream; what still comes of it is dropped."""
        if self._streams.pop(stream_id, None) is not None:
            self._out.append(rst_stream(stream_id, h2.CANCEL))

    def read(self, stream_id: int) -> None:
        """All that came of a stream was read."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.receive_window <= WINDOW // 2:
            self._out.append(window_update(stream_id, WINDOW - stream.receive_window))
            stream.receive_window = WINDOW

    def receive(self, data: bytes) -> list[Event]:
        """What the peer's next bytes mean."""
        events: list[Event] = []
        if self._failed:
            return events
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        try:
            while size - at >= h2.HEAD.size:
                upper, lower, kind, flags, stream_id = h2.HEAD.unpack_from(data, at)
                begin = at + h2.HEAD.size
                end = begin + (upper << 8 | lower)
                self._check_head(kind, end - begin)
                if end > size:
                    break
                self._frame(kind, flags, stream_id & 0x7FFF_FFFF, data[begin:end], events)
                at = end
        except Http2Error as error:
            self._failed = True
            self._streams.clear()
            self._out = [h2.goaway(error.reason)]
            events.append(Failed(str(error)))
        self._rest = data[at:]
        return events

    def _check_head(self, kind: int, size: int) -> None:
        """What can be said before a frame is whole."""
        if size > h2.LEAST_FRAME:  # we allow no larger ones
            raise Http2Error(h2.FRAME_SIZE_ERROR, "a frame is too long")
        if (self._block is None) == (kind == h2.CONTINUATION):  # 6.10
            raise Http2Error(h2.PROTOCOL_ERROR, "a block of headers is torn")
        if not self._greeted and kind != h2.SETTINGS:  # 3.4
            raise Http2Error(h2.PROTOCOL_ERROR, "the first frame is not SETTINGS")

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        match kind:
            case h2.DATA:
                self._data(flags, stream_id, payload, events)
            case h2.HEADERS:
                self._stream(stream_id)
                self._headers(stream_id, flags, unpadded(flags, payload), events)
            case h2.CONTINUATION if self._block is not None:
                known_id, known_flags, block = self._block
                if stream_id != known_id:
                    raise Http2Error(h2.PROTOCOL_ERROR, "a block of headers is torn")
                self._headers(stream_id, known_flags | flags & h2.END_HEADERS, block + payload, events)
            case h2.RST_STREAM:
                self._reset(stream_id, _number(payload), events)
            case h2.SETTINGS:
                self._settings(flags, stream_id, payload, events)
            case h2.PING:
                _check(stream_id == 0 and len(payload) == 8, "a broken PING")
                if not flags & h2.ACK:
                    self._out.append(frame(h2.PING, h2.ACK, 0, payload))
            case h2.GOAWAY:
                self._goaway(stream_id, payload, events)
            case h2.WINDOW_UPDATE:
                self._window_update(stream_id, _number(payload) & 0x7FFF_FFFF)
            case h2.PUSH_PROMISE:
                raise Http2Error(h2.PROTOCOL_ERROR, "a push, which was not allowed")
            case _:  # priorities are without meaning, unknown kinds are to be left alone (5.3.2, 5.5)
                pass

    def _stream(self, stream_id: int) -> _Stream | None:
        """A stream that runs; None: it has ended. Raises Http2Error: it never was (5.1.1)."""
        stream = self._streams.get(stream_id)
        if stream is None and (stream_id % 2 == 0 or stream_id >= self._next_id):
            raise Http2Error(h2.PROTOCOL_ERROR, "a stream that nobody began")
        return stream

    def _data(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        size = len(payload)
        self._unreturned += size
        if self._unreturned >= _CREDIT:
            self._out.append(window_update(0, self._unreturned))
            self._unreturned = 0
        stream = self._stream(stream_id)
        if flags & h2.PADDED:
            payload = unpadded(flags & h2.PADDED, payload)
        if stream is None:
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise Http2Error(h2.FLOW_CONTROL_ERROR, "more than the window")
        _check(stream.headed, "a body before its headers")
        ended = bool(flags & h2.END_STREAM)
        if ended:
            self._end(stream_id, stream)
        events.append(Data(stream_id, payload, ended))

    def _headers(self, stream_id: int, flags: int, block: bytes, events: list[Event]) -> None:
        if len(block) > _MAX_HEADERS:
            raise Http2Error(h2.ENHANCE_YOUR_CALM, "headers are too long")
        if not flags & h2.END_HEADERS:
            self._block = (stream_id, flags, block)
            return
        self._block = None
        try:  # also of a stream that has ended: the decoder's state is the connection's (4.3)
            fields = {bytes(name): bytes(value) for name, value in self._decoder.decode(block, raw=True)}
        except HPACKError:
            raise Http2Error(h2.COMPRESSION_ERROR, "headers that cannot be unpacked") from None
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        ended = bool(flags & h2.END_STREAM)
        is_interim = not stream.headed and fields.get(b":status", b"").startswith(b"1")  # 8.1
        _check(ended or not stream.headed, "headers amid a body")
        _check(not (ended and is_interim), "an answer without an end")
        if is_interim:
            return
        stream.headed = True
        if ended:
            self._end(stream_id, stream)
        events.append(Headers(stream_id, fields, ended))

    def _end(self, stream_id: int, stream: _Stream) -> None:
        """The peer has said all; of a body that it does not wait for nothing more is sent (8.1)."""
        del self._streams[stream_id]
        if stream.left:
            self._out.append(rst_stream(stream_id, h2.CANCEL))

    def _reset(self, stream_id: int, reason: int, events: list[Event]) -> None:
        if self._stream(stream_id) is not None:
            del self._streams[stream_id]
            events.append(Reset(stream_id, reason))

    def _settings(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        _check(stream_id == 0, "settings of a stream")
        if flags & h2.ACK:
            _check(self._greeted and not payload, "a broken acknowledgement")
            return
        found = h2.read_settings(payload)
        self._greeted = True
        self._largest = found.get(h2.MAX_FRAME_SIZE, self._largest)
        self._max_streams = found.get(h2.MAX_CONCURRENT_STREAMS, self._max_streams)
        if h2.HEADER_TABLE_SIZE in found:
            # a smaller table is the peer's right, a larger one need not be used
            self._encoder.header_table_size = min(found[h2.HEADER_TABLE_SIZE], 4096)
        self._out.append(frame(h2.SETTINGS, h2.ACK, 0))
        change = found.get(h2.INITIAL_WINDOW_SIZE, self._first_window) - self._first_window
        self._first_window += change
        for one in self._streams.values():  # 6.9.2; a window may become negative
            one.send_window = _grown(one.send_window, change)
        self._send_all()
        events.append(Settings())

    def _goaway(self, stream_id: int, payload: bytes, events: list[Event]) -> None:
        _check(stream_id == 0 and len(payload) >= 8, "a broken GOAWAY")
        last, reason = _number(payload[:4]) & 0x7FFF_FFFF, _number(payload[4:8])
        self._away = True
        events.append(GoingAway(reason))
        for later in [one for one in self._streams if one > last]:
            self._reset(later, h2.REFUSED_STREAM, events)

    def _window_update(self, stream_id: int, size: int) -> None:
        _check(size > 0, "a window that does not grow")
        if stream_id == 0:
            self._send_window = _grown(self._send_window, size)
            self._send_all()
        elif (stream := self._stream(stream_id)) is not None:
            stream.send_window = _grown(stream.send_window, size)
            self._send(stream_id, stream)

    def _send_all(self) -> None:
        for stream_id, stream in self._streams.items():
            if stream.left:
                self._send(stream_id, stream)

    def _send(self, stream_id: int, stream: _Stream) -> None:
        """As much of a body as both windows allow (6.9)."""
        while stream.left and (size := min(len(stream.left), self._largest, self._send_window, stream.send_window)) > 0:
            piece, stream.left = bytes(stream.left[:size]), stream.left[size:]
            self._send_window -= size
            stream.send_window -= size
            self._out.append(frame(h2.DATA, 0 if stream.left else h2.END_STREAM, stream_id, piece))


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Http2Error(h2.PROTOCOL_ERROR, otherwise)


def _number(payload: bytes) -> int:
    if len(payload) != h2.NUMBER.size:
        raise Http2Error(h2.FRAME_SIZE_ERROR, "a frame of a wrong length")
    return int(h2.NUMBER.unpack(payload)[0])


def _grown(window: int, by: int) -> int:
    if window + by > h2.LARGEST_WINDOW:
        raise Http2Error(h2.FLOW_CONTROL_ERROR, "a window beyond the largest")
    return window + by
