"""`adapters.yaml` in an object store: its ETag is the stamp, and writes are conditional on it.

A store that ignores conditions would let two writers overwrite each other. So the first write of an update asks for
something impossible (that no object is there); a store that refuses it keeps conditions, and the real write follows.
One that takes it has stored the change without a condition, as is done with one that answers "not implemented". That is
the fallback, and is told as a warning: a change that somebody makes between our reading and our writing is lost. (An
object that was deleted since it was read looks the same: it is written anew.)

The history is one object for each change, below `<key without .yaml>.history/`: an object store cannot append.
boto3's own retries and time-outs are used here: these are small requests, and nobody waits for them but an operator or
a thread of its own.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from adapter_slots.errors import RegistryAbsent, RegistryError, RegistryMoved
from adapter_slots.registry_home import Reading, Stamp

UNCONDITIONAL = "this store does not keep conditions of writes: a change that somebody made meanwhile would be lost"
_LIMIT = 256 * 2**20
"""Bytes of a registry at most."""


class S3Home:
    """One object of a bucket. Safe to use from many threads."""

    interval_s = 10.0

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        """Raises RegistryError if the URL is not `s3://bucket/key`."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        if not bucket or "@" in bucket or not key or key.endswith("/"):
            raise RegistryError(f"{url}: s3://bucket/key of a file is expected")
        self.name = url
        self.folder: Path | None = None
        self._bucket, self._key = bucket, key
        self._endpoint_url = endpoint_url
        self._below = key.rpartition("/")[0]
        self._history = f"{key.removesuffix('.yaml')}.history/"
        self._made: Any = None
        self._lock = threading.Lock()

    def read(self, known: Stamp | None = None) -> Reading | None:
        """As `Home.read`: one GET."""
        unless = {"IfNoneMatch": known} if isinstance(known, str) else {}
        with self._translated(self._key) as client:
            try:
                answer = client.get_object(Bucket=self._bucket, Key=self._key, **unless)
            except client.exceptions.ClientError as error:
                if _status(error) == 304:
                    return None
                raise
            if answer["ContentLength"] > _LIMIT:
                raise RegistryError(f"{self.name}: {answer['ContentLength']} bytes, at most {_LIMIT} are read")
            try:
                return Reading(answer["Body"].read().decode("utf-8"), str(answer["ETag"]))
            except UnicodeDecodeError:
                raise RegistryError(f"{self.name}: not UTF-8 text") from None

    def locked(self) -> nullcontext[None]:
        """As `Home.locked`: the condition of the write is what keeps others out."""
        return nullcontext()

    def write(self, text: str, known: Stamp | None) -> str | None:
        """As `Home.write`."""
        body = text.encode()
        if known is None:
            return None if self._put(body, {"IfNoneMatch": "*"}) else UNCONDITIONAL
        try:
            self._put(body, {"IfNoneMatch": "*"})
        except RegistryMoved:
            return None if self._put(body, {"IfMatch": known}) else UNCONDITIONAL
        return UNCONDITIONAL

    def note(self, line: str, at: str) -> None:
        """As `Home.note`."""
        with self._translated(self._history) as client:
            key = f"{self._history}{at}-{uuid.uuid4().hex[:12]}.json"
            client.put_object(Bucket=self._bucket, Key=key, Body=line.encode())

    def notes(self) -> Sequence[str]:
        """As `Home.notes`: one GET for each change."""
        with self._translated(self._history) as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._history)
            keys = sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))
            bodies = [client.get_object(Bucket=self._bucket, Key=key)["Body"].read() for key in keys]
            return [json.dumps(json.loads(body)) for body in bodies]

    def located(self, path: str) -> str:
        """As `Home.located`: what is relative lies below the registry's own prefix."""
        if "://" in path or path.startswith("/"):
            return path
        return f"s3://{self._bucket}/{self._below}/{path}" if self._below else f"s3://{self._bucket}/{path}"

    def _put(self, body: bytes, condition: dict[str, Any]) -> bool:
        """Write on a condition; False if the store has none and it was written without."""
        with self._translated(self._key) as client:
            try:
                client.put_object(Bucket=self._bucket, Key=self._key, Body=body, **condition)
            except client.exceptions.ClientError as error:
                if _status(error) in (409, 412) or (_status(error) == 404 and "IfMatch" in condition):
                    raise RegistryMoved(f"{self.name}: it was changed meanwhile") from None
                if _status(error) != 501:
                    raise
                client.put_object(Bucket=self._bucket, Key=self._key, Body=body)
                return False
            return True

    @contextmanager
    def _translated(self, key: str) -> Iterator[Any]:
        """A client whose errors become RegistryErrors. Never their own text: it may quote headers or URLs."""
        from botocore.exceptions import BotoCoreError, ClientError

        where = f"s3://{self._bucket}/{key}"
        try:
            yield self._client()
        except ClientError as error:
            status, code = _status(error), error.response["Error"].get("Code", "")
            kind = RegistryAbsent if code == "NoSuchKey" else RegistryError
            raise kind(f"{where}: the store answered {status} {code}".rstrip()) from None
        except (BotoCoreError, ValueError) as error:
            raise RegistryError(f"{where}: {type(error).__name__}") from None

    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        with self._lock:
            if self._made is None:
                style = {"addressing_style": "path"} if self._endpoint_url else None
                retries = {"total_max_attempts": 3, "mode": "standard"}
                config = Config(connect_timeout=3, read_timeout=10, retries=retries, s3=style)
                self._made = boto3.client("s3", endpoint_url=self._endpoint_url, config=config)
            return self._made


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
