"""Calls in the event loop, to servers that keep to gRPC and to servers that do not."""

from __future__ import annotations

import asyncio
import struct

import pytest
from fakes.h2_peer import ANSWER
from fakes.h2_server import Server, echo, run, serving, silent, until

from lora_slots.errors import ServerError, Unreachable
from lora_slots.gateway.door import Door
from lora_slots.gateway.grpc_wire import CallError, message
from lora_slots.gateway.http2 import WINDOW
from lora_slots.gateway.http2_frames import SETTINGS, frame


def test_many_calls_share_one_connection() -> None:
    """Each has its own answer, also when all begin before there is a connection."""

    async def test() -> None:
        async with serving(echo) as (channel, made):
            asked = [bytes([i]) * (i + 1) for i in range(50)]
            assert await asyncio.gather(*(channel.ask("/s/m", one, 20) for one in asked)) == asked
            assert len(made) == 1

    run(test())


def test_messages_larger_than_any_window_come_and_go() -> None:
    """3 MB, up and then down, while nobody reads it before its end."""

    async def test() -> None:
        def large(server: Server, stream_id: int, body: bytes) -> None:
            server.begin(stream_id)
            server.send(stream_id, message(body))

        async with serving(large) as (channel, made):
            body = bytes(range(256)) * 12_000
            call = await channel.call("/s/m", body)
            assert await call.received() == [body]
            made[0].end(1)
            made[0].flush()
            assert await call.received() == []

    run(test())


def test_who_does_not_read_is_not_sent_more_than_a_window() -> None:
    """While another call on the connection goes on; what was held up comes when it is read."""

    async def test() -> None:
        def answers(server: Server, stream_id: int, body: bytes) -> None:
            if body != b"long":
                echo(server, stream_id, body)
                return
            server.begin(stream_id)
            server.send(stream_id, message(bytes(995)) * 4000)

        async with serving(answers) as (channel, made):
            slow = await channel.call("/s/m", b"long")
            await until(lambda: bool(made) and made[0].left.get(1) is not None)
            for _ in range(20):
                assert await channel.ask("/s/m", b"quick", 20) == b"quick"
            assert len(made[0].left[1]) == 4_000_000 - WINDOW
            count = 0
            while count < 4000:
                count += len(await slow.received())
            assert count == 4000

    run(test())


@pytest.mark.parametrize("begun", [True, False])
def test_a_status_is_heard_with_and_without_an_answer(begun: bool) -> None:
    """After a message; and as trailers alone."""

    async def test() -> None:
        def refuse(server: Server, stream_id: int, body: bytes) -> None:
            if begun:
                server.begin(stream_id)
                server.send(stream_id, message(b"first"))
            trailers = [(b"grpc-status", b"5"), (b"grpc-message", b"nobody%20here")]
            server.end(stream_id, trailers if begun else [*ANSWER, *trailers])

        async with serving(refuse) as (channel, _):
            call = await channel.call("/s/m", b"x")
            if begun:
                assert await call.received() == [b"first"]
            for _ in range(2):
                with pytest.raises(CallError, match="nobody here") as raised:
                    await call.received()
                assert raised.value.code == "NOT_FOUND"

    run(test())


def test_leaving_early_is_told_at_once() -> None:
    """By cancel, by a timeout, by a cancelled task; an ended call tells nothing."""

    async def test() -> None:
        async with serving(silent) as (channel, made):
            call = await channel.call("/s/m", b"x")
            call.cancel()
            call.cancel()
            with pytest.raises(TimeoutError):
                await channel.ask("/s/m", b"x", 0.05)
            task = asyncio.ensure_future(channel.ask("/s/m", b"x", 20))
            await until(lambda: 5 in made[0].bodies)
            task.cancel()
            await until(lambda: made[0].resets == [1, 3, 5])

    run(test())


def test_calls_wait_for_their_place() -> None:
    """A server that takes two streams gets two; one that gives up while it waits takes nobody's place."""

    async def test() -> None:
        running: list[int] = []

        def later(server: Server, stream_id: int, body: bytes) -> None:
            running.append(stream_id)

        async with serving(later, {3: 2}) as (channel, made):
            tasks = [asyncio.ensure_future(channel.ask("/s/m", bytes([i]), 20)) for i in range(7)]
            await until(lambda: len(running) == 2)
            tasks[3].cancel()
            while not all(task.done() for task in tasks):
                assert len(running) <= 2
                for stream_id in running:
                    echo(made[0], stream_id, made[0].bodies[stream_id][5:])
                running.clear()
                made[0].flush()
                await asyncio.sleep(0.01)
            assert [t.result() for i, t in enumerate(tasks) if i != 3] == [bytes([i]) for i in range(7) if i != 3]

    run(test())


def test_a_lost_connection_ends_its_calls_and_the_next_makes_a_new_one() -> None:
    """Whether the server hangs up or aborts."""

    async def test() -> None:
        async with serving(silent) as (channel, made):
            for _ in range(2):
                call = await channel.call("/s/m", b"x")
                await until(lambda: bool(made[-1].bodies))
                made[-1].transport.abort()
                with pytest.raises(ConnectionError):
                    await call.received()
            assert len(made) == 2

    run(test())


def test_a_server_that_goes_away_ends_what_runs_in_peace() -> None:
    """New calls go to a new connection; the old one is closed behind its last call."""

    async def test() -> None:
        async with serving(silent) as (channel, made):
            call = await channel.call("/s/m", b"x")
            await until(lambda: bool(made[0].bodies))
            made[0].transport.write(frame(7, 0, 0, struct.pack(">II", 1, 0)))
            await asyncio.sleep(0.05)
            other = asyncio.ensure_future(channel.ask("/s/m", b"y", 20))
            await until(lambda: len(made) == 2 and bool(made[1].bodies))
            echo(made[1], 1, b"y")
            made[1].flush()
            assert await other == b"y"
            echo(made[0], 1, b"old")
            made[0].flush()
            assert await call.received() == [b"old"]
            assert await call.received() == []
            await until(made[0].transport.is_closing)

    run(test())


def test_a_reset_stream_ends_its_call_alone() -> None:
    """The connection stays."""

    async def test() -> None:
        def answers(server: Server, stream_id: int, body: bytes) -> None:
            if body == b"reset":
                server.h2.reset_stream(stream_id, 7)
            else:
                echo(server, stream_id, body)

        async with serving(answers) as (channel, made):
            with pytest.raises(ConnectionError, match="error 7"):
                await channel.ask("/s/m", b"reset", 20)
            assert await channel.ask("/s/m", b"fine", 20) == b"fine"
            assert len(made) == 1

    run(test())


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 50, frame(SETTINGS, 0, 0)])
@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_door_hears_one_error_of_whatever_answers(
    greeting: bytes, hangs_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UNAVAILABLE, in time, from junk, silence and a server that leaves."""
    monkeypatch.setattr("lora_slots.gateway.channel.CONNECT_S", 0.3)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read(10)
        await writer.drain()
        if hangs_up or greeting == frame(SETTINGS, 0, 0):
            await reader.read(10_000)
            writer.write(b"\xff" * 100)
        if not hangs_up:
            await over.wait()
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        door = Door(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(20):
            for _ in range(2):
                with pytest.raises(Unreachable):
                    await door.operate("status")
            assert not await door.ready()
        await door.close()
        over.set()
        server.close()

    over = asyncio.Event()
    run(test())


def test_a_message_that_is_none_of_tritons_is_told() -> None:
    """As a server that cannot be used."""

    async def test() -> None:
        def junk(server: Server, stream_id: int, body: bytes) -> None:
            server.begin(stream_id)
            server.send(stream_id, message(b"\xff\xff\xff"))

        async with serving(junk) as (channel, made):
            door = Door(f"{channel._host}:{channel._port}")
            with pytest.raises(ServerError, match="cannot be read"):
                await door.operate("status")
            await until(lambda: made[0].resets == [1])
            await door.close()

    run(test())
