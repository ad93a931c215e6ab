"""Tenants and the admin port on a running gateway: keys, limits, adapters that come and go."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fakes.gateways import RunningGateway, ask, gateway, until
from fakes.little import BASE

from adapter_slots.registry import Registry
from lora_slots.client import Client
from lora_slots.embedded import Prepared
from lora_slots.errors import ServerError, UsageError
from lora_slots.gateway.keys import add_key, add_tenant, revoke_key
from lora_slots.gateway.server import Settings, open_gateway
from lora_slots.stack import TritonServer

pytestmark = pytest.mark.triton
CHAT = "/v1/chat/completions"


def asked(model: str, **more: Any) -> dict[str, Any]:
    """A short conversation."""
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}


class Keys:
    """A tenants file and the keys that were made with it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.acme = add_tenant(file, "acme", ["pir*"], True, {})
        self.bolt = add_tenant(file, "bolt", ["json"], False, {"concurrent": 1})
        self.few = add_tenant(file, "few", ["*"], True, {"requests_per_minute": 3})
        self.short = add_tenant(file, "short", ["*"], True, {"tokens_per_minute": 60})
        self.still = add_tenant(file, "still", ["*"], True, {"cold_loads": 0})
        self.admin = add_key(file, None)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """The tenants of these tests."""
    return Keys(tmp_path_factory.mktemp("tenants") / "tenants.yaml")


@pytest.fixture(scope="module")
def guarded(server: TritonServer, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway with tenants, which may therefore be reached from anywhere."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    everywhere = ("--host", "0.0.0.0", "--admin-host", "0.0.0.0")  # noqa: S104
    with gateway(server.grpc_url, log, *everywhere, "--tenants", str(keys.file)) as made:
        yield made


def as_tenant(door: RunningGateway, key: str) -> openai.OpenAI:
    """OpenAI's client with a key."""
    return openai.OpenAI(base_url=f"{door.url.replace('0.0.0.0', '127.0.0.1')}/v1", api_key=key, max_retries=0)  # noqa: S104


def test_without_a_key_nothing_is_answered(guarded: RunningGateway, keys: Keys) -> None:
    """OpenAI's error class for a wrong one; a key works from the moment it is made until it is taken out."""
    for path in ("/v1/models", "/v1/models/pirate", "/metrics"):
        assert ask(guarded.url, path).status == 401, path
        assert ask(guarded.url, path, key="ls-nokey").status == 401, path
    assert ask(guarded.url, CHAT, asked("pirate")).status == 401
    with as_tenant(guarded, keys.acme[:-3] + "xyz") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    key = add_key(keys.file, "acme")
    assert ask(guarded.url, CHAT, asked("pirate"), key=key).status == 200
    revoke_key(keys.file, key[3:11])
    assert ask(guarded.url, CHAT, asked("pirate"), key=key).status == 401
    assert ask(guarded.url, "/health").status == 200


def test_another_tenants_adapter_is_as_unknown_as_any(guarded: RunningGateway, keys: Keys) -> None:
    """404 with the same words; lists and near names have what the tenant may use and nothing else."""
    for model in ("json", "json@1", f"{BASE}:json", "jsom", "robot"):
        reply = ask(guarded.url, CHAT, asked(model), key=keys.acme)
        told = reply.json()["error"]
        assert (reply.status, told["code"], told["param"]) == (404, "model_not_found", "model")
        names = told["message"].partition(";")[2]
        assert set(re.findall(r"[\w@:-]+", names)) <= {"near", "names:", "there", "are:", BASE, "pirate"}, names
        assert "x-lora-slots-adapter" not in reply.headers
        assert ask(guarded.url, f"/v1/models/{model}", key=keys.acme).status == 404
    with as_tenant(guarded, keys.acme) as client:
        assert {model.id for model in client.models.list()} == {BASE, "pirate"}
        assert client.chat.completions.create(
            model="pirate", messages=[{"role": "user", "content": "hi"}], max_tokens=1
        )
    with as_tenant(guarded, keys.bolt) as client:
        assert {model.id for model in client.models.list()} == {"json"}
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "hi"}])


def test_requests_a_minute(guarded: RunningGateway, keys: Keys) -> None:
    """OpenAI's error class, and when to come again; wrong requests count too."""
    with as_tenant(guarded, keys.few) as client:
        for body in (asked("pirate"), {}, asked("nobody")):
            ask(guarded.url, CHAT, body, key=keys.few)
        with pytest.raises(openai.RateLimitError) as error:
            client.chat.completions.create(**asked("pirate"))
    assert error.value.code == "requests_exceeded"
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 61


def test_tokens_a_minute(guarded: RunningGateway, keys: Keys) -> None:
    """The answer is charged too."""
    assert ask(guarded.url, CHAT, asked("pirate", max_tokens=40, min_tokens=40), key=keys.short).status == 200
    reply = ask(guarded.url, CHAT, asked("pirate"), key=keys.short)
    assert (reply.status, reply.json()["error"]["code"]) == (429, "tokens_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 121
    long = ask(guarded.url, "/v1/completions", {"model": "pirate", "prompt": [5] * 61}, key=keys.short)
    assert (long.status, long.headers.get("x-should-retry")) == (429, "false")


def test_requests_at_once(guarded: RunningGateway, keys: Keys) -> None:
    """The second is refused while the first streams, and none when it has ended."""
    with as_tenant(guarded, keys.bolt) as client:
        stream = client.chat.completions.create(
            **asked("json", max_tokens=500), stream=True, extra_body={"min_tokens": 500}
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as error:
            client.chat.completions.create(**asked("json"))
        assert error.value.code == "concurrency_exceeded"
        stream.close()

    until("there is room", lambda: ask(guarded.url, CHAT, asked("json"), key=keys.bolt).status == 200)


def is_evicted(client: Client, adapter: str) -> bool:
    """Take an adapter out of its slot, unless its last lease is still being given back."""
    try:
        client.operate("evict", adapter=adapter)
    except ServerError:
        return False
    return True


def test_cold_loads(server: TritonServer, guarded: RunningGateway, keys: Keys) -> None:
    """A tenant without cold loads gets what is in a slot, and 429 for what is not."""
    with Client(server.grpc_url) as client:
        client.operate("warm", adapter="robot")
        assert ask(guarded.url, CHAT, asked("robot"), key=keys.still).status == 200
        until("evicted", lambda: is_evicted(client, "robot"))
    reply = ask(guarded.url, CHAT, asked("robot"), key=keys.still)
    assert (reply.status, reply.json()["error"]["code"]) == (429, "cold_loads_exceeded")
    fails = ask(guarded.url, CHAT, asked("robot"), key=keys.still, x_lora_slots_cold="fail")
    assert (fails.status, fails.json()["error"]["code"]) == (429, "cold_loads_exceeded")
    assert ask(guarded.url, CHAT, asked(BASE), key=keys.still).status == 200


def test_the_base_answers_for_nobody_who_may_not_ask_it(guarded: RunningGateway, keys: Keys) -> None:
    """Not in an adapter's place either."""
    reply = ask(guarded.url, CHAT, asked("json"), key=keys.bolt, x_lora_slots_cold="base")
    assert (reply.status, reply.json()["error"]["param"]) == (400, "x-lora-slots-cold")


def test_the_admin_port_has_keys_of_its_own(guarded: RunningGateway, keys: Keys) -> None:
    """A tenant's key opens nothing there, the admin's none of the tenants' routes; metrics are the admin's."""
    for key in (None, keys.acme):
        assert ask(guarded.admin_url, "/admin/status", key=key).status == 401
        assert ask(guarded.admin_url, "/admin/pin", {"adapter": "pirate"}, key=key).status == 401
        assert ask(guarded.admin_url, "/v1/load_lora_adapter", {}, key=key).status == 401
        assert ask(guarded.url, "/metrics", key=key).status == 401
    assert ask(guarded.url, "/v1/models", key=keys.admin).status == 401
    assert ask(guarded.url, "/admin/status", key=keys.admin).status == 404
    assert "adapters" in ask(guarded.admin_url, "/admin/status", key=keys.admin).json()
    text = ask(guarded.url, "/metrics", key=keys.admin).body.decode()
    assert 'tenant="acme"' in text
    assert ask(guarded.admin_url, "/metrics", key=keys.admin).status == 200
    revoke_key(keys.file, keys.admin[3:11])
    for key in (None, keys.admin):
        assert ask(guarded.admin_url, "/admin/status", key=key).status == 401, (
            "no key is left, and the port is not open"
        )
    keys.admin = add_key(keys.file, None)
    assert ask(guarded.admin_url, "/admin/status", key=keys.admin).status == 200


def test_operations(door: RunningGateway) -> None:
    """warm, pin, unpin, evict, drain, explain; what cannot be done is told."""
    assert ask(door.admin_url, "/admin/warm", {"adapter": "pirate"}).json()["adapter"] == "pirate"
    assert ask(door.admin_url, "/admin/pin", {"adapter": "pirate"}).status == 200
    assert ask(door.admin_url, "/admin/adapters/pirate").json()["pinned"] is True
    refused = ask(door.admin_url, "/admin/evict", {"adapter": "pirate"})
    assert 400 <= refused.status < 500
    assert "pin" in refused.json()["error"]["message"]
    assert ask(door.admin_url, "/admin/unpin", {"adapter": "pirate"}).status == 200
    assert ask(door.admin_url, "/admin/warm", {"adapter": "nobody"}).status == 404
    assert ask(door.admin_url, "/admin/explode", {"adapter": "pirate"}).status == 404
    assert ask(door.admin_url, "/admin/pin", {}).json()["error"]["param"] == "adapter"
    assert ask(door.admin_url, "/admin/drain", {"on": True}).status == 200
    try:
        reply = ask(door.url, CHAT, asked("pirate"))
        assert (reply.status, reply.json()["error"]["code"]) == (503, "adapter_unavailable")
    finally:
        assert ask(door.admin_url, "/admin/drain", {"on": False}).status == 200
    assert ask(door.url, CHAT, asked("pirate")).status == 200


def nearly(peft: Path, folder: Path) -> str:
    """A PEFT directory of other bytes than the adapter's, and the same answers: alpha is a hair larger."""
    shutil.copytree(peft, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 1.00001}))
    return str(folder)


def test_an_adapter_comes_and_goes_as_with_vllm(
    door: RunningGateway, golden: list[dict[str, Any]], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Loaded from a PEFT directory it answers at once; a second load needs load_inplace; unloaded it is unknown."""
    load = {"lora_name": "guest", "lora_path": nearly(adapters["json"], tmp_path / "guest")}
    loaded = ask(door.admin_url, "/v1/load_lora_adapter", load)
    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'guest' added successfully."), loaded.body
    one = next(each for each in golden if each["adapter"] == "json")
    question = {"messages": [{"role": "user", "content": one["prompt"]}], "temperature": 0, "max_tokens": 64}
    reply = ask(door.url, CHAT, {"model": "guest", **question})
    assert reply.json()["choices"][0]["message"]["content"] == one["text"]
    assert reply.headers["x-lora-slots-found-in"] == "slot"
    again = ask(door.admin_url, "/v1/load_lora_adapter", load)
    assert (again.status, again.json()["error"]["code"]) == (400, "adapter_exists")
    assert ask(door.admin_url, "/v1/load_lora_adapter", {**load, "load_inplace": True}).status == 200
    assert ask(door.url, "/v1/models/guest").json()["root"] == "guest@2"
    gone = ask(door.admin_url, "/v1/unload_lora_adapter", {"lora_name": "guest"})
    assert (gone.status, gone.body) == (200, b"Success: LoRA adapter 'guest' removed successfully.")
    assert ask(door.url, CHAT, {"model": "guest", **question}).status == 404
    assert ask(door.admin_url, "/v1/unload_lora_adapter", {"lora_name": "guest"}).status == 404


def test_what_cannot_be_served_leaves_no_trace(door: RunningGateway, prepared: Prepared, tmp_path: Path) -> None:
    """No adapter there, a broken one, one that the server refuses: told, and the registry is as before."""
    before = dict(Registry(prepared.registry).entries)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    for place, status in ((str(tmp_path / "missing"), (400, 422)), (str(broken), (422, 503))):
        reply = ask(door.admin_url, "/v1/load_lora_adapter", {"lora_name": "guest", "lora_path": place})
        assert reply.status in status, reply.body
        assert ask(door.url, CHAT, asked("guest")).status == 404
    assert dict(Registry(prepared.registry).entries) == before


def test_rollback_under_load(
    door: RunningGateway, golden: list[dict[str, Any]], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """A new version and its end while requests run: every answer is a whole one of one version, none fails."""
    texts = {}
    for name in ("json", "robot"):
        one = next(each for each in golden if each["adapter"] == name)
        texts[name] = one["text"]
    prompt = next(each["prompt"] for each in golden if each["adapter"] == "json")
    assert prompt == next(each["prompt"] for each in golden if each["adapter"] == "robot")
    question = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 64}
    folders = {name: nearly(adapters[name], tmp_path / name) for name in texts}
    assert (
        ask(door.admin_url, "/v1/load_lora_adapter", {"lora_name": "turn", "lora_path": folders["json"]}).status == 200
    )
    answers: list[tuple[int, str]] = []
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            reply = ask(door.url, CHAT, {"model": "turn", **question})
            content = reply.json()["choices"][0]["message"]["content"] if reply.status == 200 else reply.body.decode()
            answers.append((reply.status, content))

    threads = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name in ("robot", "json", "robot"):
            load = {"lora_name": "turn", "lora_path": folders[name], "load_inplace": True}
            assert ask(door.admin_url, "/v1/load_lora_adapter", load).status == 200
            reply = ask(door.url, CHAT, {"model": "turn", **question})
            assert reply.json()["choices"][0]["message"]["content"] == texts[name]
    finally:
        over.set()
        for thread in threads:
            thread.join()
        ask(door.admin_url, "/v1/unload_lora_adapter", {"lora_name": "turn"})
    assert {status for status, _ in answers} == {200}, [one for one in answers if one[0] != 200]
    assert {content for _, content in answers} == set(texts.values())


@pytest.mark.parametrize(
    ("more", "words"), [({"host": "0.0.0.0"}, "tenant's key"), ({"admin_host": "::"}, "admin port")]  # noqa: S104
)  # fmt: skip
def test_nothing_is_open_beyond_this_machine(more: dict[str, Any], words: str) -> None:
    """Without tenants or an admin key a gateway does not listen on other addresses."""
    import asyncio

    with pytest.raises(UsageError, match=words):
        asyncio.run(open_gateway(Settings("127.0.0.1:1", **more)))
