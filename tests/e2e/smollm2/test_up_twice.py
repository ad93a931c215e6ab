"""Several stacks of one user: each serves its own adapters, on ports of its own, and is found by other commands."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fakes import seaweed
from fakes.up import Running, lora_slots, nothing_left

from adapter_slots.registry import publish, publish_at
from lora_slots import examples
from lora_slots.base_model.store import cache_folder
from peft_to_trtllm import convert

pytestmark = pytest.mark.triton
PIRATE, ROBOT = "arr", "beep boop"
ASK = ("generate", "--adapter", "mine", "Who are you?")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path, engine: Path) -> Iterator[Path]:
    """A cache of the test's own, but for the base model and the engine: nobody else's stacks are in it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("base", "engines"):
        (cache / name).symlink_to(cache_folder() / name)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("LORA_SLOTS_CACHE", str(cache))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("LORA_SLOTS_URL", raising=False)
    with nothing_left(temporary):
        yield cache


def url_of(running: Running) -> str:
    """host:port of gRPC, once it serves."""
    said = running.until(r"client\.py .*--url")
    running.until("serving until Ctrl-C")
    found = re.search(r"--url (\S+)", said)
    assert found
    return found[1]


def adapters_of(registry: Path) -> set[str]:
    return set(yaml.safe_load(registry.read_text())["adapters"])


def ask(*options: str) -> str:
    """What `mine` says of itself."""
    done = lora_slots(*ASK, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.lower()


def test_two_started_at_once_serve_each_its_own(cache: Path) -> None:
    """The same name means another adapter in each; the newest is found without --url, then the one that is left; the
    next start knows nothing of either's adapters."""
    adapters = examples.adapters()
    one, two = (Running("--adapter", f"mine={adapters[name]}") for name in ("pirate", "robot"))
    urls = [url_of(running) for running in (one, two)]
    assert len(set(urls)) == 2
    assert PIRATE in ask("--url", urls[0])
    assert ROBOT in ask("--url", urls[1])
    registries = sorted(cache.glob("stacks/*/adapters.yaml"))
    assert [adapters_of(file) for file in registries] == [{*adapters, "mine"}] * 2
    two.interrupt()
    assert two.end()[0] == 130
    assert PIRATE in ask()
    third = Running("--slots", "2")
    third.until(f"other stacks of yours serve on {urls[0]}")
    third.until("serving until Ctrl-C")
    refused = lora_slots(*ASK)  # the newest, which has no such adapter
    assert (refused.returncode, "NOT_FOUND" in refused.stderr) == (2, True), refused.stderr
    one.process.send_signal(signal.SIGKILL)  # its folder is free at once, whatever it left in it
    one.end()
    third.interrupt()
    assert third.end()[0] == 130
    assert lora_slots(*ASK).returncode != 0, "whoever serves on the usual port has no such adapter"
    assert list(cache.glob("stacks/*/stack.json")) == []


def test_the_warm_set_is_found_again(cache: Path) -> None:
    """A stack that starts after the only one ended has its folder, and brings back what that one had pinned."""
    running = Running()
    url = url_of(running)
    assert lora_slots("slots", "pin", "pirate", "--url", url).returncode == 0
    running.interrupt()
    assert running.end()[0] == 130
    running = Running()
    url = url_of(running)
    status = lora_slots("slots", "status", "--url", url).stdout
    running.interrupt()
    assert running.end()[0] == 130
    assert re.search(r"pirate .*\bpin\b", status), status
    assert [path.name for path in sorted((cache / "stacks").iterdir()) if path.is_dir()] == ["1"]


def test_a_registry_of_ones_own_is_served_as_it_is(cache: Path, base: Path, tmp_path: Path) -> None:
    """`--registry` serves what the file names and nothing else, checks that, and leaves the file unchanged."""
    registry = tmp_path / "own" / "adapters.yaml"
    bundle = convert(examples.adapters()["pirate"], base=base, out=tmp_path / "own", dtype="float32", name="json")
    for name in ("json", "one", "two", "three", "yet-another"):  # json: the name of an example adapter, and not that
        publish(registry, bundle, name)
    before = registry.read_bytes()
    done = lora_slots("up", "--check", "--max-tokens", "4", "--registry", str(registry))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[json · " in done.stdout
    assert "[robot · " not in done.stdout
    assert "asked are the base and json, one, three, two, of 5 adapters" in done.stdout
    assert registry.read_bytes() == before
    assert not (cache / "stacks/1/adapters.yaml").exists()


def test_a_registry_in_an_object_store_is_served(
    cache: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--registry s3://…`: the file and its adapters are fetched from there."""
    bundle = convert(examples.adapters()["pirate"], base=base, out=tmp_path / "made", dtype="float32", name="pirate")
    with seaweed.for_tests(tmp_path / "store", "adapters") as store:
        for name, value in {**seaweed.environment(), "AWS_ENDPOINT_URL": store.url}.items():
            monkeypatch.setenv(name, value)
        for file in bundle.path.iterdir():
            store.client().upload_file(str(file), "adapters", f"bundles/pirate/{file.name}")
        publish_at("s3://adapters/adapters.yaml", "pirate", bundle.digest, "s3://adapters/bundles/pirate")
        done = lora_slots("up", "--check", "--max-tokens", "4", "--registry", "s3://adapters/adapters.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warm: pirate (found in REMOTE" in done.stdout


def test_one_bad_adapter_of_a_registry_is_told_and_the_others_serve(cache: Path, base: Path, tmp_path: Path) -> None:
    """It is named with the reason while the rest is warmed; the check then fails with code 3, naming it."""
    registry = tmp_path / "own" / "adapters.yaml"
    for name in ("pirate", "robot"):
        publish(registry, convert(examples.adapters()[name], base=base, out=tmp_path / "own", dtype="float32"), name)
    for weights in tmp_path.glob("own/*/model.lora_weights.npy"):
        if "pirate" in (weights.parent / "bundle.json").read_text():
            weights.write_bytes(weights.read_bytes()[:-4])
    done = lora_slots("up", "--check", "--max-tokens", "4", "--registry", str(registry))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "warm: robot" in done.stdout
    assert "pirate: " in done.stderr
    assert "robot: " not in done.stderr
