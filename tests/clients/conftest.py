"""A real S3 (SeaweedFS) for the tests of this folder, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes import seaweed


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Seaweed]:
    """A running store with the bucket `builds`."""
    with seaweed.for_tests(tmp_path_factory.mktemp("seaweed"), "builds") as server:
        yield server
