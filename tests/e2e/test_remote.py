"""Adapters in a real object store, bundles and raw PEFT ones, brought to a real Triton on first use."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from fakes import seaweed
from fakes.seaweed import Seaweed
from fakes.stacks import running

from adapter_slots.registry import Registry, publish_at
from adapter_slots.store import source_digest
from lora_slots.client import Client
from lora_slots.embedded import Prepared
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from peft_to_trtllm import convert

pytestmark = pytest.mark.triton
CROWD = 1_000
REGISTRY = "s3://adapters/fleet/adapters.yaml"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS with a bucket."""
    with seaweed.for_tests(tmp_path_factory.mktemp("seaweed"), "adapters") as server:
        yield server


def upload(store: Seaweed, folder: Path, prefix: str) -> str:
    """Put a folder's files below a prefix; the URL."""
    for file in folder.iterdir():
        store.client().put_object(Bucket="adapters", Key=f"{prefix}/{file.name}", Body=file.read_bytes())
    return f"s3://adapters/{prefix}"


@pytest.fixture(scope="module")
def remote(
    base: Path, engine: Path, adapters: dict[str, Path], store: Seaweed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A stack whose registry names a bundle, a raw adapter and a missing one: all in the store, the registry too."""
    home = tmp_path_factory.mktemp("remote")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**seaweed.environment(), "AWS_ENDPOINT_URL": store.url}.items():
            patch.setenv(name, value)
        publish_all(base, adapters, home, store)
        patch.delenv("AWS_ENDPOINT_URL")
        router = {"disk_dir": str(home / "disk"), "s3_endpoint_url": store.url, "tick_s": "0.2", "registry": REGISTRY}
        with running(Prepared(base, engine, home), router={**router, "registry_refresh_s": "0.2"}) as made:
            yield made


def publish_all(base: Path, adapters: dict[str, Path], home: Path, store: Seaweed) -> None:
    """Upload the adapters and write the registry."""
    bundle = convert(adapters["pirate"], base=base, out=home / "made", dtype="float32", name="pirate")
    publish_at(REGISTRY, "pirate", bundle.digest, upload(store, bundle.path, "bundles/pirate"))
    raw = adapters["robot"]
    digest = source_digest({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in raw.iterdir()})
    publish_at(REGISTRY, "robot", digest, upload(store, raw, "raw/robot"))
    publish_at(REGISTRY, "ghost", "0" * 64, "s3://adapters/nothing/here")


def test_a_thousand_requests_for_one_cold_adapter(remote: TritonServer, golden: list[dict[str, Any]]) -> None:
    """All on one stream, at once: one download, one bind, everybody is answered, and answered right."""
    answer = next(entry for entry in golden if entry["adapter"] == "pirate")
    client = triton.InferenceServerClient(remote.grpc_url)
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: got.put((result, error)))
    inputs = [
        tensor("text_input", answer["text_input"].encode(), np.object_, "BYTES"),
        tensor("max_tokens", 1, np.int32, "INT32"),
        tensor("adapter", b"pirate", np.object_, "BYTES"),
    ]
    outputs = [triton.InferRequestedOutput("text_output")]
    for i in range(CROWD):
        client.async_stream_infer("ensemble", inputs, outputs=outputs, request_id=f"crowd-{i}")
    texts = set()
    for _ in range(CROWD):
        result, error = got.get(timeout=300)
        assert error is None, error
        texts.add(result.as_numpy("text_output").reshape(-1)[0].decode())
    client.stop_stream()
    assert len(texts) == 1
    assert answer["text"].startswith(texts.pop())
    with Client(remote.grpc_url) as operator:
        told = operator.operate("explain", adapter="pirate")
    loads = [line["what"] for line in told["story"]]
    assert sum(line.startswith("in DISK") for line in loads) == 1
    assert sum(line.startswith("in SLOT") for line in loads) == 1
    assert told["uses"] == CROWD


def tensor(name: str, value: Any, dtype: Any, wire_type: str) -> triton.InferInput:
    """An input of shape [1, 1]."""
    made = triton.InferInput(name, [1, 1], wire_type)
    made.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return made


def test_a_raw_adapter_is_converted_on_the_way(remote: TritonServer, golden: list[dict[str, Any]]) -> None:
    """The registry names a PEFT directory in the store; the answers are PEFT's."""
    for answer in [entry for entry in golden if entry["adapter"] == "robot"][:2]:
        with Client(remote.grpc_url) as client:
            assert client.generate(answer["text_input"], adapter="robot") == answer["text"]


def test_an_adapter_the_store_lacks_is_refused_with_the_reason(remote: TritonServer) -> None:
    """Permanent: told to the client, seen in explain, nobody else is disturbed."""
    with Client(remote.grpc_url) as client:
        with pytest.raises(ServerError, match=r"no bundle\.json, nor adapter_config\.json") as refused:
            client.generate("x", adapter="ghost", max_tokens=1)
        assert refused.value.code == "UNAVAILABLE"
        assert "no bundle.json" in client.operate("explain", adapter="ghost")["failure"]


def test_a_change_in_the_store_is_seen(remote: TritonServer, store: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new name of what is there already is served without a restart."""
    for name, value in {**seaweed.environment(), "AWS_ENDPOINT_URL": store.url}.items():
        monkeypatch.setenv(name, value)
    entry = Registry(REGISTRY).entries["pirate"]
    publish_at(REGISTRY, "corsair", entry.digest, entry.path)
    pause = threading.Event()
    with Client(remote.grpc_url) as client:
        while "corsair" not in client.operate("status")["known"]:
            pause.wait(0.1)
        assert client.operate("explain", adapter="corsair")["digest"] == entry.digest
