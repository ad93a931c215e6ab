"""adapters.yaml in a real object store: its ETag tells of changes, writes are conditional, nothing is lost."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from fakes.faulty_proxy import Fault, FaultyProxy
from fakes.seaweed import KEY, SECRET, Seaweed

from adapter_slots.errors import RegistryAbsent, RegistryError, RegistryMoved
from adapter_slots.registry import Registry, publish_at
from adapter_slots.registry_changes import add_version, set_rules
from adapter_slots.registry_history import read_history
from adapter_slots.registry_home import home_of
from adapter_slots.registry_s3 import UNCONDITIONAL, S3Home
from adapter_slots.registry_writing import change

pytestmark = pytest.mark.usefixtures("aws")
PUBLISH = """
import sys
from adapter_slots.registry_home import home_of
from adapter_slots.registry_writing import change
from adapter_slots.registry_changes import add_version
home = home_of(sys.argv[1], endpoint_url=sys.argv[2])
for number in range(int(sys.argv[4])):
    version = {"digest": f"{sys.argv[3]}-{number}", "path": "p"}
    change(home, "publish", lambda doc: add_version(doc, "shared", version)[0])
"""
PROCESSES, EACH = 4, 5


@pytest.fixture
def url(bucket: str) -> str:
    """Where this test's registry goes."""
    return f"s3://{bucket}/{uuid.uuid4().hex[:12]}/adapters.yaml"


@pytest.fixture
def home(url: str, store_server: Seaweed) -> S3Home:
    """A registry with one adapter."""
    home = S3Home(url, store_server.url)
    change(home, "add ant", lambda doc: add_version(doc, "ant", {"digest": "d1", "path": "bundles/d1"})[0])
    return home


def test_it_is_read_again_when_its_etag_changed(home: S3Home, store_server: Seaweed) -> None:
    """Relative paths lie below the registry's own prefix; what did not change is not read again."""
    registry = Registry(home.name, endpoint_url=store_server.url)
    folder = home.name.removesuffix("/adapters.yaml")
    assert registry.entries["ant"].path == f"{folder}/bundles/d1"
    assert registry.interval_s == 10.0
    assert not registry.refresh()
    change(home, "cold", lambda doc: set_rules(doc, "ant", {"cold": "fail"}))
    assert registry.refresh()
    assert registry.entries["ant"].cold == "fail"


@pytest.mark.parametrize("kind", ["reset", "busy"])
def test_a_store_that_is_away_leaves_the_last_good_one(home: S3Home, proxy: FaultyProxy, kind: str) -> None:
    """A problem told, then mended by itself; nothing of what was sent is in it."""
    registry = Registry(home.name, endpoint_url=proxy.url)
    proxy.faults.append(Fault(kind))
    assert not registry.refresh()
    assert (registry.problem or "").startswith(home.name)
    assert not {SECRET, KEY} & set(re.split(r"\W+", registry.problem or ""))
    assert registry.entries["ant"].digest == "d1"
    proxy.faults.clear()
    assert not registry.refresh(), "it is what it was"
    assert registry.problem is None


def test_what_is_not_there_is_told(url: str, store_server: Seaweed) -> None:
    """No object, no bucket, and URLs that are none."""
    with pytest.raises(RegistryError, match="the store answered 404 NoSuchKey"):
        Registry(url, endpoint_url=store_server.url)
    with pytest.raises(RegistryError, match="404 NoSuchBucket"):
        Registry("s3://no-such-bucket-here/a.yaml", endpoint_url=store_server.url)
    for wrong in ("s3://", "s3://bucket", "s3://bucket/", "s3://key:secret@bucket/a.yaml"):
        with pytest.raises(RegistryError, match=r"s3://bucket/key of a file"):
            home_of(wrong)
    with pytest.raises(RegistryError, match=r"a registry is a file, or s3://"):
        home_of("http://somewhere/adapters.yaml")


def test_a_write_goes_through_only_on_what_was_read(home: S3Home) -> None:
    """The first writer wins; the second reads again, and the first creator too."""
    reading = home.read()
    assert reading is not None
    assert home.write(reading.text + "# one\n", reading.stamp) is None
    with pytest.raises(RegistryMoved):
        home.write(reading.text + "# two\n", reading.stamp)
    with pytest.raises(RegistryMoved):
        home.write("schema: 1\n", None)
    with pytest.raises(RegistryAbsent):
        S3Home(home.name.replace("adapters.yaml", "gone.yaml"), home._endpoint_url).read()


def test_no_update_of_many_processes_is_lost(home: S3Home, store_server: Seaweed) -> None:
    """Four processes write at once: every version is there, every number once, every change in the history."""
    words = [
        [sys.executable, "-c", PUBLISH, home.name, store_server.url, str(who), str(EACH)] for who in range(PROCESSES)
    ]
    processes = [subprocess.Popen(word) for word in words]
    assert [process.wait() for process in processes] == [0] * PROCESSES
    versions = Registry(home.name, endpoint_url=store_server.url).content.versions["shared"]
    assert sorted(versions) == list(range(1, PROCESSES * EACH + 1))
    assert {e.digest for e in versions.values()} == {f"{who}-{n}" for who in range(PROCESSES) for n in range(EACH)}
    records = read_history(home.notes())
    assert len(records) == PROCESSES * EACH + 1
    order = {record.before: record for record in records}
    at, steps = records[0].after, 0
    while at in order:
        at, steps = order[at].after, steps + 1
    assert steps == PROCESSES * EACH, "the records form one chain"


def test_a_write_whose_answer_got_lost_is_not_made_twice(home: S3Home) -> None:
    """The store took it and the connection died: the repeated request is refused, and is seen to be our own."""
    put = home._put

    def twice(body: bytes, condition: dict[str, Any]) -> bool:
        done = put(body, condition)
        put(body, condition)
        return done

    home._put = twice  # type: ignore[method-assign]
    made = change(home, "again", lambda doc: add_version(doc, "ant", {"digest": "d2", "path": "p"})[0])
    assert [v["version"] for v in made.doc["adapters"]["ant"]["versions"]] == [1, 2]
    reading = home.read()
    assert reading is not None
    assert reading.text.count("digest: d2") == 1


def test_a_store_without_conditions_is_told(home: S3Home) -> None:
    """The change is made, and the warning says what could have been lost. The store is real; the client leaves the
    conditions out, as a proxy or an old store would."""

    def forget(params: dict[str, Any], **_: Any) -> None:
        for header in ("If-None-Match", "If-Match"):
            params["headers"].pop(header, None)

    home._client().meta.events.register("before-call.s3.PutObject", forget)
    made = change(home, "cold", lambda doc: set_rules(doc, "ant", {"cold": "fail"}))
    assert made.warnings == (UNCONDITIONAL,)
    assert Registry(home.name, endpoint_url=home._endpoint_url).entries["ant"].cold == "fail"


def test_publish_at_takes_a_url(url: str, store_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    """As trainers' pipelines call it; the endpoint is where AWS tools look for it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_server.url)
    entry = publish_at(url, "ant", "d1", "s3://elsewhere/ant")
    assert (entry.version, entry.path) == (1, "s3://elsewhere/ant")
    assert Registry(url).entries["ant"] == entry


def test_paths_of_keys_have_no_place_there(home: S3Home, tmp_path: Path) -> None:
    """Keys are read from the registry itself: base64 or PEM text."""
    change(home, "trust", lambda doc: {**doc, "trusted_keys": [str(tmp_path / "k.pub")]})
    with pytest.raises(RegistryError, match="base64 of 32 bytes, or PEM text"):
        Registry(home.name, endpoint_url=home._endpoint_url)
