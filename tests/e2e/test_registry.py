"""A registry with everything in it, behind a real Triton: a pin, a canary, a bundle that nobody signed."""

from __future__ import annotations

import json
import os
import queue
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from fakes.stacks import running
from fakes.steady import until

from adapter_slots.registry import Registry
from adapter_slots.registry_changes import Doc, add_version, give_share, make_current, set_alias, set_rules
from adapter_slots.registry_home import FileHome
from adapter_slots.registry_writing import change
from lora_slots.client import Client
from lora_slots.embedded import Prepared
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from peft_to_trtllm import convert
from trtllm_lora import Bundle
from trtllm_lora.bundle_writing import set_signature
from trtllm_lora.signing import PrivateKey, new_key

pytestmark = pytest.mark.triton
SOON = 60.0
FEW = 6
"""Tokens that tell the adapters apart."""
VERSIONS = {1: "pirate", 2: "robot"}
"""What the versions of the adapter `style` are."""


@pytest.fixture(scope="module")
def home(base: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FileHome:
    """`style` with two signed versions, the second a canary of alias `support`; `json`, which nobody signed; a pin."""
    folder = tmp_path_factory.mktemp("registry")
    home, key = FileHome(folder / "adapters.yaml"), new_key(folder / "release.key")
    for number, example in VERSIONS.items():
        change(
            home, f"add style@{number}", added(home, "style", signed(converted(adapters, example, base, folder), key))
        )
    change(home, "add json", added(home, "json", converted(adapters, "json", base, folder)))

    def rules(doc: Doc) -> Doc:
        doc = set_alias(make_current(doc, "style", 1), "support", {"style": 100})
        doc = set_rules(give_share(doc, "support", "style@2", 50.0), "style", {"pinned": True})
        return {**doc, "require_signatures": True, "trusted_keys": ["release.key.pub"]}

    change(home, "rules", rules)
    return home


def converted(adapters: dict[str, Path], example: str, base: Path, folder: Path) -> Bundle:
    """The bundle of an adapter."""
    return convert(adapters[example], base=base, out=folder / "bundles", dtype="float32", name=example)


def signed(bundle: Bundle, key: PrivateKey) -> Bundle:
    """The same content, signed."""
    return set_signature(bundle, key.sign(bundle.digest))


def added(home: FileHome, name: str, bundle: Bundle) -> Callable[[Doc], Doc]:
    """The edit that adds a bundle as a version."""
    version = {"digest": bundle.digest, "path": os.path.relpath(bundle.path, home.file.parent)}
    return lambda doc: add_version(doc, name, version)[0]


@pytest.fixture(scope="module")
def served(base: Path, engine: Path, home: FileHome) -> Iterator[TritonServer]:
    """A stack that serves it."""
    with running(Prepared(base, engine, home.file), router={"tick_s": "0.1"}) as made:
        yield made


@pytest.fixture(scope="module")
def answers(golden: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adapter -> its first golden answer: one prompt, answered differently by each."""
    first = golden[0]["prompt"]
    return {answer["adapter"]: answer for answer in golden if answer["prompt"] == first}


def ask(server: TritonServer, text: str, request_id: str, **parameters: Any) -> str:
    """The beginning of the ensemble's answer to a request that names the alias; it is not empty."""
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()
    inputs = [
        tensor("text_input", text.encode(), np.object_, "BYTES"),
        tensor("max_tokens", FEW, np.int32, "INT32"),
        tensor("adapter", b"support", np.object_, "BYTES"),
    ]
    outputs = [triton.InferRequestedOutput("text_output")]
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        client.async_stream_infer("ensemble", inputs, outputs=outputs, request_id=request_id, parameters=parameters)
        result, error = got.get(timeout=SOON)
        client.stop_stream()
    assert error is None, error
    text = str(result.as_numpy("text_output").reshape(-1)[0].decode())
    assert text
    return text


def tensor(name: str, value: Any, dtype: Any, wire_type: str) -> triton.InferInput:
    """An input of shape [1, 1]."""
    made = triton.InferInput(name, [1, 1], wire_type)
    made.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return made


def test_a_pin_of_the_registry_is_in_a_slot_unasked(served: TritonServer) -> None:
    """Before any request; an operator cannot take it away, the registry can."""
    with Client(served.grpc_url) as operator:
        until(lambda: operator.operate("explain", adapter="style")["tier"] == "SLOT")
        assert operator.operate("explain", adapter="style")["pinned"]
        assert operator.operate("explain", adapter="style")["uses"] == 0
        with pytest.raises(ServerError, match="style is pinned by the registry") as refused:
            operator.operate("unpin", adapter="style")
        assert refused.value.code == "INVALID_ARGUMENT"


def test_a_canary_through_the_ensemble(
    served: TritonServer, home: FileHome, answers: dict[str, dict[str, Any]], base: Path
) -> None:
    """Each session is answered by its own version, whatever the request's id; without a session the id is the key."""
    alias = Registry(home.file).aliases["support"]
    text = answers["pirate"]["text_input"]
    texts = {f"style@{number}" if number > 1 else "style": answers[name]["text"] for number, name in VERSIONS.items()}
    assert len({text[:8] for text in texts.values()}) == 2, "the versions answer differently"
    seen = set()
    for number in range(8):
        session = f"user-{number}"
        seen.add(alias.choose(session))
        wanted = texts[alias.choose(session)]
        for turn in range(2):
            assert wanted.startswith(ask(served, text, f"{session}-{turn}", session=session))
        assert wanted.startswith(ask(served, text, session))
    assert seen == set(texts), "both versions had their share"


def test_the_session_over_http(served: TritonServer, home: FileHome, answers: dict[str, dict[str, Any]]) -> None:
    """A field `session` of generate is the parameter."""
    alias = Registry(home.file).aliases["support"]
    session = next(name for name in map(str, range(100)) if alias.choose(name) == "style@2")
    fields = {"text_input": answers["robot"]["text_input"], "max_tokens": 64, "adapter": "support", "session": session}
    url = f"http://{served.http_url}/v2/models/ensemble/generate"
    with urllib.request.urlopen(url, json.dumps({"id": "h", **fields}).encode()) as reply:
        assert json.load(reply)["text_output"] == answers["robot"]["text"]


def test_what_nobody_signed_is_refused_by_name(served: TritonServer, home: FileHome) -> None:
    """To the client, in explain, and no byte of it in memory; a signature in the registry opens the door."""
    with Client(served.grpc_url) as client:
        for _ in range(2):
            with pytest.raises(ServerError, match="adapter 'json@1': not signed; trusted keys: ") as refused:
                client.generate("x", adapter="json", max_tokens=1)
            assert refused.value.code == "FAILED_PRECONDITION"
        assert "not signed" in client.operate("explain", adapter="json")["verdict"]
        assert client.operate("explain", adapter="json")["tier"] is None


def in_the_rest(got: list[str], seen: int, wanted: str) -> bool:
    """Whether an answer came since."""
    return wanted in got[seen:]


def test_a_promotion_and_its_rollback_take_effect_while_it_serves(
    served: TritonServer, home: FileHome, answers: dict[str, dict[str, Any]]
) -> None:
    """Every request in between is answered, and by one of the two versions, whole."""
    text, either = answers["pirate"]["text_input"], [answers[name]["text"] for name in VERSIONS.values()]
    stop = threading.Event()
    got: list[str] = []
    failed: list[ServerError] = []

    def keep_asking() -> None:
        with Client(served.grpc_url) as client:
            while not stop.is_set():
                try:
                    got.append(client.generate(text, adapter="style", max_tokens=64))
                except ServerError as error:
                    failed.append(error)

    asker = threading.Thread(target=keep_asking)
    asker.start()
    for number in (2, 1):
        seen = len(got)
        change(home, f"promote {number}", partial(make_current, name="style", number=number))
        wanted = answers[VERSIONS[number]]["text"]
        until(partial(in_the_rest, got, seen, wanted))
    stop.set()
    asker.join()
    assert not failed
    assert set(got) <= set(either)
