"""When the server cannot be reached, and when the gateway is stopped."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes.gateways import STOPPED, ask, gateway, until
from fakes.line import line_to

from lora_slots.client import Client
from lora_slots.gateway.server import STOP_S
from lora_slots.stack import TritonServer

pytestmark = pytest.mark.triton
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def leases(server: TritonServer) -> int:
    """Leases that run."""
    with Client(server.grpc_url) as client:
        return sum(one["leases"] for one in client.operate("status")["adapters"])


def is_refused(host: str, port: int) -> bool:
    """Whether nothing listens there any more."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return True
    return False


def test_without_a_server_it_does_not_start(tmp_path: Path) -> None:
    """Exit code 1 and one sentence."""
    ran = subprocess.run(  # noqa: PLW1510 - it fails
        [sys.executable, "-c", "from lora_slots.cli import main; main()", "gateway", "--url", "127.0.0.1:9"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "127.0.0.1:9" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_server_that_goes_and_comes_back(server: TritonServer, tmp_path: Path) -> None:
    """A stream that runs ends with an error event, new requests are 503, and later ones are answered as before."""
    with line_to(server.grpc_url) as line, gateway(line.url, tmp_path / "log") as own:
        client = openai.OpenAI(base_url=f"{own.url}/v1", api_key="unused", max_retries=0)
        stream: Any = client.chat.completions.create(
            **{**ASKED, "max_tokens": 1500}, stream=True, extra_body={"min_tokens": 1500}
        )
        next(iter(stream))
        line.cut()
        with pytest.raises(openai.APIError) as broken:
            list(stream)
        assert "engine" in str(broken.value)
        client.close()
        for path, body in ((CHAT, ASKED), (CHAT, {**ASKED, "model": "base"}), ("/health", None)):
            reply = ask(own.url, path, body)
            assert reply.status == 503, reply.body
            assert reply.json()["error"]["code"] in ("engine_unavailable", "adapter_unavailable")
        assert ask(own.admin_url, "/admin/status").status == 503
        line.join()
        assert ask(own.url, CHAT, ASKED).status == 200
        assert ask(own.url, "/health").status == 200
        until("the cut stream's lease is given back too", lambda: leases(server) == 0)


def test_a_body_that_does_not_come_is_not_waited_for(server: TritonServer, tmp_path: Path) -> None:
    """408 in the envelope, and the connection is closed."""
    with gateway(server.grpc_url, tmp_path / "log", "--body-timeout", "0.5") as own:
        host, _, port = own.url.removeprefix("http://").rpartition(":")
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99"
        )
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(f"{head}\r\n\r\n{{".encode())
            told = b"".join(iter(lambda: slow.recv(4096), b""))
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in told
        assert ask(own.url, "/v1/models").status == 200


def test_a_stop_waits_and_a_second_one_does_not(server: TritonServer, tmp_path: Path) -> None:
    """A running answer is whole after one SIGTERM; after two the gateway ends at once, and no lease is left."""
    for signals in (1, 2):
        with gateway(server.grpc_url, tmp_path / f"log{signals}") as own:
            host, _, port = own.url.removeprefix("http://").partition(":")
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            tokens = 20 if signals == 1 else 1900
            asked = {**ASKED, "max_tokens": tokens, "min_tokens": tokens, "stream": True}
            connection.request("POST", CHAT, json.dumps(asked), {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read(100)
            began = time.monotonic()
            os.kill(own.pid, signal.SIGTERM)
            if signals == 1:
                assert answer.read().endswith(b"data: [DONE]\n\n")
            else:
                until("it stops", partial(is_refused, host, int(port)))
                os.kill(own.pid, signal.SIGTERM)
            assert own.process.wait(timeout=30) == STOPPED
            connection.close()
            assert signals == 1 or time.monotonic() - began < STOP_S
        assert leases(server) == 0
