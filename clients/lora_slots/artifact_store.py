"""Build results in S3, or what speaks its language: one tar per result, its sha256 in the object's metadata."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from lora_slots.refusals import Refused

_SHA = "sha256"


class S3Artifacts:
    """Fills `trtllm_lora.pipeline.RemoteStore`. Credentials and endpoint are boto3's usual ones (AWS_ENDPOINT_URL, …).

    Every failure of the store is an OSError: a build goes on without it.
    """

    def __init__(self, url: str, client: Any = None) -> None:
        self._bucket, self._prefix = split_url(url, "--remote")
        self._client = client or s3_client()

    def fetch(self, name: str, into: Path) -> bool:
        """Unpack the result `name` into the new folder `into`; False if it is not there."""
        from botocore.exceptions import BotoCoreError, ClientError

        with tempfile.TemporaryFile() as file:
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=self._key(name))
                self._client.download_fileobj(self._bucket, self._key(name), file)
            except ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                    return False
                raise OSError(words(error)) from None
            except BotoCoreError as error:
                raise OSError(words(error)) from None
            if _sha256(file) != head["Metadata"].get(_SHA):
                raise OSError(f"s3://{self._bucket}/{self._key(name)}: its bytes are not those that were kept")
            try:
                with tarfile.open(fileobj=file) as archive:
                    into.mkdir()
                    archive.extractall(into, filter="data")
            except tarfile.TarError as error:  # no archive, or members that would land elsewhere
                raise OSError(f"s3://{self._bucket}/{self._key(name)}: {words(error)}") from None
        return True

    def keep(self, name: str, folder: Path) -> None:
        """Put a result there under its name."""
        from botocore.exceptions import BotoCoreError, ClientError

        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for path in sorted(folder.iterdir()):
                    archive.add(path, path.name)
            extra = {"Metadata": {_SHA: _sha256(file)}}
            try:
                self._client.upload_fileobj(file, self._bucket, self._key(name), ExtraArgs=extra)
            except (BotoCoreError, ClientError) as error:
                raise OSError(words(error)) from None

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}.tar"


def split_url(url: str, option: str) -> tuple[str, str]:
    """(bucket, prefix that ends in `/` or is empty) of s3://bucket/prefix. Raises Refused, naming the option."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise Refused(f"{option} {url}: write s3://bucket/prefix")
    return bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""


def s3_client() -> Any:
    """A client with boto3's usual settings (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …) and short patience."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 3}))


def _sha256(file: Any) -> str:
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    return digest


def words(error: Exception) -> str:
    """An error of a library on one line."""
    return " ".join(str(error).split())
