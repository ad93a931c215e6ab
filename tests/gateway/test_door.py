"""Leases and operations where the connection breaks, or the server says less than it should."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes.h2_peer import GOOD_END
from fakes.h2_server import Server, run, serving, until
from tritonclient.grpc import service_pb2

from lora_slots.errors import ServerError, Unreachable
from lora_slots.gateway.channel import Channel
from lora_slots.gateway.door import BEGIN_TRIES, Door
from lora_slots.gateway.grpc_wire import message

REFUSED_STREAM, INTERNAL_ERROR = 7, 2


def door_to(channel: Channel) -> Door:
    """A door to the same server."""
    return Door(f"{channel._host}:{channel._port}")


def op_of(body: bytes) -> tuple[str, dict[str, object]]:
    """The operation that a request asks for, and its arguments."""
    op, arguments = (content[4:] for content in service_pb2.ModelInferRequest.FromString(body).raw_input_contents)
    return op.decode(), json.loads(arguments)


def answer(server: Server, stream_id: int, *, error: str = "") -> None:
    """An operation's answer, {}, or its error."""
    response = service_pb2.ModelStreamInferResponse(error_message=error)
    if not error:
        response.infer_response.outputs.add(name="op_result", datatype="BYTES", shape=[1, 1])
        response.infer_response.raw_output_contents.append(b"\x02\0\0\0{}")
        response.infer_response.parameters["triton_final_response"].bool_param = True
    server.begin(stream_id)
    server.send(stream_id, message(response.SerializeToString()))
    server.end(stream_id)


@pytest.mark.parametrize("times", [1, BEGIN_TRIES - 1, BEGIN_TRIES])
def test_what_the_server_did_not_begin_is_asked_again(times: int) -> None:
    """Unseen, and not for ever."""

    async def test() -> None:
        asked: list[int] = []

        def answers(server: Server, stream_id: int, body: bytes) -> None:
            asked.append(stream_id)
            if len(asked) <= times:
                server.h2.reset_stream(stream_id, REFUSED_STREAM)
            else:
                answer(server, stream_id)

        async with serving(answers) as (channel, _):
            door = door_to(channel)
            if times < BEGIN_TRIES:
                assert await door.operate("status") == {}
            else:
                with pytest.raises(Unreachable, match="error 7"):
                    await door.operate("status")
            assert len(asked) == min(times + 1, BEGIN_TRIES)
            await door.close()

    run(test())


@pytest.mark.parametrize("how", ["reset", "lost", "junk", "no answer", "a status of gRPC's own"])
def test_a_lease_that_may_have_been_granted_is_given_back(how: str) -> None:
    """The server heard the request, and its answer did not come."""

    async def test() -> None:
        ended: list[object] = []

        def answers(server: Server, stream_id: int, body: bytes) -> None:
            op, arguments = op_of(body)
            if op == "end":
                ended.append(arguments["request_id"])
                answer(server, stream_id)
            elif how == "reset":
                server.h2.reset_stream(stream_id, INTERNAL_ERROR)
            elif how == "lost":
                server.transport.abort()
            else:
                server.begin(stream_id)
                if how == "junk":
                    server.send(stream_id, message(b"\xff\xff\xff"))
                server.end(stream_id, GOOD_END if how != "a status of gRPC's own" else [(b"grpc-status", b"13")])

        async with serving(answers) as (channel, _):
            door = door_to(channel)
            with pytest.raises(ServerError):
                await door.lease("pirate", "mine", max_tokens=1, cold="wait")
            await until(lambda: ended == ["mine"])
            await door.close()

    run(test())


def test_a_lease_that_was_refused_or_never_asked_for_is_not_given_back() -> None:
    """The slot manager's own refusal, and a server that nobody reached: there is nothing to tell."""

    async def test() -> None:
        ops: list[str] = []

        def answers(server: Server, stream_id: int, body: bytes) -> None:
            ops.append(op_of(body)[0])
            answer(server, stream_id, error="[NOT_FOUND] no adapter 'pirat'")

        async with serving(answers) as (channel, _):
            door = door_to(channel)
            with pytest.raises(ServerError, match="no adapter") as refused:
                await door.lease("pirat", "mine", max_tokens=1, cold="wait")
            assert refused.value.code == "NOT_FOUND"
            assert not door._behind
            await door.close()
        away = door_to(channel)
        with pytest.raises(Unreachable):
            await away.lease("pirate", "mine", max_tokens=1, cold="wait")
        assert not away._behind
        await asyncio.sleep(0)
        assert ops == ["lease"]
        await away.close()

    run(test())
