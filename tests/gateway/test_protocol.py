"""Raw connections: headers have a size and a time, whoever sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from lora_slots.gateway.protocol import MAX_HEADER_BYTES, protocol

LONG_S = 600.0
"""Never, for a test."""
HEAD = b"POST /x HTTP/1.1\r\nhost: localhost\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def counting(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body; /early before it has come, /stream with two parts, the second at its end."""
    text, early = b"", scope["path"] != "/x"
    start = {"type": "http.response.start", "status": 200, "headers": []}
    if early:
        await send(start)
        await send({"type": "http.response.body", "body": b"first ", "more_body": scope["path"] == "/stream"})
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        text += message.get("body", b"")
        more = message.get("more_body", False)
    if scope["path"] == "/early":
        return
    if not early:
        await send(start)
    headers = len(scope["headers"])
    await send({"type": "http.response.body", "body": b"%d bytes, %d headers" % (len(text), headers)})


@asynccontextmanager
async def connected(seconds: float, most: int = 100) -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    """A server whose headers have so many seconds; gives connections to it."""
    config = uvicorn.Config(counting, http=protocol(seconds, most), ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    made = cast(Any, config.http_protocol_class)
    server = await asyncio.get_running_loop().create_server(
        lambda: made(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    opened: list[asyncio.StreamWriter] = []

    async def connect() -> Connection:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        opened.append(writer)
        return reader, writer

    try:
        async with asyncio.timeout(60):
            yield connect
    finally:
        for writer in opened:
            writer.close()
        server.close()


def run(
    test: Callable[[Callable[[], Awaitable[Connection]]], Awaitable[None]], seconds: float = LONG_S, most: int = 100
) -> None:
    """One test in an event loop."""

    async def all_of_it() -> None:
        async with connected(seconds, most) as connect:
            await test(connect)

    asyncio.run(all_of_it())


def error(reply: bytes) -> tuple[int, str, str]:
    """Status, code and message of an error; it has a request's id and ends the connection."""
    head, _, body = reply.partition(b"\r\n\r\n")
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert b"x-request-id: req-" in head
    assert b"connection: close" in head
    return int(head.split()[1]), found["code"], found["message"]


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"x-long: " + b"a" * 80_000,
        HEAD + b"x-many: a\r\n" * 8_000,
        b"GET /" + b"a" * 80_000,
        b"\r\n" * 40_000,
        HEAD + b"content-length: 0\r\nx-long: " + b"a" * 80_000 + b"\r\n\r\n",
    ],
)
def test_headers_beyond_their_size_are_refused(sent: bytes) -> None:
    """Long ones, many, a long path, none at all; whether they end or not."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        writer.write(sent)
        status, code, message = error(await reader.read())
        assert (status, code) == (431, "request_too_large")
        assert str(MAX_HEADER_BYTES) in message

    run(test)


def test_as_many_headers_as_may_be_are_taken_on_one_connection_again_and_again() -> None:
    """The size is that of one request, without its body."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        for _ in range(3):
            head = HEAD + b"content-length: 200000\r\nx-long: " + b"a" * 60_000 + b"\r\n\r\n"
            writer.write(head + b"b" * 200_000)
            assert await reader.readuntil(b"200000 bytes, 3 headers") is not None

    run(test)


@pytest.mark.parametrize("sent", [b"P", HEAD, b"\r\n"])
def test_headers_that_do_not_come_to_an_end_are_told_so(sent: bytes) -> None:
    """After the time they have."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        writer.write(sent)
        assert error(await reader.read()) == (408, "request_timeout", "The headers were not here within 0.2 s")

    run(test, 0.2)


def test_the_second_request_of_a_connection_has_its_time_too() -> None:
    """Counted from its first byte."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        writer.write(HEAD + b"content-length: 2\r\n\r\nab" + HEAD)
        told = await reader.read()
        assert b"2 bytes, 2 headers" in told
        assert error(told[told.index(b"HTTP/1.1 408") :])[0] == 408

    run(test, 0.2)


def test_who_says_nothing_is_hung_up_on() -> None:
    """Without a word."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, _ = await connect()
        assert await reader.read() == b""

    run(test, 0.2)


def test_an_answer_is_not_torn_by_the_next_request() -> None:
    """Half a request behind one whose answer runs has to wait for its end."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        writer.write(b"POST /stream HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabcd")
        await reader.readuntil(b"first ")
        other, _ = await connect()
        assert await other.read() == b"", "the time of headers is over"
        writer.write(b"efghi" + HEAD)
        told = await reader.read()
        assert b"9 bytes" in told
        assert error(told[told.index(b"HTTP/1.1 408") :])[0] == 408

    run(test, 0.2)


@pytest.mark.parametrize("rest", [b"x-trailer: " + b"a" * 80_000, b"x: a\r\n" * 20_000, b""])
def test_trailers_are_no_way_around(rest: bytes) -> None:
    """Nor is the framing of chunks: what is no body is bounded like headers."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        last = b"0\r\n" if rest else b"1;" + b"e" * 90_000
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        await writer.drain()
        writer.write(last + rest)
        assert await reader.read() == b"", "the request is being answered: nothing can be told"

    run(test)


def test_a_body_in_chunks_of_one_byte_is_taken() -> None:
    """With a trailer, which is left out."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        chunks = b"1\r\na\r\n" * 50_000 + b"0\r\nx-trailer: b\r\n\r\n"
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        await reader.readuntil(b"50000 bytes, 2 headers")

    run(test)


def test_what_is_sent_on_after_an_answer_has_a_time() -> None:
    """A body that nobody reads any more."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        reader, writer = await connect()
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\na")
        await reader.readuntil(b"first ")
        writer.write(b"b")
        assert b"HTTP" not in await reader.read()

    run(test, 0.2)


def test_a_connection_too_many_is_told_so_and_takes_nobodys_place() -> None:
    """503 in the envelope if it asks, hung up on if it does not; the others are answered, and a place is free again."""

    async def test(connect: Callable[[], Awaitable[Connection]]) -> None:
        whole = HEAD + b"content-length: 2\r\n\r\nab"
        (first, first_writer), (second, second_writer) = [await connect() for _ in range(2)]
        for reader, writer in ((first, first_writer), (second, second_writer)):
            writer.write(whole)
            await reader.readuntil(b"2 bytes, 2 headers")
        third, writer = await connect()
        writer.write(whole)
        told = await third.read()
        assert b"retry-after: 2" in told
        assert error(told) == (503, "too_many_connections", "More than 2 connections are open")
        fourth, _ = await connect()
        assert await fourth.read() == b""
        second_writer.write(whole)
        await second.readuntil(b"2 bytes, 2 headers")
        first_writer.close()
        while b"200 OK" not in told:  # the server hears of it in its own time
            reader, writer = await connect()
            writer.write(whole)
            told = await reader.readuntil(b"\r\n")

    run(test, most=2)
