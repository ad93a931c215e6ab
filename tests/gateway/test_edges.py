"""What OpenAI's client does not send: junk, other routes, methods, hosts and origins; and clients that leave."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.gateways import STOPPED, RunningGateway, ask, gateway, until
from fakes.little import BASE

from lora_slots.client import Client
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from lora_slots.traffic import read_log

pytestmark = pytest.mark.triton
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def envelope(body: bytes) -> dict[str, Any]:
    """The error, after a look at its form."""
    document = json.loads(body)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return dict(document["error"])


@pytest.mark.parametrize(
    "body", [b"", b"\x00\xff\xfe", b"{", b"[]", b"null", b"1e999", b'{"model": "\\ud800"}', b"[" * 100_000, b'"' * 9999]
)
def test_junk_is_told_so(door: RunningGateway, body: bytes) -> None:
    """400 in the envelope, with a request id; never a traceback."""
    for path in (CHAT, "/v1/completions"):
        reply = ask(door.url, path, body)
        assert reply.status == 400
        assert envelope(reply.body)["type"] == "invalid_request_error"
        assert b"Traceback" not in reply.body
        assert reply.headers["x-request-id"]


def test_routes_methods_types_and_sizes(door: RunningGateway) -> None:
    """404, 405, 415, 413."""
    assert envelope(ask(door.url, "/v2/nothing").body)["code"] == "unknown_url"
    wrong = ask(door.url, CHAT)
    assert (wrong.status, envelope(wrong.body)["code"]) == (405, "method_not_allowed")
    form = ask(door.url, CHAT, json.dumps(ASKED).encode(), content_type="text/plain")
    assert form.status == 415
    large = ask(door.url, CHAT, {**ASKED, "user": "x" * (5 * 2**20)})
    assert (large.status, envelope(large.body)["code"]) == (413, "request_too_large")
    assert ask(door.url, CHAT, ASKED, x_request_id="two words").status == 400


def test_json_is_one_line_once_it_serves(server: TritonServer, tmp_path: Path) -> None:
    """A program that reads a pipe gets the line while the gateway serves, can use what it says, and gets no more."""
    command = [sys.executable, "-c", "from lora_slots.cli import main; main()", "gateway", "--url", server.grpc_url]
    command += ["--port", "0", "--admin-port", "0", "--json"]
    with (
        (tmp_path / "err").open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            models = ask(said["url"].removesuffix("/v1"), "/v1/models").json()
            assert sorted([said["base"], *said["adapters"]]) == [model["id"] for model in models["data"]]
            assert ask(said["admin_url"], "/metrics").status == 200
            os.kill(said["pid"], signal.SIGTERM)
            assert process.stdout.read() == ""
            assert process.wait(timeout=30) == STOPPED
        finally:
            process.kill()


def test_headers_have_a_size_on_both_ports(door: RunningGateway) -> None:
    """Before any key is asked for."""
    for url in (door.url, door.admin_url):
        reply = ask(url, "/health", x_long="a" * 70_000)
        assert (reply.status, envelope(reply.body)["code"]) == (431, "request_too_large")


def test_a_page_cannot_reach_an_open_gateway(door: RunningGateway) -> None:
    """Another name that leads here is refused, and no origin may read answers."""
    assert ask(door.url, "/v1/models", host="evil.example").status == 403
    assert ask(door.admin_url, "/admin/status", host="evil.example:8081").status == 403
    assert ask(door.url, "/v1/models", host="localhost:1").status == 200
    reply = ask(door.url, CHAT, ASKED, origin="https://page.example")
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.headers


def test_a_page_of_a_named_origin_may_read_the_stream(server: TritonServer, tmp_path: Path) -> None:
    """CORS as it was asked for, the gateway's headers included; a broken preflight is no error of ours."""
    with gateway(server.grpc_url, tmp_path / "log", "--cors-origin", "https://page.example") as own:
        asked = {"origin": "https://page.example", "access_control_request_method": "POST"}
        preflight = ask(own.url, CHAT, method="OPTIONS", **asked, access_control_request_headers="content-type")
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        reply = ask(own.url, CHAT, {**ASKED, "stream": True}, origin="https://page.example")
        assert reply.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-lora-slots-adapter" in reply.headers["access-control-expose-headers"]
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.body.endswith(b"data: [DONE]\n\n")
        other = ask(own.url, CHAT, ASKED, origin="https://other.example")
        assert "access-control-allow-origin" not in other.headers


def test_health_metrics_and_the_document(door: RunningGateway) -> None:
    """What operators and generators of clients read."""
    assert ask(door.url, "/health").status == 200
    ask(door.url, CHAT, ASKED)
    ask(door.url, CHAT, {**ASKED, "model": "nobody"})
    text = ask(door.url, "/metrics").body.decode()
    assert re.search(
        r'lora_slots_gateway_requests_total\{outcome="ok",route="POST /v1/chat/completions",tenant="-"\}', text
    )
    assert 'outcome="model_not_found"' in text
    document = ask(door.url, "/openapi.json").json()
    assert CHAT in document["paths"]
    schema = document["components"]["schemas"]["ChatBody"]
    assert schema["additionalProperties"] is False
    assert "temperature" in schema["properties"]


def test_the_log_has_every_request_and_no_prompt(door: RunningGateway, tmp_path: Path) -> None:
    """One line each, with the request's id, the adapter, times, and the prompt's hash; `plan` can read it."""
    said = "a very private question"
    asked = {**ASKED, "messages": [{"role": "user", "content": said}]}
    ask(door.url, CHAT, {**asked, "stream": True}, x_request_id="logged-1")
    ask(door.url, CHAT, asked, x_request_id="logged-2")
    until("logged", lambda: "logged-2" in door.log.read_text())
    text = door.log.read_text()
    lines = {line["request_id"]: line for line in map(json.loads, text.splitlines()) if "request_id" in line}
    assert said not in text
    assert lines["logged-1"]["prompt_hash"] == lines["logged-2"]["prompt_hash"]
    assert lines["logged-1"]["adapter"] == "pirate@1"
    assert {"time", "route", "status", "ttft_ms", "seconds", "completion_tokens"} <= set(lines["logged-1"])
    (tmp_path / "log").write_text("".join(line for line in text.splitlines(keepends=True) if '"digest"' in line))
    read = read_log(tmp_path / "log", 1.0)
    assert any(request.adapter == "pirate@1" and request.ttft_ms for request in read)


def leases(server: TritonServer, name: str) -> int:
    """Leases and waiting requests of an adapter."""
    with Client(server.grpc_url) as client:
        states = {a["name"].partition("@")[0]: a for a in client.operate("status")["adapters"]}
        return int(states[name]["leases"] + states[name]["waiting"]) if name in states else 0


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_cancelled_and_gives_the_lease_back(
    server: TritonServer, door: RunningGateway, stream: bool
) -> None:
    """A client hangs up amid 1,900 tokens: the lease ends, and the engine is free long before they would be made."""
    host, _, port = door.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    asked = {**ASKED, "max_tokens": 1900, "min_tokens": 1900, "stream": stream}
    headers = {"content-type": "application/json", "x-request-id": f"left-{stream}"}
    connection.request("POST", CHAT, json.dumps(asked).encode(), headers)
    if stream:
        connection.getresponse().read(200)
    else:
        until("leased", lambda: leases(server, "pirate") == 1)
    began = time.monotonic()
    connection.close()
    until("given back", lambda: leases(server, "pirate") == 0)
    assert ask(door.url, CHAT, ASKED).status == 200
    assert time.monotonic() - began < 20, "1,900 tokens would take longer"
    until("logged", lambda: f"left-{stream}" in door.log.read_text())
    lines = [json.loads(line) for line in door.log.read_text().splitlines()]
    told = next(line for line in lines if line.get("request_id") == f"left-{stream}")
    assert told["outcome"] == "client_gone"
    assert told.get("completion_tokens", 0) < 1900


@pytest.fixture
def cold_json(server: TritonServer) -> Iterator[None]:
    """The adapter `json` is in no slot."""
    with Client(server.grpc_url) as client:
        client.operate("warm", adapter="json")

        def evicted() -> bool:
            try:
                client.operate("evict", adapter="json")
            except ServerError as error:
                return "not in a slot" in str(error)
            return False

        until("evicted", evicted)
    yield


def test_cold_fail(door: RunningGateway, cold_json: None) -> None:
    """Refused at once with the time it will take, and warmed meanwhile."""
    reply = ask(door.url, CHAT, {**ASKED, "model": "json"}, x_lora_slots_cold="fail")
    assert reply.status == 503
    assert envelope(reply.body)["code"] == "adapter_unavailable"
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.headers["x-lora-slots-adapter"] == "json@1"
    until("warm", lambda: ask(door.url, CHAT, {**ASKED, "model": "json"}, x_lora_slots_cold="fail").status == 200)


def test_cold_base_is_marked(door: RunningGateway, cold_json: None) -> None:
    """The base answers in the adapter's place: headers and the body's model say so."""
    reply = ask(door.url, CHAT, {**ASKED, "model": "json"}, x_lora_slots_cold="base")
    assert reply.status == 200
    assert reply.json()["model"] == BASE
    assert reply.headers["x-lora-slots-adapter"] == BASE
    assert reply.headers["x-lora-slots-found-in"] == "base"
    assert reply.headers["x-lora-slots-digest"] == "none"
    assert float(reply.headers["x-lora-slots-wait-ms"]) >= 0


def test_cold_wait(door: RunningGateway, cold_json: None) -> None:
    """The default: waited for, and told for how long."""
    reply = ask(door.url, CHAT, {**ASKED, "model": "json"})
    assert reply.status == 200
    assert reply.headers["x-lora-slots-found-in"] in ("host", "disk")
    assert float(reply.headers["x-lora-slots-wait-ms"]) > 0


def test_an_engine_miss_is_healed_unseen(server: TritonServer, door: RunningGateway) -> None:
    """The engine forgets every adapter behind the manager's back; the client gets its answer all the same."""
    before = ask(door.url, CHAT, {**ASKED, "temperature": 0, "max_tokens": 8}).json()["choices"]
    server.reload("tensorrt_llm")
    after = ask(door.url, CHAT, {**ASKED, "temperature": 0, "max_tokens": 8})
    assert after.status == 200, after.body
    assert after.json()["choices"] == before
