"""Folders that are published for good: engines and bundles, in S3 or what speaks its language.

    s3://bucket/prefix/<name>/<file>…        one object for each file, its sha256 in the object's metadata
                             /<manifest>     last: who finds it finds the rest

Names come from content, so what is published is never changed: under a name whose manifest is there nothing is sent any
more. One publisher at a time for a name. What is fetched is checked against the manifest's sha256 before it appears.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lora_slots.artifact_store import s3_client, split_url, words
from lora_slots.refusals import Refused
from trtllm_lora.files import sha256_of

_SHA = "sha256"
Hashes = Mapping[str, str]
"""File, relative with `/` -> hex sha256."""


@dataclass(frozen=True, slots=True)
class Published:
    """Where a folder lies now."""

    url: str
    sent: int
    """Files that went there now, the manifest included; 0: it was published before."""


class Publisher:
    """One place in a store. Every failure of the store is an OSError that names it."""

    def __init__(self, url: str, client: Any = None) -> None:
        """Raises Refused: `url` is no s3://bucket/prefix."""
        self._bucket, self._prefix = split_url(url, "--to")
        self._client = client or s3_client()

    def publish(self, name: str, folder: Path, manifest: str, files: Hashes) -> Published:
        """Put a folder there as `name`, the manifest last.

        Raises:
            OSError: the store, or a file that is not what `files` says.
        """
        if self._digest(self._key(name, manifest)) is not None:
            return Published(self._url(name), 0)
        whole = {**files, manifest: sha256_of(folder / manifest)}  # in this order: the manifest is the last
        new = [file for file, digest in whole.items() if self._digest(self._key(name, file)) != digest]
        for file in new:
            self._send(folder / file, self._key(name, file), whole[file])
        return Published(self._url(name), len(new))

    def _digest(self, key: str) -> str | None:
        with _store_errors(f"s3://{self._bucket}/{key}"):
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=key)
            except self._client.exceptions.ClientError as error:
                if _status(error) == 404:
                    return None
                raise
            return str(head["Metadata"].get(_SHA, "without a sha256"))

    def _send(self, file: Path, key: str, digest: str) -> None:
        if sha256_of(file) != digest:
            raise OSError(f"{file}: differs from its manifest, so it is not published")
        with _store_errors(f"s3://{self._bucket}/{key}"):
            self._client.upload_file(str(file), self._bucket, key, ExtraArgs={"Metadata": {_SHA: digest}})

    def _key(self, name: str, file: str) -> str:
        return f"{self._prefix}{name}/{file}"

    def _url(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{name}"


def fetch(
    url: str,
    out: Path,
    manifest: str,
    read: Callable[[Path], Hashes],
    judge: Callable[[Path], object] = lambda _: None,
    client: Any = None,
) -> Path:
    """Bring a published folder; `out` appears when every byte is checked, or not at all.

    `read` gives the files of a fetched manifest, `judge` sees the folder before it appears; what they raise goes on.

    Raises:
        Refused: nothing is published there, `out` is taken, or bytes are not those of the manifest. OSError: the store.
    """
    bucket, prefix = split_url(url, "URL")
    client = client or s3_client()
    if out.exists():
        raise Refused(f"{out}: is there already; left alone")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        if not _download(client, bucket, f"{prefix}{manifest}", made / manifest):
            raise Refused(f"{url}: nothing is published there (no {manifest})")
        files = read(made / manifest)
        _below(url, files)
        for file, digest in files.items():
            _download_checked(client, bucket, prefix, made, file, digest)
        judge(made)
        made.rename(out)
    return out


def _below(url: str, files: Hashes) -> None:
    for file in files:
        place = PurePosixPath(file)
        if place.is_absolute() or ".." in place.parts or not place.parts:
            raise Refused(f"{url}: its manifest names {file!r}, which is no file below it")


def _download_checked(client: Any, bucket: str, prefix: str, made: Path, file: str, digest: str) -> None:
    target = made / file
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _download(client, bucket, f"{prefix}{file}", target):
        raise Refused(f"s3://{bucket}/{prefix}{file}: is missing, although its manifest is there")
    if sha256_of(target) != digest:
        raise Refused(f"s3://{bucket}/{prefix}{file}: its bytes are not those of its manifest")


def _download(client: Any, bucket: str, key: str, target: Path) -> bool:
    with _store_errors(f"s3://{bucket}/{key}"):
        try:
            client.download_file(bucket, key, str(target))
        except client.exceptions.ClientError as error:
            if _status(error) == 404:
                return False
            raise
    return True


@contextmanager
def _store_errors(place: str) -> Iterator[None]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, Boto3Error, ClientError) as error:
        raise OSError(f"{place}: {words(error)}") from None


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
