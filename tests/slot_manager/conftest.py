"""One real object store for all tests of a run."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import seaweed
from fakes.faulty_proxy import FaultyProxy, between
from fakes.seaweed import Seaweed

from adapter_slots.store import StoreSettings


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS."""
    with seaweed.for_tests(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(store_server: Seaweed) -> Any:
    """A plain client, to put things there."""
    return store_server.client()


@pytest.fixture(scope="session")
def bucket(s3: Any) -> str:
    """The bucket of this run: SeaweedFS sets several volumes apart for each."""
    s3.create_bucket(Bucket="adapters")
    return "adapters"


@pytest.fixture
def upload(s3: Any, bucket: str) -> Callable[[Path, str], str]:
    """Put a directory below a prefix of this test's own; its URL."""
    own = uuid.uuid4().hex[:12]

    def put(directory: Path, name: str) -> str:
        prefix = f"{own}/{name}"
        for file in directory.iterdir():
            s3.put_object(Bucket=bucket, Key=f"{prefix}/{file.name}", Body=file.read_bytes())
        return f"s3://{bucket}/{prefix}"

    return put


@pytest.fixture
def proxy(store_server: Seaweed) -> Iterator[FaultyProxy]:
    """A proxy in front of the store, without faults yet."""
    with between(store_server.host, store_server.port) as running:
        yield running


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for the store where AWS tools look for them, and nothing of the user's."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def quick(proxy: FaultyProxy) -> StoreSettings:
    """The store through the proxy, small parts, impatient."""
    return StoreSettings(
        endpoint_url=proxy.url,
        part_bytes=16 * 2**10,
        connect_timeout_s=1.0,
        read_timeout_s=2.0,
        min_bytes_per_s=16 * 2**10,
        slow_window_s=0.5,
        attempts=3,
        backoff_s=0.01,
        backoff_max_s=0.05,
    )
