"""REMOTE: where adapters are kept, and what one adapter there consists of. Blocking; run it in a thread.

    s3://bucket/prefix      store_s3.py
    file:///dir, a path     store_dir.py

A store knows files below a prefix and nothing of adapters. A `Source` is one adapter in a store: a bundle, or a raw
PEFT adapter, which has no manifest to hold its bytes to and is therefore named by its source digest.
Rules: what a store says is never believed (names, sizes, sha256 and digest are checked); no error carries a credential.
"""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import unquote, urlsplit

from adapter_slots.errors import (
    DiskFailed,
    DiskFull,
    DiskReadOnly,
    MoveCancelled,
    StoreCorrupt,
    StoreMissing,
    TierError,
)
from trtllm_lora.bundle import CONFIG_FILE, FORMAT_VERSION, MANIFEST_FILE, WEIGHTS_FILE, digest_of
from trtllm_lora.task_id import is_task_id_of

MANIFEST_LIMIT = 16 * 2**20
"""Bytes of a manifest at most."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Weights of a raw adapter; the first that is there is taken."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How to talk to an object store. Credentials come from where AWS tools look for them."""

    endpoint_url: str | None = None
    """None: AWS, or what AWS_ENDPOINT_URL says."""
    part_bytes: int = 16 * 2**20
    """One ranged GET."""
    parallel: int = 4
    """Ranged GETs at a time, per adapter."""
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 5.0
    """Longest silence of a connection."""
    min_bytes_per_s: int = 16 * 2**10
    slow_window_s: float = 5.0
    """A connection that brings less than `min_bytes_per_s` over a whole window is cut and tried anew."""
    attempts: int = 4
    """Tries of one request."""
    backoff_s: float = 0.2
    backoff_max_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The caller's end of a move: may cancel it from any thread, may watch it."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: Callable[[int, int], None] | None = None
    """Told (bytes so far, bytes in all) from the thread that runs the move."""

    def check(self) -> None:
        """Raise MoveCancelled if the move was given up."""
        if self.cancelled.is_set():
            raise MoveCancelled("the move was given up")

    def report(self, done: int, total: int) -> None:
        """Tell the watcher, if there is one."""
        if self.progress is not None:
            self.progress(done, total)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an adapter."""

    name: str
    num_bytes: int
    sha256: str | None = None
    """What it must have; None for a raw adapter's."""


class Store(Protocol):
    """Files by key. Keys are relative, with `/`. Errors: TierError."""

    def read(self, key: str, limit: int, transfer: Transfer) -> bytes | None:
        """A whole small file; None if there is none. StoreCorrupt if it is longer than `limit`."""

    def sizes(self, prefix: str, transfer: Transfer) -> Mapping[str, int]:
        """Name -> bytes of the files directly below a prefix."""

    def download(self, prefix: str, files: Sequence[StoredFile], into: Path, transfer: Transfer) -> Mapping[str, str]:
        """Copy files to a directory and return name -> sha256 of what arrived, which is `StoredFile.sha256` if given.

        What arrived before an error may stay in `into`, for the next try.
        """

    def close(self) -> None:
        """Let connections go."""


@dataclass(frozen=True, slots=True)
class Content:
    """What an adapter in a store consists of."""

    files: Sequence[StoredFile]
    manifest: bytes | None
    """`bundle.json` as it is there; None for a raw adapter."""
    digest: str | None
    """The bundle's digest; None for a raw adapter."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the manifest included."""
        return sum(file.num_bytes for file in self.files) + len(self.manifest or b"")


@dataclass(frozen=True, slots=True)
class Source:
    """One adapter in a store."""

    store: Store
    prefix: str
    url: str
    """For messages."""

    def look(self, transfer: Transfer) -> Content:
        """What is there: one small read for a bundle.

        Raises:
            StoreMissing: neither a bundle nor a PEFT adapter. StoreCorrupt: the manifest is not one, or was changed.
        """
        for _ in range(2):  # what arrives changed is asked for once more
            raw = self.store.read(_join(self.prefix, MANIFEST_FILE), MANIFEST_LIMIT, transfer)
            if raw is None:
                return self._raw_adapter(transfer)
            try:
                return self._bundle(raw)
            except StoreCorrupt as error:
                corrupt = error
        raise corrupt

    def fetch(self, content: Content, into: Path, transfer: Transfer) -> str:
        """Copy it to a directory; returns the bundle's digest, or the source digest of a raw adapter.

        Raises:
            StoreCorrupt: some byte is not what the manifest says. Other TierErrors as the store has them.
        """
        hashes = self.store.download(self.prefix, content.files, into, transfer)
        if content.manifest is None or content.digest is None:
            return source_digest(hashes)
        try:
            (into / MANIFEST_FILE).write_bytes(content.manifest)
        except OSError as error:
            raise disk_error(error, into) from None
        return content.digest

    def _bundle(self, raw: bytes) -> Content:
        where = f"{self.url}/{MANIFEST_FILE}"
        try:
            manifest = json.loads(raw)
            version, digest = manifest["format_version"], str(manifest["digest"])
            if version != FORMAT_VERSION:
                raise StoreCorrupt(f"{where}: bundle format {version!r}, this program reads {FORMAT_VERSION} (rule B2)")
            files = [StoredFile(name, *_facts(manifest["files"][name])) for name in (CONFIG_FILE, WEIGHTS_FILE)]
            if digest_of(manifest) != digest:
                raise StoreCorrupt(f"{where}: its digest is not that of its content (rule B5)")
            if not is_task_id_of(digest, manifest["task_id"]):
                raise StoreCorrupt(f"{where}: its task id is not made from its digest (rule B6)")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise StoreCorrupt(f"{where}: not a bundle's manifest (rules B2, B3)") from None
        return Content(files, raw, digest)

    def _raw_adapter(self, transfer: Transfer) -> Content:
        there = self.store.sizes(self.prefix, transfer)
        weights = next((name for name in ADAPTER_WEIGHTS if name in there), None)
        if ADAPTER_CONFIG not in there or weights is None:
            wanted = f"{MANIFEST_FILE}, nor {ADAPTER_CONFIG} with {' or '.join(ADAPTER_WEIGHTS)}"
            raise StoreMissing(f"{self.url}: no {wanted}")
        return Content([StoredFile(name, there[name]) for name in (ADAPTER_CONFIG, weights)], None, None)


class Stores:
    """All stores of one manager, opened on first use: one set of connections for each bucket or directory."""

    def __init__(self, settings: StoreSettings | None = None) -> None:
        self._settings = settings or StoreSettings()
        self._open: dict[str, Store] = {}
        self._lock = threading.Lock()

    def source(self, url: str) -> Source:
        """The adapter at a URL or path. Raises ValueError for another scheme, or a path with `..` in it."""
        root, prefix = _split(url)
        with self._lock:
            store = self._open.get(root)
            if store is None:
                store = self._open[root] = open_store(root, self._settings)
        return Source(store, prefix, url)

    def close(self) -> None:
        """Let all connections go."""
        with self._lock:
            for store in self._open.values():
                store.close()
            self._open.clear()


def open_store(url: str, settings: StoreSettings | None = None) -> Store:
    """The store at `s3://bucket[/prefix]`, `file:///dir` or a path; no connection is made yet.

    Raises:
        ValueError: another scheme, or an incomplete URL.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        from adapter_slots.store_s3 import S3Store

        if not parts.netloc or "@" in parts.netloc:
            raise ValueError(f"{parts.scheme}:// needs a bucket, and nothing but a bucket, before the path")
        return S3Store(parts.netloc, parts.path.strip("/"), settings or StoreSettings())
    from adapter_slots.store_dir import DirStore

    if parts.scheme == "file":
        return DirStore(Path(unquote(parts.path)))
    if "://" in url:
        raise ValueError(f"no store for {parts.scheme}:// (s3://, file:// and plain paths are known)")
    return DirStore(Path(url))


def source_digest(hashes: Mapping[str, str]) -> str:
    """Identity of a raw adapter: sha256 over `name sha256` of its files, in order of names."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_key(key: str) -> str:
    """The key, if it stays below its root. Raises ValueError."""
    if key.startswith("/") or ".." in PurePosixPath(key).parts or "\0" in key or "\\" in key:
        raise ValueError(f"{key!r} is not a path below the store")
    return key


def disk_error(error: OSError, where: Path) -> TierError:
    """What an error of the file system is to the manager."""
    why = f"{where}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(why)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return DiskReadOnly(why)
    return DiskFailed(why)


def _facts(entry: Mapping[str, object]) -> tuple[int, str]:
    size, sha = entry["bytes"], entry["sha256"]
    if not isinstance(size, int) or size < 0 or not isinstance(sha, str):
        raise ValueError("bytes is a number, sha256 is text")
    return size, sha


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _split(url: str) -> tuple[str, str]:
    """(root to open, prefix below it): a bucket and its key, a directory's parent and its name."""
    if url.startswith("s3://"):
        bucket, _, key = url.removeprefix("s3://").partition("/")
        return f"s3://{bucket}", check_key(key.strip("/"))
    head, _, name = url.rstrip("/").rpartition("/")
    return head or ("/" if url.startswith("/") else "."), check_key(name)
