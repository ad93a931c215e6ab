"""Where the adapter is: a local path as it is, or an S3 URL fetched into a temporary directory.

Only the files PEFT reads are fetched, into a directory that is removed afterwards. boto3 is imported when the first S3
URL comes, and finds endpoint and credentials by its own rules (environment, profile, instance role).
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft_to_trtllm.adapter import CONFIG, PICKLE, SAFETENSORS
from peft_to_trtllm.errors import InputError

_SCHEME = "s3://"


@contextmanager
def fetched(adapter: str) -> Iterator[Path]:
    """The adapter as a local directory, for the time of the context.

    Raises:
        InputError: an S3 URL without a bucket, without boto3, or one the store refuses; another scheme.
    """
    if not adapter.startswith(_SCHEME):
        if "://" in adapter:
            raise InputError(f"{adapter}: only s3:// URLs and local paths are read")
        yield Path(adapter)
        return
    bucket, _, prefix = adapter.removeprefix(_SCHEME).partition("/")
    prefix = prefix.strip("/")
    if not bucket or not prefix:
        raise InputError(f"{adapter}: s3://bucket/path is wanted")
    with tempfile.TemporaryDirectory(prefix="lora-slots-fetch-") as folder:
        directory = Path(folder) / prefix.rpartition("/")[2]
        directory.mkdir()
        _fetch(adapter, bucket, prefix, directory)
        yield directory


def _fetch(url: str, bucket: str, prefix: str, directory: Path) -> None:
    client, errors = _client()
    try:
        found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/", MaxKeys=1000).get("Contents", [])
        names = {item["Key"].removeprefix(f"{prefix}/") for item in found}
        weights = SAFETENSORS if SAFETENSORS in names else PICKLE
        if not names:
            raise InputError(f"{url}: nothing there")
        for name in (CONFIG, weights):
            if name in names:
                client.download_file(bucket, f"{prefix}/{name}", str(directory / name))
        for name in names - {CONFIG, SAFETENSORS, PICKLE}:
            if "/" not in name and name not in (".", ".."):
                (directory / name).touch()  # names alone: a look-alike is recognised by them
    except errors as error:
        raise InputError(f"{url}: {error}") from None


def _client() -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        boto3 = importlib.import_module("boto3")
        exceptions = importlib.import_module("botocore.exceptions")
    except ImportError:
        raise InputError("reading s3:// needs boto3, which is not installed") from None
    try:
        config = importlib.import_module("botocore.config").Config(connect_timeout=5, read_timeout=30)
        return boto3.client("s3", config=config), (exceptions.BotoCoreError, exceptions.ClientError, OSError)
    except (exceptions.BotoCoreError, ValueError) as error:
        raise InputError(f"S3: {error}") from None
