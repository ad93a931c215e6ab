"""`lora_slots.Client` and `AsyncClient` against a real Triton, straight and through a router that breaks things."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fakes.front import Fault, Front, front, identity, server_credentials
from fakes.up import lora_slots

from lora_slots import ONCE, AsyncClient, Client, Retry, ServerError, Tls, Unreachable
from lora_slots.direct import DirectClient
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer

pytestmark = pytest.mark.triton
QUIET = "xyzzy-prompt"
"""No error may have it."""
QUICK = Retry(first_s=0.001)
MISS = "in ensemble 'ensemble', [INTERNAL] LoRA task 5 not found in cache. Please send LoRA weights with request"
Ask = Callable[..., str]


def by_sync(url: str, text: str, **options: Any) -> str:
    """The streamed answer, by Client."""
    with Client(url, retry=QUICK) as client:
        return "".join(client.stream(text, **options))


def by_async(url: str, text: str, **options: Any) -> str:
    """The streamed answer, by AsyncClient."""

    async def ask() -> str:
        async with AsyncClient(url, retry=QUICK) as client:
            return "".join([piece async for piece in client.stream(text, **options)])

    return asyncio.run(ask())


@pytest.fixture(params=[by_sync, by_async])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Either client."""
    made: Ask = request.param
    return made


@pytest.fixture
def way(server: TritonServer) -> Iterator[Front]:
    """A router before the server."""
    with front(server.grpc_url) as made:
        yield made


@pytest.fixture(scope="session")
def pirate(golden: list[dict[str, Any]]) -> dict[str, Any]:
    """One golden answer of the pirate."""
    return next(answer for answer in golden if answer["adapter"] == "pirate")


def run(work: Callable[[AsyncClient], Coroutine[Any, Any, Any]], url: str) -> Any:
    """Do something with an AsyncClient in a loop of its own."""

    async def inside() -> Any:
        async with AsyncClient(url, retry=QUICK) as client:
            return await work(client)

    return asyncio.run(inside())


# --- answers


def test_whole_and_streamed_texts_are_those_of_peft(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """Both clients, base and adapters, whole and in pieces."""
    with Client(server.grpc_url) as client:
        for answer in golden[:2]:
            asked = {"adapter": answer["adapter"]}
            pieces = list(client.stream(answer["text_input"], **asked))
            assert len(pieces) > 3
            assert "".join(pieces) == answer["text"]
            assert client.generate(answer["text_input"], **asked) == answer["text"]
            assert by_async(server.grpc_url, answer["text_input"], **asked) == answer["text"]
            work = lambda one, a=answer, k=asked: one.generate(a["text_input"], **k)  # noqa: E731
            assert run(work, server.grpc_url) == answer["text"]


def test_one_client_serves_many_threads(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """24 requests at once on one connection, operations between them: every answer is its own."""
    asked = 2 * sorted(golden, key=lambda answer: len(answer["tokens"]))[:12]
    with Client(server.grpc_url) as client, ThreadPoolExecutor(len(asked)) as pool:

        def one(answer: dict[str, Any]) -> str:
            client.status()
            return "".join(client.stream(answer["text_input"], adapter=answer["adapter"]))

        assert list(pool.map(one, asked)) == [answer["text"] for answer in asked]


def test_one_client_serves_many_tasks(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """The same for asyncio."""
    asked = 2 * sorted(golden, key=lambda answer: len(answer["tokens"]))[:12]

    async def all_of_them(client: AsyncClient) -> list[str]:
        return await asyncio.gather(*(client.generate(a["text_input"], adapter=a["adapter"]) for a in asked))

    assert run(all_of_them, server.grpc_url) == [answer["text"] for answer in asked]


def test_the_direct_door_serves_many_threads(
    server: TritonServer, tokenizer: Tokenizer, golden: list[dict[str, Any]]
) -> None:
    """One DirectClient: each thread sees the lease of its own request, whole and streamed."""
    asked = [answer for answer in golden if answer["adapter"]][:8]
    with DirectClient(server.grpc_url, tokenizer) as client, ThreadPoolExecutor(len(asked)) as pool:

        def one(answer: dict[str, Any]) -> tuple[str, str, Any]:
            streamed = "".join(client.stream(answer["text_input"], adapter=answer["adapter"]))
            lease = client.lease
            return streamed, client.generate(answer["text_input"], adapter=answer["adapter"]), lease

        for answer, (streamed, whole, lease) in zip(asked, pool.map(one, asked), strict=True):
            assert streamed == whole == answer["text"]
            assert lease.ref.startswith(f"{answer['adapter']}@")


def test_stop_and_sampling_reach_the_engine(server: TritonServer, tokenizer: Tokenizer, pirate: dict[str, Any]) -> None:
    """A text that stops the answer, by either door; the same seed gives the same text, another one another."""
    word = pirate["text"][10:14]
    with Client(server.grpc_url) as client, DirectClient(server.grpc_url, tokenizer) as direct:
        for door in (client, direct):
            cut = door.generate(pirate["text_input"], adapter="pirate", stop=[word])
            assert cut != pirate["text"]
            assert pirate["text"].startswith(cut.removesuffix(word))
        chance: dict[str, float] = {"temperature": 1.5, "top_k": 200, "top_p": 1.0}
        texts = [client.generate(pirate["text_input"], sampling={**chance, "seed": seed}) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


# --- operations


def test_operations_have_methods(server: TritonServer) -> None:
    """warm, pin, unpin, evict, status, explain and ready, by both clients."""
    with Client(server.grpc_url) as client:
        assert client.ready()
        client.pin("robot")
        warmed = client.warm("robot")
        assert set(warmed) >= {"found_in", "waited_s"}
        with pytest.raises(ServerError, match="pinned") as refused:
            client.evict("robot")
        assert refused.value.code == "INVALID_ARGUMENT"
        assert client.explain("robot")["pinned"]
        client.unpin("robot")

        async def same(other: AsyncClient) -> None:
            assert await other.ready()
            await other.pin("robot")
            assert (await other.warm("robot"))["found_in"] == "SLOT"
            assert next(a for a in (await other.status())["adapters"] if a["name"] == "robot")["pinned"]
            await other.unpin("robot")
            assert not (await other.explain("robot"))["pinned"]
            await other.evict("robot")

        run(same, server.grpc_url)
        assert client.explain("robot")["tier"] != "SLOT"


@pytest.mark.parametrize("command", ["status", "explain robot", "pools", "warm robot", "drain --off"])
def test_operators_commands_print_json(server: TritonServer, command: str) -> None:
    """One document on stdout, nothing beside it."""
    done = lora_slots("slots", *command.split(), "--json", "--url", server.grpc_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert isinstance(json.loads(done.stdout), dict)


def test_an_answer_as_json(server: TritonServer, pirate: dict[str, Any]) -> None:
    """The same text, whole, with the adapter and its times; an adapter that is none leaves stdout empty."""
    command = ("generate", "--raw", "--json", "--url", server.grpc_url, "--max-tokens", "64")
    done = lora_slots(*command, "--adapter", "pirate", pirate["text_input"])
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert (said["adapter"], said["text"], said["prompt"]) == ("pirate", pirate["text"], pirate["text_input"])
    assert 0 < said["first_piece_s"] <= said["total_s"]
    wrong = lora_slots(*command, "--adapter", "pirat", pirate["text_input"])
    assert (wrong.returncode, wrong.stdout) == (2, "")


# --- leaving early


def test_leaving_a_stream_early_cancels_it(way: Front, pirate: dict[str, Any]) -> None:
    """closed, or simply left: the router sees the call end long before the answer would."""
    long: dict[str, Any] = {"adapter": "pirate", "max_tokens": 1500, "sampling": {"min_tokens": 1400}}
    with Client(way.url) as client:
        pieces = client.stream(pirate["text_input"], **long)
        next(pieces)
        pieces.close()
        for _ in client.stream(pirate["text_input"], **long):
            break

        async def leave(other: AsyncClient) -> None:
            async with aclosing(other.stream(pirate["text_input"], **long)) as answer:
                await anext(answer)
            async for _ in other.stream(pirate["text_input"], **long):
                break
            waiting = asyncio.create_task(other.generate(pirate["text_input"], **long))
            while len(way.of("ensemble")) < 5:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        run(leave, way.url)
        calls = way.of("ensemble")
        assert len(calls) == 5
        assert all(call.over.wait(30) for call in calls)
        assert max(call.responses for call in calls) < 1400


def test_closing_a_client_ends_what_runs(way: Front, pirate: dict[str, Any]) -> None:
    """One error, of its own kind, in the thread that waits."""
    client = Client(way.url, retry=QUICK)
    way.faults.append(Fault("hang"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, pirate["text_input"])
        while not way.of("ensemble"):
            assert not waiting.done()
        client.close()
        with pytest.raises(ServerError, match="cancelled"):
            waiting.result()


# --- tries


def test_a_server_that_is_away_for_a_moment_is_tried_again_unseen(way: Front, ask: Ask, pirate: dict[str, Any]) -> None:
    """UNAVAILABLE twice before the first token: the answer is whole, and each try had an id of its own."""
    way.faults.append(Fault("refuse", times=2))
    assert ask(way.url, pirate["text_input"], adapter="pirate") == pirate["text"]
    assert len({call.request_id for call in way.of("ensemble")}) == 3


def test_a_miss_is_reported_and_tried_again_unseen(way: Front, ask: Ask, pirate: dict[str, Any]) -> None:
    """The engine's own words before the first token: the slot manager is told, the next try answers."""
    way.faults.append(Fault("say", times=1, text=MISS))
    assert ask(way.url, pirate["text_input"], adapter="pirate") == pirate["text"]
    assert [call.model for call in way.seen] == ["ensemble", "lora_router", "ensemble"]


def test_a_real_miss_is_healed_unseen(server: TritonServer, ask: Ask, golden: list[dict[str, Any]]) -> None:
    """The engine is loaded anew behind the slot manager's back, and holds no adapter: the client gets its answer."""
    answer = next(entry for entry in golden if entry["adapter"] == "json")
    with Client(server.grpc_url) as client:
        client.pin("json")
        client.warm("json")
        before = misses(client)
        server.reload("tensorrt_llm")
        assert ask(server.grpc_url, answer["text_input"], adapter="json") == answer["text"]
        assert misses(client) == before + 1
        client.unpin("json")


def misses(client: Client) -> int:
    """How often the engine had forgotten the adapter."""
    return [line["what"] for line in client.explain("json")["story"]].count("left SLOT: miss")


def test_tries_are_bounded_and_the_last_error_is_told(way: Front, pirate: dict[str, Any]) -> None:
    """So many and no more; ONCE tries nothing again."""
    way.faults.append(Fault("refuse"))
    with Client(way.url, retry=Retry(attempts=3, first_s=0.001)) as client:
        with pytest.raises(Unreachable, match=r"no server answers at 127.*\(no healthy upstream\)"):
            client.generate(pirate["text_input"])
        assert len(way.seen) == 3
    with Client(way.url, retry=ONCE) as client, pytest.raises(Unreachable):
        client.generate(pirate["text_input"])
    assert len(way.seen) == 4


def test_nothing_is_tried_again_after_the_first_token(way: Front, ask: Ask, pirate: dict[str, Any]) -> None:
    """The connection breaks, or the stream ends without its last response: what came is kept, the error is told."""
    for kind in ("cut", "end"):
        way.seen.clear()
        way.faults[:] = [Fault(kind, times=1, after=3)]
        got: list[str] = []
        with Client(way.url, retry=QUICK) as client, pytest.raises(Unreachable, match="broke the answer off"):
            got.extend(client.stream(pirate["text_input"], adapter="pirate"))
        assert pirate["text"].startswith("".join(got))
        way.faults[:] = [Fault(kind, times=1, after=3)]
        with pytest.raises(Unreachable, match="broke the answer off"):
            ask(way.url, pirate["text_input"], adapter="pirate")
        assert len(way.of("ensemble")) == 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"adapter": "pirat"}, "NOT_FOUND"),
        ({"adapter": ""}, "INVALID_ARGUMENT"),
        ({"max_tokens": 0}, "INVALID_ARGUMENT"),
        ({"adapter": "pirate", "sampling": {"top_p": 7.0}}, "INVALID_ARGUMENT"),
    ],
)
def test_what_was_asked_wrongly_is_asked_once(way: Front, ask: Ask, options: dict[str, Any], code: str) -> None:
    """The server's own words, its code, one call."""
    with pytest.raises(ServerError) as refused:
        ask(way.url, QUIET, **options)
    assert len(way.of("ensemble")) == 1
    assert refused.value.code == code, refused.value
    assert QUIET not in repr(refused.value)
    assert "\n" not in str(refused.value)


def test_an_id_that_runs_is_tried_again_only_if_it_was_ours(way: Front, ask: Ask, pirate: dict[str, Any]) -> None:
    """ALREADY_EXISTS: another id for ours, the caller's own is the caller's matter."""
    running = "in ensemble 'ensemble', [ALREADY_EXISTS] request:1 is still running"
    way.faults.append(Fault("say", times=1, text=running))
    assert ask(way.url, pirate["text_input"], adapter="pirate") == pirate["text"]
    assert len(way.of("ensemble")) == 2
    way.faults[:] = [Fault("say", times=1, text=running)]
    with pytest.raises(ServerError) as refused:
        ask(way.url, pirate["text_input"], adapter="pirate", request_id="mine")
    assert refused.value.code == "ALREADY_EXISTS"
    assert [call.request_id for call in way.of("ensemble")[2:]] == ["mine"]


def test_who_does_not_wait_is_told_at_once_and_who_does_waits(way: Front, ask: Ask, pirate: dict[str, Any]) -> None:
    """cold="fail" on an adapter in no slot: one call, and the time it will take; else the next try comes then."""
    told = "in ensemble 'ensemble', [UNAVAILABLE] adapter 'pirate': in HOST, ready in about 0.1 s"
    way.faults.append(Fault("say", times=1, text=told))
    with pytest.raises(ServerError, match="ready in about") as refused:
        ask(way.url, pirate["text_input"], adapter="pirate", cold="fail")
    assert refused.value.retry_after_s == 0.1
    assert len(way.of("ensemble")) == 1
    way.faults[:] = [Fault("say", times=1, text=told)]
    assert ask(way.url, pirate["text_input"], adapter="pirate") == pirate["text"]


def test_a_lost_answer_of_a_lease_gives_the_lease_back(
    server: TritonServer, way: Front, tokenizer: Tokenizer, pirate: dict[str, Any]
) -> None:
    """The direct door: the router was asked, its answer got lost; the next try answers, and no lease stays."""
    way.faults.append(Fault("cut", times=1, after=0, model="lora_router"))
    with DirectClient(way.url, tokenizer, retry=QUICK) as direct:
        assert direct.generate(pirate["text_input"], adapter="pirate") == pirate["text"]
    with Client(server.grpc_url) as client:
        assert client.explain("pirate")["leases"] == 0


# --- time


def test_a_request_ends_with_its_time(way: Front, ask: Ask) -> None:
    """A server that hangs: DEADLINE_EXCEEDED with the time that was given, and the call is over at the other end."""
    way.faults.append(Fault("hang"))
    with pytest.raises(ServerError, match=r"no whole answer within 0\.3 s") as refused:
        ask(way.url, QUIET, timeout_s=0.3)
    assert refused.value.code == "DEADLINE_EXCEEDED"
    assert len(way.seen) == 1
    assert way.seen[0].over.wait(30)
    with Client(way.url, timeout_s=0.3) as client, pytest.raises(ServerError, match=r"no whole answer within 0\.3 s"):
        client.generate(QUIET)


# --- connection


def test_what_is_sent_along_reaches_the_router(way: Front, pirate: dict[str, Any]) -> None:
    """The adapter under the header that was chosen, and extra metadata, with every call."""
    metadata = {"Authorization": "Bearer k"}
    with Client(way.url, metadata=metadata, adapter_header="x-lora-adapter") as client:
        client.generate(pirate["text_input"], adapter="pirate", max_tokens=1)
        client.status()

    async def same() -> None:
        async with AsyncClient(way.url, metadata=metadata) as other:
            await other.generate(pirate["text_input"], adapter="pirate", max_tokens=1)
            await other.generate(pirate["text_input"], max_tokens=1)

    asyncio.run(same())
    assert [call.headers["authorization"] for call in way.seen] == ["Bearer k"] * 4
    assert [call.headers.get("x-lora-adapter") for call in way.seen] == ["pirate", None, None, None]
    assert [call.headers.get("x-gateway-model-name") for call in way.seen] == [None, None, "pirate", None]


def test_tls_with_a_certificate_on_both_sides(server: TritonServer, tmp_path: Path, pirate: dict[str, Any]) -> None:
    """Whom we trust we talk to; a stranger, or a server that does not know us, is one line."""
    own, stranger, ours = (identity(tmp_path, name) for name in ("server", "stranger", "client"))
    trusting = Tls(root_certificates=own.certificate)
    with front(server.grpc_url, server_credentials(own)) as way:
        with Client(way.url, tls=trusting) as client:
            assert client.generate(pirate["text_input"], adapter="pirate") == pirate["text"]

        async def same() -> str:
            async with AsyncClient(way.url, tls=trusting) as other:
                return await other.generate(pirate["text_input"], adapter="pirate")

        assert asyncio.run(same()) == pirate["text"]
        for wrong in (Tls(root_certificates=stranger.certificate), None):
            with Client(way.url, tls=wrong, retry=QUICK) as client, pytest.raises(Unreachable) as refused:
                client.generate(QUIET)
            assert str(refused.value).count("\n") == 0
    mutual = Tls(own.certificate, ours.key, ours.certificate)
    with front(server.grpc_url, server_credentials(own, clients=ours)) as way:
        with Client(way.url, tls=mutual) as client:
            assert client.ready()
            assert client.generate(pirate["text_input"], adapter="pirate") == pirate["text"]
        with Client(way.url, tls=trusting, retry=QUICK) as client:
            assert not client.ready()
            with pytest.raises(Unreachable):
                client.generate(QUIET)


def test_nobody_there_is_one_clear_error() -> None:
    """Where, what to do, why; by both clients and the command line, which ends with 1."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{closed.getsockname()[1]}"
    said = rf"^no server answers at {url}; start one with `lora-slots up`, or give --url \(.*Connection refused.*\)$"
    with Client(url, retry=QUICK) as client:
        assert not client.ready()
        with pytest.raises(Unreachable, match=said) as refused:
            client.generate(QUIET)
        assert QUIET not in repr(refused.value)
        assert refused.value.__cause__ is None
    with pytest.raises(Unreachable, match=said):
        by_async(url, QUIET)
    done = lora_slots("generate", "--raw", "--url", url, QUIET)
    assert done.returncode == 1
    assert done.stderr.startswith(f"lora-slots: no server answers at {url}")
    assert done.stderr.count("\n") == 1


def test_a_server_that_comes_up_meanwhile_is_found(server: TritonServer, pirate: dict[str, Any]) -> None:
    """A client that was refused a moment ago connects once somebody listens."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"127.0.0.1:{listening.getsockname()[1]}"
        host, _, port = server.grpc_url.partition(":")
        patient = Retry(attempts=1000, first_s=0.05, max_s=0.1)
        with ThreadPoolExecutor(2) as pool, Client(url, retry=patient) as client:
            asked = pool.submit(client.generate, pirate["text_input"], adapter="pirate")
            assert not client.ready()
            listening.listen()
            pool.submit(pass_on, listening, (host, int(port)))
            assert asked.result() == pirate["text"]


def pass_on(listening: socket.socket, upstream: tuple[str, int]) -> None:
    """Carry one connection's bytes both ways until either side ends."""
    with listening.accept()[0] as here, socket.create_connection(upstream) as there, ThreadPoolExecutor(2) as pool:

        def one_way(source: socket.socket, sink: socket.socket) -> None:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        pool.submit(one_way, here, there)
        pool.submit(one_way, there, here)
