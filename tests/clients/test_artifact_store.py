"""Build results in a real S3 (SeaweedFS): shared, checked, and no obstacle when it fails."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fakes import seaweed

from lora_slots.artifact_store import S3Artifacts
from lora_slots.refusals import Refused


@pytest.fixture
def s3(store: seaweed.Seaweed) -> Any:
    """A client of the store."""
    return store.client()


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A result of two files, one of them in a folder."""
    folder = tmp_path / "result"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "rank0.engine").write_bytes(bytes(range(256)) * 5000)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


def test_what_is_kept_is_fetched(s3: Any, result: Path, tmp_path: Path) -> None:
    """The folder that comes back is the one that went there; an unknown name is not there."""
    store = S3Artifacts("s3://builds/team/engines", s3)
    store.keep("engine-1", result)
    assert store.fetch("engine-1", tmp_path / "back")
    assert (tmp_path / "back" / "rank0.engine").read_bytes() == (result / "rank0.engine").read_bytes()
    assert (tmp_path / "back" / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert not store.fetch("engine-2", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_changed_bytes_are_not_taken(s3: Any, result: Path, tmp_path: Path) -> None:
    """An object whose bytes are not those that were kept is refused."""
    store = S3Artifacts("s3://builds", s3)
    store.keep("engine-3", result)
    head = s3.head_object(Bucket="builds", Key="engine-3.tar")
    s3.put_object(Bucket="builds", Key="engine-3.tar", Body=b"other", Metadata=head["Metadata"])
    with pytest.raises(OSError, match="not those that were kept"):
        store.fetch("engine-3", tmp_path / "back")


@pytest.mark.parametrize("members", [None, "../outside"])
def test_archives_that_are_none_of_ours(s3: Any, tmp_path: Path, members: str | None) -> None:
    """Something else under a result's name, or an archive that would write elsewhere, is an error of the store."""
    file = tmp_path / "file"
    file.write_bytes(b"no archive" * 1000)
    if members:
        with tarfile.open(tmp_path / "tar", "w") as archive:
            archive.add(file, members)
        file = tmp_path / "tar"
    data = file.read_bytes()
    metadata = {"sha256": hashlib.sha256(data).hexdigest()}
    s3.put_object(Bucket="builds", Key="engine-4.tar", Body=data, Metadata=metadata)
    with pytest.raises(OSError, match=r"engine-4\.tar"):
        S3Artifacts("s3://builds", s3).fetch("engine-4", tmp_path / "back")
    assert not (tmp_path / "outside").exists()


def test_a_store_that_fails_is_an_os_error(result: Path, tmp_path: Path) -> None:
    """A store that nobody answers for can neither keep nor give, which a build survives."""
    import boto3
    from botocore.config import Config

    quick = Config(connect_timeout=1, read_timeout=1, retries={"max_attempts": 0})
    nobody = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    store = S3Artifacts("s3://builds", boto3.client("s3", endpoint_url="http://127.0.0.1:9", config=quick, **nobody))
    with pytest.raises(OSError, match="Could not connect"):
        store.keep("engine-1", result)
    with pytest.raises(OSError, match="Could not connect"):
        store.fetch("engine-1", tmp_path / "back")


@pytest.mark.parametrize("url", ["builds/x", "s3://", "https://host/x"])
def test_an_address_that_is_none(url: str) -> None:
    """A wrong address is refused at once."""
    with pytest.raises(Refused, match="write s3://bucket/prefix"):
        S3Artifacts(url)
