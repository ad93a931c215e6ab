"""Headers of answers, of errors too, without a server."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from fakes.asgi import call, offline

from lora_slots.base_model import make_tiny_llama
from lora_slots.errors import UsageError
from lora_slots.gateway.edge import Edge, check_origins
from lora_slots.gateway.record import BASE_FOUND_IN, Record, header_value
from lora_slots.gateway.routes import public_app, readable_by
from lora_slots.gateway.server import Settings, open_gateway
from lora_slots.text import Tokenizer

CHAT = "/v1/chat/completions"
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer."""
    return Tokenizer(make_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=1, vocab=400))


def headers_of(record: Record) -> dict[str, str]:
    """As text."""
    return {name.decode(): value.decode("ascii") for name, value in record.headers()}


@pytest.mark.parametrize(
    ("value", "header"),
    [
        ("pirate@3", b"pirate@3"),
        ("50% of it", b"50% of it"),
        ("模型", b"%E6%A8%A1%E5%9E%8B"),
        ("é 50%", b"%C3%A9%2050%25"),
        ("a\r\nx: y", b"a%0D%0Ax:%20y"),
    ],
)
def test_a_name_of_any_characters_can_stand_in_a_header(value: str, header: bytes) -> None:
    """What is not printable ASCII is percent-encoded; what is stays as it is."""
    assert header_value(value) == header
    if not value.isascii():
        assert urllib.parse.unquote(header.decode()) == value
    assert headers_of(Record("r", 0.0, adapter=value))["x-lora-slots-adapter"] == header.decode()


def test_answers_of_the_base_have_every_header() -> None:
    """It has no digest and is waited for by nobody; the log knows no digest of it either."""
    record = Record("r", 0.0, adapter="llama", found_in=BASE_FOUND_IN, waited_s=0.0)
    assert headers_of(record) == {
        "x-request-id": "r",
        "x-lora-slots-adapter": "llama",
        "x-lora-slots-digest": "none",
        "x-lora-slots-found-in": "base",
        "x-lora-slots-wait-ms": "0.0",
    }
    assert record.digest is None
    assert headers_of(Record("r", 0.0)) == {"x-request-id": "r"}, "nothing is known of a request that found no model"


@pytest.mark.parametrize("origin", ["*", PAGE, "http://localhost:3000", "http://[::1]:8080", "tauri://localhost"])
def test_origins_as_browsers_send_them_are_taken(origin: str) -> None:
    """And the star."""
    check_origins([origin])


@pytest.mark.parametrize(
    "origin",
    ["page.example", f"{PAGE}/", "", f"{PAGE}/path", "HTTPS://page.example", "https://Page.example", f"{PAGE}:443",
     "http://page.example:80", "null", f"{PAGE}, http://other.example", "https://", "https://模型.example", "https://*.x"],
)  # fmt: skip
def test_what_no_browser_sends_is_refused(origin: str) -> None:
    """With what is expected; it would let no page in, and say nothing."""
    with pytest.raises(UsageError, match=r"scheme://host\[:port\]") as error:
        check_origins([PAGE, origin])
    assert f"--cors-origin {origin!r}" in str(error.value)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"x_request_id": "two words"}, 400),
        ({"body": b"x" * 2000}, 413),
        ({"content_type": "text/plain"}, 415),
        ({"host": "evil.example"}, 403),
        ({"path": "/nowhere"}, 404),
        ({}, 400),
    ],
)
def test_errors_can_be_read_by_a_page(tokenizer: Tokenizer, asked: dict[str, Any], status: int) -> None:
    """Wherever they are made, and they have their request's id; other pages cannot."""
    app = public_app(offline(tokenizer, max_body_bytes=1024), "127.0.0.1", (PAGE,))
    given = {"path": CHAT, "body": b"{", **asked}
    reply = call(app, given.pop("path"), given.pop("body"), origin=PAGE, **given)
    assert reply.status == status
    assert json.loads(reply.body)["error"]["message"]
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["x-request-id"].startswith("req-")
    other = call(app, CHAT, b"{", origin="https://other.example")
    assert "access-control-allow-origin" not in other.headers
    alone = call(public_app(offline(tokenizer), "127.0.0.1"), CHAT, b"{", origin=PAGE)
    assert "access-control-allow-origin" not in alone.headers


def test_what_goes_wrong_here_can_be_read_by_a_page_too() -> None:
    """500 in the envelope, with the headers."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    reply = call(Edge(broken, around=readable_by((PAGE,))), CHAT, origin=PAGE)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (500, "internal_error")
    assert reply.headers["access-control-allow-origin"] == PAGE


def test_a_gateway_does_not_start_with_an_origin_that_is_none(tmp_path: Path) -> None:
    """Before it looks for a server."""
    with pytest.raises(UsageError, match=r"--cors-origin 'page\.example'"):
        asyncio.run(open_gateway(Settings("127.0.0.1:1", cors_origins=("page.example",))))
