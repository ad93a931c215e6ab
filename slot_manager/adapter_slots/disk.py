"""DISK: bundles in a bounded directory of this machine, brought from REMOTE, checked against the engine.

A bundle that the registry itself has beside it is used in place and never copied. Every byte is checked once per
process: on its way in, or by `verify`. A raw PEFT adapter is converted on its way in, by a function that the
composition root gives: this package never imports a converter.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from weakref import WeakValueDictionary

from adapter_slots.admission import Claims, claims_of
from adapter_slots.disk_layout import SOURCES, Found
from adapter_slots.disk_space import DiskSpace
from adapter_slots.errors import AdapterRejected, BundleBroken, ConversionFailed, DiskFailed, StoreCorrupt
from adapter_slots.registry import Entry
from adapter_slots.store import Content, Source, Transfer, disk_error
from trtllm_lora import Bundle, BundleError, CacheGeometry, open_bundle
from trtllm_lora.fit import fit_problems

Converter = Callable[[Path, Path], Bundle]
"""(adapter directory, directory to write the bundle below) -> the bundle. Raises ConversionFailed with every reason."""

DEFAULT_MAX_BYTES = 64 * 2**30


class DiskTier:
    """The bundles of one engine. Without a `root` only those in place. Safe to use from many threads.

    Raises:
        DiskFailed: another process uses `root`, or it cannot be made or read.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        root: Path | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        converter: Converter | None = None,
    ) -> None:
        self.geometry = geometry
        self._converter = converter
        self._verified: set[str] = set()
        self._became: dict[str, str] = {}
        self._gates: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._space = DiskSpace(root, max_bytes, self._verified.discard) if root is not None else None
        self._read_sources()

    @property
    def found(self) -> Found:
        """What was in the directory at the start."""
        return self._space.found if self._space is not None else Found()

    @property
    def used_bytes(self) -> int:
        """Bytes in the directory, transfers under way and quarantine included."""
        return self._space.used_bytes if self._space is not None else 0

    def about(self) -> dict[str, object] | None:
        """The directory, its bytes, and what was not as expected at the start; None without one."""
        if self._space is None:
            return None
        return {
            "directory": str(self._space.root),
            "used_bytes": self._space.used_bytes,
            "max_bytes": self._space.max_bytes,
            "torn": {path.name: why for path, why in self.found.torn.items()},
            "foreign": self.found.foreign,
            "removed": self.found.removed,
        }

    def has(self, digest: str) -> bool:
        """Is the bundle (or what this raw adapter became) in the directory?"""
        return self._path(digest) is not None

    def open(self, entry: Entry) -> Bundle:
        """The bundle of a registry entry, from the directory or in place, known to fit the engine.

        Raises:
            AdapterRejected: no such bundle, another digest than the registry's, or it does not fit: every reason.
        """
        copy = self._path(entry.digest)
        wanted = self._became.get(entry.digest, entry.digest) if copy else entry.digest
        return self._open(copy or Path(entry.path), wanted, entry.name)

    def add(
        self,
        digest: str,
        source: Source,
        transfer: Transfer | None = None,
        check: Callable[[Claims], None] = lambda _: None,
    ) -> Bundle:
        """Bring an adapter from REMOTE, converted if it is a raw one (blocking; one writer per digest).

        Args:
            digest: of the bundle; for a raw adapter its source digest, or that of the bundle it becomes.
            check: raises NotAdmitted for what may not come in, by what its manifest claims; before a byte is fetched.

        Raises:
            TierError: what the store, the disk or the converter said; MoveCancelled.
            AdapterRejected: it does not fit the engine: every reason. NotAdmitted: `check` said so.
        """
        transfer = transfer or Transfer()
        space = self._space
        if space is None:
            raise DiskFailed(f"{source.url} is not on this machine, and there is no directory to bring it to")
        name = PurePosixPath(source.prefix).name or "adapter"
        with self._alone(digest, transfer):
            path = self._path(digest)
            if path is None:
                content = source.look(transfer)
                check(claims_of(json.loads(content.manifest) if content.manifest else None, digest))
                size = content.num_bytes * (1 if content.digest else 2)  # a raw adapter and its bundle
                with space.fetching(digest, size) as work:
                    made = self._bring(digest, source, content, work, transfer)
                    self._open(made.path, made.digest, name)  # before it takes a name
                    path = space.publish(made.digest, made.path, work)
                    self._verified.add(made.digest)
                    if made.digest != digest:
                        self._note_source(digest, made.digest)
            return self._open(path, self._became.get(digest, digest), name)

    def verify(self, bundle: Bundle) -> None:
        """Check every byte against the manifest, once per digest. One in the directory that fails is quarantined.

        Raises:
            BundleBroken: some file is not what the manifest says.
        """
        if bundle.digest in self._verified:
            return
        try:
            bundle.verify()
        except BundleError as error:
            if self._space is not None and self._space.path(bundle.digest) == bundle.path:
                self._space.quarantine(bundle.digest, str(error))
            raise BundleBroken(str(error)) from None
        self._verified.add(bundle.digest)

    def pages(self, bundle: Bundle) -> int:
        """Pages the bundle takes in the engine's LoRA cache, on the rank where it takes most."""
        return self.geometry.max_pages_for(bundle.config()[0].tolist())

    @contextmanager
    def in_use(self, digest: str) -> Iterator[None]:
        """Within the block the bundle stays where it is. Counts as a use."""
        if self._space is None:
            yield
            return
        with self._space.in_use(self._became.get(digest, digest)):
            yield

    def remove(self, digest: str) -> bool:
        """Drop a bundle from the directory; False if it is in use or not there."""
        digest = self._became.get(digest, digest)
        gone = self._space is not None and self._space.remove(digest)
        if gone:
            self._verified.discard(digest)
        return gone

    def close(self) -> None:
        """Let another process use the directory."""
        if self._space is not None:
            self._space.close()

    def _path(self, digest: str) -> Path | None:
        return self._space.path(self._became.get(digest, digest)) if self._space is not None else None

    def _open(self, path: Path, digest: str, name: str) -> Bundle:
        try:
            bundle = open_bundle(path)
            problems = fit_problems(bundle, self.geometry.shape)
        except BundleError as error:
            raise AdapterRejected(f"adapter {name!r}: {error}", adapter=name) from None
        if bundle.digest != digest:
            problems.insert(0, f"the registry says digest {digest[:12]}, the bundle is {bundle.digest[:12]}")
        if problems:
            raise AdapterRejected(f"adapter {name!r}: " + "; ".join(problems), adapter=name)
        return bundle

    def _bring(self, digest: str, source: Source, content: Content, work: Path, transfer: Transfer) -> Bundle:
        if content.digest is None:
            return self._convert(digest, source, content, work, transfer)
        if content.digest != digest:
            found = content.digest[:12]
            raise StoreCorrupt(f"{source.url}: the registry says digest {digest[:12]}, the store has {found}")
        into = work / "bundle"
        try:
            into.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(error, into) from None
        source.fetch(content, into, transfer)
        try:
            return open_bundle(into)
        except BundleError as error:
            raise StoreCorrupt(str(error)) from None

    def _convert(self, digest: str, source: Source, content: Content, work: Path, transfer: Transfer) -> Bundle:
        """The adapter's directory has the name it has in the store: a converter takes the adapter's name from it."""
        if self._converter is None:
            raise ConversionFailed(f"{source.url}: a raw adapter, and this manager has no converter")
        raw, out = work / (PurePosixPath(source.prefix).name or "adapter"), work / "converted"
        try:
            raw.mkdir(exist_ok=True)
            out.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(error, work) from None
        found = source.fetch(content, raw, transfer)
        transfer.check()
        bundle = self._converter(raw, out)
        transfer.check()
        if digest not in (found, bundle.digest):
            raise StoreCorrupt(
                f"{source.url}: the registry says digest {digest[:12]}; the adapter there is {found[:12]} and becomes "
                f"{bundle.digest[:12]}"
            )
        return bundle

    @contextmanager
    def _alone(self, digest: str, transfer: Transfer) -> Iterator[None]:
        with self._lock:
            gate = self._gates.get(digest)
            if gate is None:
                gate = self._gates[digest] = threading.Lock()
        while not gate.acquire(timeout=0.05):
            transfer.check()
        try:
            yield
        finally:
            gate.release()

    def _note_source(self, source: str, became: str) -> None:
        """Remember over restarts; if that fails the adapter is converted again."""
        self._became[source] = became
        if self._space is None:
            return
        file = self._space.root / SOURCES / source
        try:
            file.parent.mkdir(exist_ok=True)
            file.with_suffix(".new").write_text(became, encoding="ascii")
            file.with_suffix(".new").replace(file)
        except OSError as error:
            raise disk_error(error, file) from None

    def _read_sources(self) -> None:
        """Notes of bundles that are still there and fit the engine; others are forgotten."""
        folder = self._space.root / SOURCES if self._space is not None else None
        if self._space is None or folder is None or not folder.is_dir():
            return
        for file in folder.iterdir():
            try:
                became = file.read_text(encoding="ascii")
                path = self._space.path(became)
                if path is not None and not fit_problems(open_bundle(path), self.geometry.shape):
                    self._became[file.name] = became
                    continue
                file.unlink()
            except (OSError, ValueError, BundleError):
                continue  # then it is converted again
