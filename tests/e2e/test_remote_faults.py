"""An object store that fails, behind a real Triton: the cause is told and explained, others go on, and it heals.

Each fault falls on one adapter's fetch, while another adapter is asked without a pause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import seaweed
from fakes.faulty_proxy import Fault, FaultyProxy, between
from fakes.seaweed import Seaweed
from fakes.stacks import running
from fakes.steady import Steady, ask, explain, is_right, until

from adapter_slots.registry import publish, publish_at
from lora_slots.embedded import Prepared
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from peft_to_trtllm import convert

pytestmark = pytest.mark.triton
STEADY = "json-1"


@dataclass
class Shop:
    """A stack, the store behind it, and what may be put between the two."""

    server: TritonServer
    store: Seaweed
    proxy: FaultyProxy
    between: ExitStack
    """Ends the proxy."""


@pytest.fixture(scope="module")
def shop(
    base: Path,
    engine: Path,
    variants: dict[str, dict[str, Any]],
    all_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    """Bundles in SeaweedFS behind a proxy; the steady adapter lies beside the registry."""
    home = tmp_path_factory.mktemp("shop")
    with ExitStack() as stack, ExitStack() as proxied:
        store = stack.enter_context(seaweed.for_tests(home / "seaweed", "adapters"))
        proxy = proxied.enter_context(between(store.host, store.port))
        client = store.client()
        for name in variants:
            bundle = convert(all_adapters[name], base=base, out=home / "bundles", dtype="float32", name=name)
            if name == STEADY:
                publish(home / "adapters.yaml", bundle, name)
                continue
            for file in bundle.path.iterdir():
                client.upload_file(str(file), "adapters", f"{name}/{file.name}")
            publish_at(home / "adapters.yaml", name, bundle.digest, f"s3://adapters/{name}")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for key, value in seaweed.environment().items():
            patch.setenv(key, value)
        bounds = {"tick_s": "0.1", "wait_s": "6", "to_disk_timeout_s": "4"}
        router = {"disk_dir": str(home / "disk"), "s3_endpoint_url": proxy.url, **bounds}
        server = stack.enter_context(running(Prepared(base, engine, home / "adapters.yaml"), router=router))
        yield Shop(server, store, proxy, proxied)


FAULTS = {
    "reset": ("json-2", Fault("reset"), "no answer"),
    "busy": ("json-3", Fault("busy"), "SlowDown|503"),
    "truncated": ("robot-2", Fault("cut", at=1000), "no answer|after .* bytes"),
    "one byte a second": ("pirate-1", Fault("drip"), r"not here within 4\.0 s"),
    "one flipped byte": ("pirate-2", Fault("flip", at=1000), "differ|sha256"),
}


def test_failing_stores_are_told_and_heal(shop: Shop, variants: dict[str, dict[str, Any]]) -> None:
    """Five adapters, five faults at once: each client and each `explain` hears the cause of its own.

    With the faults gone every adapter comes, whole, and answers as PEFT.
    """
    for name, fault, _ in FAULTS.values():
        fault.target = f"/{name}/model.lora_weights.npy"
    shop.proxy.faults[:] = [fault for _, fault, _ in FAULTS.values()]
    names = [name for name, _, _ in FAULTS.values()]
    with Steady(shop.server, variants[STEADY]):
        with ThreadPoolExecutor(len(FAULTS)) as pool:
            told = dict(zip(FAULTS, pool.map(lambda name: refusal(shop.server, variants[name]), names), strict=True))
        for case, (name, _, words) in FAULTS.items():
            assert re.search(words, str(told[case])), (case, told[case])
            assert told[case].code == "UNAVAILABLE"
            until(lambda name=name: bool(explain(shop.server, name)["failure"]))  # type: ignore[misc]
            story = [line["what"] for line in explain(shop.server, name)["story"]]
            assert any(line.startswith("DISK failed: ") for line in story), (case, story)
        shop.proxy.faults.clear()
        for name in names:
            until(lambda name=name: is_right(shop.server, variants[name]))  # type: ignore[misc]
    assert [explain(shop.server, name)["failure"] for name in names] == [None] * len(names)


def refusal(server: TritonServer, answer: dict[str, Any]) -> ServerError:
    """What the server refuses a request with."""
    with pytest.raises(ServerError) as refused:
        ask(server, answer)
    return refused.value


def test_a_store_that_refuses_connections_is_told_and_heals(shop: Shop, variants: dict[str, dict[str, Any]]) -> None:
    """Nobody listens where the store was; what is in a slot is served meanwhile."""
    port = shop.proxy.port
    shop.between.close()
    with Steady(shop.server, variants[STEADY]):
        with pytest.raises(ServerError, match="no answer"):
            ask(shop.server, variants["robot-1"])
        assert explain(shop.server, "robot-1")["failure"]
        with between(shop.store.host, shop.store.port, at=port):
            until(lambda: is_right(shop.server, variants["robot-1"]))
