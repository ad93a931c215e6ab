"""What the ensemble answers, through a real Triton: the tokens of transformers and peft, streamed."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lora_slots.client import Client
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer

pytestmark = pytest.mark.triton
ROOT = Path(__file__).parents[3]


def ask(url: str, answer: dict[str, Any], *, stream: bool = True, request_id: str | None = None) -> list[str]:
    """The pieces of one golden prompt's answer."""
    with Client(url) as client:
        asked: dict[str, Any] = {"adapter": answer["adapter"], "max_tokens": 64, "request_id": request_id}
        if not stream:
            return [client.generate(answer["text_input"], **asked)]
        return list(client.stream(answer["text_input"], **asked))


def test_base_and_adapters_answer_as_transformers_and_peft(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """Greedy, float32, 64 tokens, one after another: the streamed text, and one piece at least per two tokens."""
    assert {answer["adapter"] for answer in golden[:8]} == {answer["adapter"] for answer in golden}
    for answer in golden[:8]:
        pieces = ask(server.grpc_url, answer)
        assert "".join(pieces) == answer["text"], answer["adapter"]
        assert len(pieces) >= len(answer["tokens"]) // 2


def test_eight_mixed_streams_at_once_answer_the_same(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """Every golden answer, base and all adapters in one batch: none depends on its neighbours."""
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda answer: "".join(ask(server.grpc_url, answer)), golden))
    assert texts == [answer["text"] for answer in golden]


def test_without_streaming_there_is_one_response(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """stream=false: the whole text in one piece."""
    for answer in golden[:4]:
        assert ask(server.grpc_url, answer, stream=False) == [answer["text"]]


def test_http_streams_json_lines(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """`/v2/models/ensemble/generate_stream`, as the curl line of `lora-slots up` uses it."""
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    body = {"text_input": answer["text_input"], "max_tokens": 64, "stream": True, "adapter": "pirate", "id": "http-1"}
    url = f"http://{server.http_url}/v2/models/ensemble/generate_stream"
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        lines = [line.decode().removeprefix("data: ") for line in reply if line.strip()]
    texts = [json.loads(line)["text_output"] for line in lines]
    assert "".join(texts) == answer["text"]
    assert len(texts) > 5


def test_an_unknown_adapter_is_not_found_and_never_the_base(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """NOT_FOUND with near names over gRPC; HTTP's generate has one status for every refusal, and the same text."""
    with pytest.raises(ServerError, match=r"no adapter 'pirat'; near names: pirate") as caught:
        ask(server.grpc_url, {**golden[0], "adapter": "pirat"})
    assert caught.value.code == "NOT_FOUND"
    body = {"text_input": "x", "max_tokens": 4, "adapter": "pirat"}
    url = f"http://{server.http_url}/v2/models/ensemble/generate"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()))
    assert refused.value.code == 400
    assert "no adapter 'pirat'; near names: pirate" in refused.value.read().decode()


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"adapter": ""}, "leave it out to ask the base model"),
        ({"adaptor": "pirate"}, "no input 'adaptor'; did you mean 'adapter'?"),
        ({"lora_name": "pirate"}, "no input 'lora_name'; did you mean 'adapter'?"),
        ({"adapter": "pirate", "cold": "maybe"}, "can 'wait' or 'fail'"),
    ],
)
def test_a_field_that_means_an_adapter_is_never_dropped(
    server: TritonServer, golden: list[dict[str, Any]], field: dict[str, Any], words: str
) -> None:
    """HTTP's generate turns unknown fields into parameters, which nobody would read: the base would answer."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        generate_over_http(server, golden[0], **field)
    assert words in refused.value.read().decode()


def test_a_task_id_of_the_registry_is_as_good_as_a_name(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """Clients that speak `lora_task_id` go on working; an id nobody has is NOT_FOUND, and weights are refused."""
    answer = next(entry for entry in golden if entry["adapter"] == "robot")
    with Client(server.grpc_url) as client:
        client.operate("warm", adapter="robot")
        known = {a["name"]: a["task_id"] for a in client.operate("status")["adapters"]}
    assert generate_over_http(server, answer, lora_task_id=known["robot"]) == answer["text"]
    for wrong, words in (
        ({"lora_task_id": 12_345}, "no adapter has task id 12345"),
        ({"lora_task_id": known["robot"], "adapter": "robot"}, "not both"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            generate_over_http(server, answer, **wrong)
        assert words in refused.value.read().decode()


def generate_over_http(server: TritonServer, answer: dict[str, Any], **more: Any) -> str:
    """One unstreamed answer over HTTP's generate."""
    body = {"text_input": answer["text_input"], "max_tokens": 64, **more}
    url = f"http://{server.http_url}/v2/models/ensemble/generate"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as reply:
        return str(json.loads(reply.read())["text_output"])


def test_a_request_id_that_runs_is_refused(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """Two running requests cannot share an id; once the first is over the id is free again."""
    answer = next(entry for entry in golden if entry["adapter"] == "json")
    with Client(server.grpc_url) as client:
        first = client.stream(answer["text_input"], adapter="json", max_tokens=64, request_id="twice")
        next(first)
        with pytest.raises(ServerError, match="twice is still running") as caught:
            ask(server.grpc_url, answer, request_id="twice")
        assert caught.value.code == "ALREADY_EXISTS"
        list(first)
    until_no_lease(server, "json")
    assert "".join(ask(server.grpc_url, answer, request_id="twice")) == answer["text"]


def until_no_lease(server: TritonServer, adapter: str) -> None:
    """Ask for the status until no lease of the adapter runs; end reports travel off the client's path."""
    with Client(server.grpc_url) as client:
        for _ in range(200):
            if not any(a["leases"] for a in client.operate("status")["adapters"] if a["name"] == adapter):
                return
    raise AssertionError("leases are still running")


def test_leases_end_with_their_requests(server: TritonServer, golden: list[dict[str, Any]]) -> None:
    """postprocessing reports the end, streamed or not: no lease is left, long before any deadline."""
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    for stream in (True, False):
        ask(server.grpc_url, answer, stream=stream)
        until_no_lease(server, "pirate")


def test_characters_split_over_tokens_come_out_whole(server: TritonServer) -> None:
    """An answer with emoji streams without a replacement character."""
    prompt = "<|im_start|>user\nRepeat: 🦜🏴‍☠️ 你好 naïve<|im_end|>\n<|im_start|>assistant\n🦜🏴‍☠️ 你好 naïve\n🦜"
    with Client(server.grpc_url) as client:
        text = "".join(client.stream(prompt, max_tokens=24))
        whole = client.generate(prompt, max_tokens=24)
    assert text == whole


def test_the_example_client_and_the_command_line_stream_the_answer(
    server: TritonServer, golden: list[dict[str, Any]]
) -> None:
    """The two other ready-to-paste lines of `lora-slots up`."""
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    script = [sys.executable, str(ROOT / "examples" / "client.py"), "--adapter", "pirate", "--url", server.grpc_url]
    command = [str(Path(sys.executable).with_name("lora-slots")), "generate", "--adapter", "pirate"]
    example = subprocess.run([*script, answer["prompt"]], capture_output=True, text=True, check=True)
    assert example.stdout.strip()
    typed = subprocess.run(
        [*command, "--max-tokens", "64", "--url", server.grpc_url, answer["prompt"]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert typed.stdout.strip() == answer["text"].strip()
