"""The machine of HTTP/2: against the library h2 as its server, against frames by hand, and against anything at all."""

from __future__ import annotations

import struct

import pytest
from fakes.h2_peer import ANSWER, GOOD_END, REQUEST, Peer, answer_begins, greeted
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from lora_slots.gateway import http2_frames as f
from lora_slots.gateway.http2 import WINDOW, Http2
from lora_slots.gateway.http2_events import Data, Event, Failed, GoingAway, Headers, Reset, Settings
from lora_slots.gateway.http2_frames import frame, settings, window_update

STATUS = {b":status": b"200", b"content-type": b"application/grpc"}
BLOCK = Encoder().encode([(b"a", b"b")])
frames = st.builds(
    frame,
    st.sampled_from([*range(11), 200]),
    st.sampled_from([0, 1, 4, 5, 8, 9, 0x2C, 0xFF]),
    st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1, 2**31 + 1]),
    st.sampled_from([b"", b"\0\0\0\1", b"\xff" * 4, b"\0" * 8, BLOCK, b"\0\4\x7f\xff\xff\xff", b"\0\3\0\0\0\2"])
    | st.binary(max_size=40),
)
sendable = st.one_of(
    st.binary(max_size=30).map(lambda content: frame(f.DATA, 0, 1, content)),
    st.binary(max_size=30).map(lambda content: frame(f.DATA, f.PADDED, 3, bytes([len(content)]) + bytes(len(content)))),
    st.just(frame(f.PING, 0, 0, b"12345678")),
    st.integers(1, 2**16).map(lambda size: window_update(1, size)),
    st.just(frame(99, 0, 0, b"nobody knows")),
    frames,
)


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    """The bytes cut into pieces of these sizes, over and over."""
    found, at, i = [], 0, 0
    while at < len(data):
        found.append(data[at : at + sizes[i % len(sizes)]])
        at, i = at + len(found[-1]), i + 1
    return found


@given(sent=st.lists(sendable, max_size=12), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_events_do_not_depend_on_the_pieces(sent: list[bytes], sizes: list[int]) -> None:
    """Nor what is sent, unless the connection failed."""
    encoder = Encoder()
    data = answer_begins(1, encoder) + answer_begins(3, encoder) + b"".join(sent)
    whole, cut = greeted(3), greeted(3)
    events = whole.receive(data)
    others: list[Event] = []
    out = b""
    for piece in pieces(data, sizes):
        others += cut.receive(piece)
        out += cut.take()
    assert events == others
    if not any(isinstance(event, Failed) for event in events):
        assert whole.take() == out


@given(sent=st.lists(st.binary(max_size=200) | frames, max_size=20), is_greeted=st.booleans())
def test_anything_at_all_is_at_most_one_failure(sent: list[bytes], is_greeted: bool) -> None:
    """Never an exception, nothing after it, and GOAWAY is the last thing said."""
    client = greeted(2) if is_greeted else Http2()
    client.take()
    events = [event for piece in sent for event in client.receive(piece)]
    failures = [i for i, event in enumerate(events) if isinstance(event, Failed)]
    assert failures in ([], [len(events) - 1])
    if failures:
        assert client.take()[3] == f.GOAWAY
        assert not client.is_open
        assert client.receive(b"more") == []
        assert client.take() == b""


@given(
    bodies=st.lists(st.integers(1, 100_000), min_size=1, max_size=4),
    first_window=st.integers(0, 70_000),
    later_window=st.integers(0, 2**20),
    largest=st.sampled_from([2**14, 20_000, 2**16]),
    grants=st.lists(st.integers(5_000, 60_000), min_size=1, max_size=6),
)
def test_bodies_keep_to_every_window_and_come_whole(
    bodies: list[int], first_window: int, later_window: int, largest: int, grants: list[int]
) -> None:
    """h2 raises if a frame is too long or beyond a window; it grants more bit by bit, and changes the first window."""
    client = Http2()
    peer = Peer(client)
    peer.h2.update_settings({4: first_window, 5: largest})
    peer.swap()
    sent = {client.request(REQUEST, bytes([i]) * size): bytes([i]) * size for i, size in enumerate(bodies)}
    peer.swap()
    peer.h2.update_settings({4: later_window})
    peer.swap()
    for round_ in range(200):
        waiting = [stream_id for stream_id in sent if stream_id not in peer.ended]
        if not waiting:
            break
        grant = grants[round_ % len(grants)]
        peer.h2.increment_flow_control_window(grant)
        peer.h2.increment_flow_control_window(grant, waiting[round_ % len(waiting)])
        peer.swap()
    assert peer.bodies == sent
    assert not [event for event in peer.events if isinstance(event, Failed)]


@given(
    parts=st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=300), st.none() | st.integers(0, 255)), max_size=12),
    sizes=st.lists(st.integers(1, 200), max_size=50),
)
def test_answers_are_what_the_library_sends(parts: list[tuple[int, bytes, int | None]], sizes: list[int]) -> None:
    """Headers, parts with and without padding, trailers, of three streams at once."""
    client = Http2()
    peer = Peer(client)
    ids = [client.request(REQUEST, b"x") for _ in range(3)]
    peer.swap()
    for stream_id in ids:
        peer.h2.send_headers(stream_id, ANSWER)
    for which, content, padding in parts:
        peer.h2.send_data(ids[which], content, pad_length=padding)
    for stream_id in ids:
        peer.h2.send_headers(stream_id, GOOD_END, end_stream=True)
    peer.swap(sizes)
    for which, stream_id in enumerate(ids):
        mine = [event for event in peer.events if isinstance(event, Data | Headers) and event.stream_id == stream_id]
        assert mine[0] == Headers(stream_id, STATUS, False)
        assert mine[1:-1] == [Data(stream_id, content, False) for one, content, _ in parts if one == which]
        assert mine[-1] == Headers(stream_id, dict(GOOD_END), True)
    assert client.has_room


@given(reads=st.lists(st.booleans(), max_size=40))
def test_who_does_not_read_holds_up_no_other_stream(reads: list[bool]) -> None:
    """The server may send WINDOW bytes of what nobody reads; what is read, and the connection, go on for ever."""
    client = Http2()
    peer = Peer(client)
    slow, quick = (client.request(REQUEST, b"x") for _ in range(2))
    peer.swap()
    for stream_id in (slow, quick):
        peer.h2.send_headers(stream_id, ANSWER)
    unread = 0
    for is_read in reads:
        for stream_id in (slow, quick):
            for _ in range(6):
                size = min(peer.h2.local_flow_control_window(stream_id), 2**14)
                if size:
                    peer.h2.send_data(stream_id, bytes(size))
                unread += size if stream_id == slow else 0
            peer.swap()
        client.read(quick)
        if is_read:
            client.read(slow)
            unread = 0
        peer.swap()
        assert peer.h2.local_flow_control_window(quick) > WINDOW // 2
        assert unread <= WINDOW
        assert peer.h2.local_flow_control_window(slow) <= WINDOW
    assert not [event for event in peer.events if isinstance(event, Failed)]


def test_the_connections_window_comes_back_without_anybody_reading() -> None:
    """A stream that was cancelled, and padding, are counted too."""
    client = greeted(1)
    client.receive(answer_begins(1, Encoder()))
    client.cancel(1)
    client.take()
    given_back = 0
    for _ in range(3 * 2**24 // 2**14):
        assert client.receive(frame(f.DATA, f.PADDED, 1, b"\xff" + bytes(2**14 - 1))) == []
        out = client.take()
        given_back += struct.unpack(">I", out[9:13])[0] if out else 0
        assert out in (b"", window_update(0, 2**24))
    assert given_back == 3 * 2**24


def test_a_stream_that_sends_more_than_its_window_fails_the_connection() -> None:
    """FLOW_CONTROL_ERROR, at the first byte too many."""
    client = greeted(1)
    client.receive(answer_begins(1, Encoder()))
    for _ in range(WINDOW // 2**14):
        assert len(client.receive(frame(f.DATA, 0, 1, bytes(2**14)))) == 1
    assert client.receive(frame(f.DATA, 0, 1, b"x")) == [Failed("more than the window")]
    assert client.take().endswith(struct.pack(">I", f.FLOW_CONTROL_ERROR))


@pytest.mark.parametrize(
    "sent",
    [b"HTTP/1.1 400 Bad Request\r\n", frame(f.PING, 0, 0, bytes(8))],
)
def test_what_is_no_greeting_is_told_at_once(sent: bytes) -> None:
    """An HTTP/1 server, and one that does not begin with SETTINGS."""
    assert isinstance(Http2().receive(sent)[-1], Failed)


@pytest.mark.parametrize(
    "sent",
    [
        frame(f.DATA, 0, 0, b"x"),
        frame(f.DATA, 0, 1, b"x"),
        frame(f.DATA, f.PADDED, 1, b""),
        frame(f.DATA, f.PADDED, 1, b"\x05abc"),
        frame(f.DATA, 0, 9, b"x"),
        frame(f.HEADERS, f.END_HEADERS, 2, BLOCK),
        frame(f.HEADERS, 0, 1, BLOCK) + frame(f.PING, 0, 0, bytes(8)),
        frame(f.HEADERS, 0, 1, BLOCK) + frame(f.CONTINUATION, f.END_HEADERS, 3, b""),
        frame(f.HEADERS, f.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
        frame(f.HEADERS, 0, 1, bytes(2**14)) + frame(f.CONTINUATION, 0, 1, bytes(2**14)) * 4,
        frame(f.CONTINUATION, f.END_HEADERS, 1, BLOCK),
        frame(f.HEADERS, f.END_HEADERS, 1, BLOCK) * 2,
        frame(f.RST_STREAM, 0, 0, bytes(4)),
        frame(f.RST_STREAM, 0, 1, bytes(5)),
        frame(f.SETTINGS, 0, 1),
        frame(f.SETTINGS, f.ACK, 0, bytes(6)),
        frame(f.SETTINGS, 0, 0, bytes(5)),
        settings({f.ENABLE_PUSH: 1}),
        settings({f.INITIAL_WINDOW_SIZE: 2**31}),
        settings({f.MAX_FRAME_SIZE: 2**14 - 1}),
        frame(f.PUSH_PROMISE, f.END_HEADERS, 1, bytes(4) + BLOCK),
        frame(f.PING, 0, 0, bytes(7)),
        frame(f.GOAWAY, 0, 0, bytes(7)),
        frame(f.WINDOW_UPDATE, 0, 0, bytes(4)),
        window_update(0, 2**31 - 1),
        window_update(1, 2**31 - 1),
        window_update(1, 2**31 - 1 - 65_531) + settings({f.INITIAL_WINDOW_SIZE: 65_536}),
        frame(f.PING, 0, 0, bytes(2**14 + 1))[:9],
    ],
)
def test_breaches_fail_the_connection(sent: bytes) -> None:
    """One kind of each."""
    client = greeted(2)
    assert isinstance(client.receive(sent)[-1], Failed)
    assert client.take()[3] == f.GOAWAY


def test_what_is_of_no_meaning_is_left_alone() -> None:
    """Priorities, unknown kinds, settings and flags; an interim answer; what comes of a stream that has ended."""
    client, encoder = greeted(1), Encoder()
    known = settings({99: 1, f.MAX_CONCURRENT_STREAMS: 7})
    interim = frame(f.HEADERS, f.END_HEADERS, 1, encoder.encode([(b":status", b"103")]))
    padded = b"\x02" + bytes(5) + encoder.encode(ANSWER) + b"\0\0"
    header = frame(f.HEADERS, f.END_HEADERS | f.PADDED | f.PRIORITY | 0x40, 1, padded)
    events = client.receive(frame(2, 0, 1, bytes(5)) + frame(77, 255, 3, b"?") + known + interim + header)
    assert events == [Settings(), Headers(1, STATUS, False)]
    client.cancel(1)
    late = frame(f.DATA, 0, 1, b"x") + window_update(1, 5) + frame(f.HEADERS, 5, 1, encoder.encode([(b"a", b"b")]))
    assert client.receive(late + frame(f.RST_STREAM, 0, 1, bytes(4))) == []
    assert client.take().endswith(frame(f.RST_STREAM, 0, 1, struct.pack(">I", f.CANCEL)))


def test_a_block_over_several_frames_is_one() -> None:
    """And its END_STREAM stands on the first frame."""
    client, encoder = greeted(1), Encoder()
    client.receive(answer_begins(1, encoder))
    block = encoder.encode([(b"grpc-status", b"5"), (b"grpc-message", b"m" * 500)])
    sent = frame(f.HEADERS, f.END_STREAM, 1, block[:7]) + frame(f.CONTINUATION, 0, 1, block[7:100])
    (event,) = client.receive(sent + frame(f.CONTINUATION, f.END_HEADERS, 1, block[100:]))
    assert event == Headers(1, {b"grpc-status": b"5", b"grpc-message": b"m" * 500}, True)


def test_long_headers_of_ours_go_over_several_frames() -> None:
    """The library puts them together."""
    client = Http2()
    peer = Peer(client)
    client.request([*REQUEST, (b"x-long", bytes(range(33, 120)) * 600)], b"body")
    peer.swap()
    assert peer.bodies == {1: b"body"}


def test_pings_are_answered_and_settings_acknowledged() -> None:
    """As they came."""
    client = greeted()
    assert client.receive(frame(f.PING, 0, 0, b"12345678") + frame(f.PING, f.ACK, 0, b"12345678")) == []
    assert client.take() == frame(f.PING, f.ACK, 0, b"12345678")
    client.receive(settings({f.HEADER_TABLE_SIZE: 0}))
    assert client.take() == frame(f.SETTINGS, f.ACK, 0)


def test_going_away_ends_what_was_not_begun() -> None:
    """Later streams are as refused, earlier ones go on, and no new one may begin."""
    client = greeted(3)
    events = client.receive(frame(f.GOAWAY, 0, 0, struct.pack(">II", 3, 0) + b"why"))
    assert events == [GoingAway(0), Reset(5, f.REFUSED_STREAM)]
    assert not client.is_open
    assert client.receive(answer_begins(3, Encoder())) == [Headers(3, STATUS, False)]
    assert client.receive(frame(f.RST_STREAM, 0, 1, struct.pack(">I", 2))) == [Reset(1, 2)]


def test_no_more_streams_than_allowed() -> None:
    """A place is free again when a stream has ended, by either side."""
    client = greeted(2)
    client.receive(settings({f.MAX_CONCURRENT_STREAMS: 2}))
    assert not client.has_room
    client.cancel(1)
    assert client.has_room
    client.request(REQUEST, b"x")
    assert not client.has_room
    client.receive(frame(f.RST_STREAM, 0, 3, bytes(4)))
    assert client.has_room


def test_a_body_that_is_not_waited_for_is_not_sent_on() -> None:
    """An answer before its end: the stream is reset, and windows that grow bring nothing more of it."""
    client = Http2()
    client.receive(frame(f.SETTINGS, 0, 0))
    client.request(REQUEST, bytes(100_000))
    client.take()
    answer = frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, Encoder().encode([*ANSWER, *GOOD_END]))
    assert client.receive(answer) == [Headers(1, STATUS | dict(GOOD_END), True)]
    assert client.take() == f.rst_stream(1, f.CANCEL)
    client.receive(window_update(0, 100_000) + window_update(1, 100_000))
    assert client.take() == b""
