"""An adapter at an S3 URL converts as the same files on disk do, from a real object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import seaweed
from fakes.peft_files import llama_tensors, write_adapter

from peft_to_trtllm import AdapterRefused, InputError, convert


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.Seaweed]:
    """A store with a bucket `adapters`, and the environment that leads to it."""
    home = tmp_path_factory.mktemp("weed")
    with pytest.MonkeyPatch.context() as patch, seaweed.for_tests(home, "adapters") as running:
        for name, value in {**seaweed.environment(), "AWS_ENDPOINT_URL": running.url}.items():
            patch.setenv(name, value)
        yield running


def put(store: seaweed.Seaweed, folder: Path, prefix: str) -> None:
    """Upload every file of a directory."""
    for file in folder.iterdir():
        store.client().upload_file(str(file), "adapters", f"{prefix}/{file.name}")


def test_same_bundle_as_from_disk(store: seaweed.Seaweed, tmp_path: Path) -> None:
    """Files, name and digest are the same wherever the adapter comes from."""
    adapter = write_adapter(tmp_path / "pirate", llama_tensors())
    (adapter / "README.md").write_text("not for us")
    put(store, adapter, "team/pirate")
    local = convert(adapter, out=tmp_path / "o", dtype="float16")
    fetched = convert("s3://adapters/team/pirate/", out=tmp_path / "o", dtype="float16")
    assert fetched.adapter == "pirate"
    assert fetched.digest == local.digest


def test_a_bin_alone(store: seaweed.Seaweed, tmp_path: Path) -> None:
    """The .bin is fetched where no safetensors is, and refused as ever."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "adapter_model.bin").write_bytes(b"no zip")
    put(store, folder, "old")
    with pytest.raises(AdapterRefused, match="pickle"):
        convert("s3://adapters/old", out=tmp_path / "o", dtype="float16")


def test_a_look_alike(store: seaweed.Seaweed, tmp_path: Path) -> None:
    """What is no PEFT adapter is called by its name there too."""
    store.client().put_object(Bucket="adapters", Key="whole/model.safetensors", Body=b"x" * 100)
    with pytest.raises(AdapterRefused, match="a whole model"):
        convert("s3://adapters/whole", out=tmp_path / "o", dtype="float16")


@pytest.mark.parametrize(
    "url", ["s3://adapters/nowhere", "s3://no-such-bucket/a", "s3://adapters", "s3:///a", "ftp://a/b"]
)
def test_wrong_urls(store: seaweed.Seaweed, tmp_path: Path, url: str) -> None:
    """Nothing there, no such bucket, no path, another scheme: an input error that names the URL."""
    with pytest.raises(InputError, match=url.removesuffix("/").replace("/", ".")):
        convert(url, out=tmp_path / "o", dtype="float16")
    assert not (tmp_path / "o").exists()
