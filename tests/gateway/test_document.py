"""The OpenAPI document against the running gateway: whatever fits it, and whatever does not, has an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from fakes.gateways import RunningGateway, ask
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

pytestmark = pytest.mark.triton
CASES = settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def check(reply: Any, told: str) -> None:
    """An answer or OpenAI's envelope, never a traceback, never 500."""
    assert reply.status < 500 or reply.status == 503, told
    assert b"Traceback" not in reply.body, told
    assert "x-request-id" in reply.headers, told
    if reply.status >= 400:
        error = json.loads(reply.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, told
        assert error["message"], told


@pytest.mark.parametrize("port", ["public", "admin"])
def test_every_operation_answers_generated_requests(door: RunningGateway, port: str) -> None:
    """Requests made from the document, those that fit it and those that break it in one place."""
    url = door.url if port == "public" else door.admin_url
    document = ask(url, "/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if operation.path == "/admin/drain":
            continue  # it would refuse the other tests' requests
        # nothing can be wrong with a request that has neither a body nor a parameter
        modes = GenerationMode if operation.method == "post" else [GenerationMode.POSITIVE]
        for mode in modes:
            run(url, operation, mode)


def run(url: str, operation: Any, mode: GenerationMode) -> None:
    """Send what one strategy makes."""

    @CASES
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        prepared = case.as_transport_kwargs(base_url=url)
        raw = json.dumps(shortened(prepared["json"])).encode() if "json" in prepared else prepared.get("data")
        path = prepared["url"].removeprefix(url)
        if isinstance(raw, str):
            raw = raw.encode()
        told = f"{prepared['method']} {path} {raw!r:.2000}"
        if path.isascii() and path.isprintable() and " " not in path:
            check(ask(url, path, raw if isinstance(raw, bytes) else None, method=prepared["method"]), told)

    send()


def shortened(body: Any) -> Any:
    """The same body for a model that there is, with few and short answers: what is well formed really generates."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return body
    capped = {
        name: min(body[name], most)
        for name, most in {"max_tokens": 4, "max_completion_tokens": 4, "n": 2, "best_of": 2}.items()
        if type(body.get(name)) is int
    }
    return {"max_tokens": 4, **body, **capped, "model": "base"}


@settings(parent=CASES, max_examples=60)
@given(raw=st.binary(max_size=300), content_type=st.sampled_from(["application/json", "text/plain", ""]))
def send_bytes(url: str, raw: bytes, content_type: str) -> None:
    """Bytes of no meaning."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        check(ask(url, path, raw, content_type=content_type), repr(raw))


def test_junk_bytes(door: RunningGateway) -> None:
    """To every route that reads a body, with any content type."""
    send_bytes(door.url)


def test_junk_instead_of_http(door: RunningGateway) -> None:
    """Bytes that are no HTTP end their connection, and nothing else."""
    import socket

    host, _, port = door.url.removeprefix("http://").partition(":")
    for junk in (b"\x00" * 64, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\xff\xfe" * 100 + b"\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            assert b"Traceback" not in connection.recv(65536)
    assert ask(door.url, "/health").status == 200
    assert all(json.loads(line) for line in door.log.read_text().splitlines()), "every line of the log is JSON"
