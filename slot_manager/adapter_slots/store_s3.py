"""REMOTE in S3, or what speaks its language. The only file that imports boto3, and only when a store is first used.

boto3 finds credentials and region, signs, follows a bucket's region and reads error answers; its own retries are off.
Retries are tenacity's, because it can wait on an event: a cancel ends a back-off at once. (stamina, built on it, sleeps
through, and logs the arguments of what it retries.)

A download is cut into ranged GETs over all files of an adapter. Workers write parts where they belong; the caller's
thread hashes them in order as they arrive and watches the workers (store_wire.py). After an error the whole parts stay
and are not asked for again; should the sum then be wrong, everything is fetched once more before it is called corrupt.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from tenacity.nap import sleep_using_event

from adapter_slots.errors import StoreCorrupt, StoreDenied, StoreMissing, StoreUnavailable, TierError
from adapter_slots.store import StoredFile, StoreSettings, Transfer, check_key
from adapter_slots.store_parts import Part, PartFile

if TYPE_CHECKING:
    from adapter_slots.store_wire import Crew, Exchange

_READ = 2**20
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")

T = TypeVar("T")


class S3Store:
    """One bucket, below a prefix. Safe to use from many threads."""

    def __init__(self, bucket: str, prefix: str, settings: StoreSettings) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = check_key(prefix)
        self._settings = settings
        self._lock = threading.Lock()
        self._client: Any = None
        self._wire: Any = None

    def read(self, key: str, limit: int, transfer: Transfer) -> bytes | None:
        """As `Store.read`."""

        def get(exchange: Exchange) -> bytes | None:
            client = self._connected()
            with self._translated(key):
                try:
                    answer = client.get_object(Bucket=self._bucket, Key=self._key(key))
                except client.exceptions.NoSuchKey:
                    return None
                size = answer["ContentLength"]
                with closing(answer["Body"]):
                    if size > limit:
                        raise StoreCorrupt(f"{self.url}/{key}: {size} bytes, at most {limit} are read")
                    return b"".join(self._body(answer, exchange, size))

        return self._one(get, transfer)

    def sizes(self, prefix: str, transfer: Transfer) -> Mapping[str, int]:
        """As `Store.sizes`: one list request (at most 1,000 names)."""
        below = f"{self._key(prefix)}/".lstrip("/")

        def ask(_: Exchange) -> Mapping[str, int]:
            with self._translated(prefix):
                answer = self._connected().list_objects_v2(Bucket=self._bucket, Prefix=below, Delimiter="/")
            names = {entry["Key"][len(below) :]: entry["Size"] for entry in answer.get("Contents", ())}
            return {name: size for name, size in names.items() if name}

        return self._one(ask, transfer)

    def download(self, prefix: str, files: Sequence[StoredFile], into: Path, transfer: Transfer) -> Mapping[str, str]:
        """As `Store.download`."""
        with ExitStack() as stack:
            parts = [stack.enter_context(PartFile(into, file, self._settings.part_bytes)) for file in files]
            try:
                return self._fetch_all(prefix, parts, transfer)
            except StoreCorrupt:
                for file in parts:
                    file.forget()
            return self._fetch_all(prefix, parts, transfer)

    def close(self) -> None:
        """Let idle connections go."""
        with self._lock:
            if self._wire is not None:
                self._wire.close()
            self._client = self._wire = None

    def _fetch_all(self, prefix: str, files: Sequence[PartFile], transfer: Transfer) -> Mapping[str, str]:
        total = sum(file.num_bytes for file in files)
        done, hashes = 0, {}
        self._connected()
        with self._crew(transfer, self._settings.parallel) as crew:
            jobs = {
                (file, part): crew.submit(partial(self._get_part, crew, prefix, file, part))
                for file in files
                for part in file.missing()
            }
            for file in files:
                sha = hashlib.sha256()
                for part in file.parts():
                    if job := jobs.get((file, part)):
                        crew.result(job)
                    file.hash_part(part, sha)
                    done += part.num_bytes
                    transfer.report(done, total)
                hashes[file.name] = sha.hexdigest()
                if file.sha256 not in (None, hashes[file.name]):
                    raise StoreCorrupt(f"{self.url}/{prefix}/{file.name}: its bytes differ from the manifest's sha256")
        return hashes

    def _get_part(self, crew: Crew, prefix: str, file: PartFile, part: Part) -> None:
        key = f"{prefix}/{file.name}".lstrip("/")

        def get(exchange: Exchange) -> None:
            with self._translated(key):
                answer = self._connected().get_object(
                    Bucket=self._bucket, Key=self._key(key), Range=f"bytes={part.start}-{part.end - 1}"
                )
                with closing(answer["Body"]):
                    size = int(answer.get("ContentRange", "/-1").rpartition("/")[2])
                    if size != file.num_bytes:
                        found = f"{size} bytes" if size >= 0 else "no ranges"
                        raise StoreCorrupt(f"{self.url}/{key}: the store has {found}, {file.num_bytes} bytes expected")
                    at = part.start
                    for chunk in self._body(answer, exchange, part.num_bytes):
                        file.write(chunk, at)
                        at += len(chunk)
            file.done(part)

        self._tried(crew, get)

    def _body(self, answer: Mapping[str, Any], exchange: Exchange, length: int) -> Iterator[bytes]:
        left = length
        with answer["Body"] as raw:
            while left:
                chunk = raw.read1(min(_READ, left))  # one recv: what is there, so that slowness shows
                if not chunk:
                    raise StoreUnavailable(f"the store broke off {left} bytes before the end")
                left -= len(chunk)
                exchange.got(len(chunk))
                yield chunk
            raw.drain_conn()
            raw.release_conn()

    def _one(self, call: Callable[[Exchange], T], transfer: Transfer) -> T:
        transfer.check()
        self._connected()
        with self._crew(transfer, 1) as crew:
            return crew.result(crew.submit(lambda: self._tried(crew, call)))

    def _tried(self, crew: Crew, call: Callable[[Exchange], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception_type(StoreUnavailable),
            stop=stop_after_attempt(self._settings.attempts),
            wait=wait_random_exponential(multiplier=self._settings.backoff_s, max=self._settings.backoff_max_s),
            sleep=sleep_using_event(crew.stopped),
            reraise=True,
        )

        def once() -> T:
            with crew.exchange() as exchange:
                return call(exchange)

        return retrying(once)

    def _crew(self, transfer: Transfer, size: int) -> Crew:
        from adapter_slots.store_wire import Crew

        return Crew(self._settings, transfer, size)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}".strip("/")

    def _connected(self) -> Any:
        with self._lock, self._translated(""):
            if self._client is None:
                try:
                    self._client, self._wire = _connect(self._settings)
                except ValueError:
                    raise StoreUnavailable(f"{self.url}: the endpoint is not a URL") from None
            return self._client

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Errors of boto3, urllib3 and sockets as TierErrors. Never their own text: it may quote headers or URLs."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        where = f"{self.url}/{key}".rstrip("/")
        try:
            yield
        except ClientError as error:
            raise _refusal(error, where) from None
        except BotoCoreError as error:
            if type(error).__name__ in _NO_CREDENTIALS:
                raise StoreDenied(f"{where}: no usable credentials ({type(error).__name__})") from None
            raise StoreUnavailable(f"{where}: {type(error).__name__}") from None
        except (HTTPError, OSError) as error:
            raise StoreUnavailable(f"{where}: no answer ({type(error).__name__})") from None


def _connect(settings: StoreSettings) -> tuple[Any, Any]:
    import boto3
    import botocore.session
    from botocore.config import Config

    from adapter_slots.store_wire import Wire

    session = botocore.session.Session()
    path_style = {"addressing_style": "path"} if settings.endpoint_url else None
    client = boto3.Session(botocore_session=session).client(
        "s3",
        endpoint_url=settings.endpoint_url,
        config=Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            response_checksum_validation="when_required",  # parts are held to the manifest's sha256
            s3=path_style,
        ),
    )
    wire = Wire(settings, session.get_config_variable("ca_bundle"))
    client.meta.events.register("before-send.s3", wire.send)
    return client, wire


def _refusal(error: Any, where: str) -> TierError:
    code = str(error.response["Error"].get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{where}: the store answered {status} {code}".rstrip()
    if status in (401, 403):
        return StoreDenied(f"{said} (without the right to list, S3 also says so of what is not there)")
    if status == 404:
        return StoreMissing(said)
    if status == 416:
        return StoreCorrupt(f"{said}: the object is shorter than its manifest says")
    return StoreUnavailable(said)
