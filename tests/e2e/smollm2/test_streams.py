"""Streams side by side through a real Triton: no text is mixed, and no lease outlives a request that was refused."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lora_slots.client import Client
from lora_slots.stack import TritonServer

pytestmark = pytest.mark.triton
SPLIT = {"embedding_bias_words": ["日", "🥳"], "embedding_bias_weights": [9.0, 9.0]}
"""Makes the model prefer tokens that are parts of characters."""
SOON = 20.0


def pieces(server: TritonServer, **body: Any) -> list[dict[str, Any]]:
    """What `generate_stream` answers, piece by piece."""
    url = f"http://{server.http_url}/v2/models/ensemble/generate_stream"
    request = urllib.request.Request(url, json.dumps({"max_tokens": 24, "stream": True, **body}).encode())
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        return [json.loads(line.decode().removeprefix("data: ")) for line in reply if line.strip()]


def text(server: TritonServer, **body: Any) -> str:
    """The streamed text."""
    return "".join(piece["text_output"] for piece in pieces(server, **body))


def whole(server: TritonServer, **body: Any) -> str:
    """The same answer in one response."""
    url = f"http://{server.http_url}/v2/models/ensemble/generate"
    request = urllib.request.Request(url, json.dumps({"max_tokens": 24, **body}).encode())
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        return str(json.load(reply)["text_output"])


def leases(client: Client) -> int:
    """Leases that run now."""
    return sum(adapter["leases"] for adapter in client.operate("status")["adapters"])


@pytest.mark.parametrize("adapter", [{}, {"adapter": "pirate"}])
@pytest.mark.parametrize("request_id", [{}, {"id": "same"}])
def test_a_streamed_text_is_the_whole_text(
    server: TritonServer, adapter: dict[str, str], request_id: dict[str, str]
) -> None:
    """With a request id or without one, base or adapter: characters over several tokens come out whole."""
    asked = {"text_input": "Say it:", **adapter, **SPLIT}
    expected = whole(server, **asked)
    assert any(len(char.encode()) > 1 for char in expected)
    assert text(server, **asked, **request_id) == expected


def test_streams_of_one_request_id_do_not_mix(server: TritonServer) -> None:
    """Four base streams under one id at once: each has its own text, as if it were alone."""
    asked = [{"text_input": f"Count from {number}:", "id": "same", **SPLIT} for number in range(4)]
    alone = [text(server, **one) for one in asked]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: text(server, **one), asked))
    assert together == alone


def test_sequences_of_one_request_have_each_their_text_and_end_the_lease_together(server: TritonServer) -> None:
    """num_return_sequences: greedy ones are equal, whole, and told apart by `sequence_index`."""
    asked = {"text_input": "Say it:", "adapter": "pirate", **SPLIT}
    found = pieces(server, **asked, id="many", num_return_sequences=3)
    texts = ["".join(p["text_output"] for p in found if p["sequence_index"] == number) for number in range(3)]
    assert texts == [whole(server, **asked)] * 3
    with Client(server.grpc_url) as client:
        until = time.monotonic() + SOON
        while leases(client) and time.monotonic() < until:  # the end is reported off the client's path
            time.sleep(0.02)
        assert leases(client) == 0


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"max_tokens": 0}, "mMaxNewTokens > 0"),
        ({"text_input": "word " * 9000}, "exceeds maximum input length"),
        ({"top_k": -1}, "runtime_top_k -1 is below 0"),
        ({"top_p": 1.5}, "runtime_top_p 1.5 is outside of [0, 1]"),
        ({"temperature": -1.0}, "temperature -1.0 is below 0"),
        ({"min_tokens": -1}, "min_tokens -1 is below 0"),
        ({"beam_width": 2}, "beam_width 2 is outside of [1, 1]"),
        ({"num_return_sequences": 0}, "numReturnSequences > 0"),
        ({"end_id": 10**6}, "end_id 1000000 is not in the vocabulary"),
    ],
)
def test_a_request_the_engine_would_refuse_holds_no_lease(
    server: TritonServer, field: dict[str, Any], words: str
) -> None:
    """The engine's own words, and the same id can be used again at once."""
    asked = {"text_input": "hello", "adapter": "robot", "id": "retried", **field}
    with pytest.raises(urllib.error.HTTPError) as refused:
        pieces(server, **asked)
    assert words in refused.value.read().decode()
    with Client(server.grpc_url) as client:
        assert [a for a in client.operate("status")["adapters"] if a["name"] == "robot" and a["leases"]] == []


def test_a_request_without_a_prompt_is_refused_by_the_router(server: TritonServer) -> None:
    """Straight to lora_router, which takes every engine input as optional: the engine's own words, and no lease."""
    url = f"http://{server.http_url}/v2/models/lora_router/generate"
    body = {"adapter": "robot", "request_output_len": 4}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()))
    assert "!mInputTokenIds.empty()" in refused.value.read().decode()
    with Client(server.grpc_url) as client:
        assert [a for a in client.operate("status")["adapters"] if a["name"] == "robot" and a["leases"]] == []
