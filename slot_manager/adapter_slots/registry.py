"""Names -> adapters: `adapters.yaml`, re-read when it changes; the last good one stays when it breaks.

schema: 1
pools:                             # optional: slots reserved for groups, and caps
  gold: {reserved: 2, cap: 4}
adapters:
  pirate:
    pool: gold                     # optional
    versions:                      # the last one is current; a version is never changed in place
      - version: 1
        digest: 5f0c…              # the bundle's digest; of a raw PEFT adapter its source digest
        path: bundles/5f0c…        # a directory relative to this file, or s3://bucket/prefix

Aliases, canaries, tenants, signatures and everything else that may stand there: docs/registry.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapter_slots.errors import RegistryError
from adapter_slots.pools import Pools
from adapter_slots.registry_entries import BASE_NAME, NAME_RULE, Alias, Content, Entry, is_name
from adapter_slots.registry_rules import SCHEMA, content_of, problems_of
from adapter_slots.registry_text import Document, TextError, dump
from trtllm_lora import Bundle

__all__ = ["BASE_NAME", "FILE_NAME", "NAME_RULE", "Alias", "Entry", "Registry", "is_name", "publish", "publish_at"]
FILE_NAME = "adapters.yaml"


class Registry:
    """The adapters that exist, by name. Reads only when the file's size or time changed.

    Raises:
        RegistryError: at construction, if there is no good file yet.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.problem: str | None = None
        """Why the file as it is now is not in use; None when it is."""
        self._stamp: tuple[int, int, int] | None = None
        self.content = Content()
        """The last good file."""
        self.refresh()
        if self.problem:
            raise RegistryError(self.problem)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Adapter -> its current version."""
        return self.content.entries

    @property
    def aliases(self) -> Mapping[str, Alias]:
        """Name -> alias."""
        return self.content.aliases

    @property
    def pools(self) -> Pools:
        """The pools (a change of them takes effect at the next start)."""
        return self.content.pools

    def refresh(self) -> bool:
        """Re-read the file if it changed; True if the adapters may have changed. Never raises: see `problem`."""
        try:
            stat = self.file.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            content = _parse(self.file)
        except (OSError, RegistryError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self.problem = f"{self.file}: {reason}" if reason else str(error)
            return False
        self.content, self.problem = content, None
        return True

    def resolve(self, name: str, key: str | None = None, draw: float | None = None) -> Entry:
        """The entry of an adapter, an `adapter@version` or an alias.

        Args:
            key: of an alias' request, a session or user: the same key has the same target while the weights stay.
            draw: uniform in [0, 1), for a request of an alias without a key. Without either, the heaviest target.

        Raises:
            UnknownAdapter: with names that are close.
        """
        return self.content.resolve(name, key, draw)


def publish(file: Path, bundle: Bundle, name: str | None = None) -> Entry:
    """Make a bundle the current version of its adapter: one atomic write of `adapters.yaml`.

    Publishing the digest that is current already changes nothing.

    Raises:
        RegistryError: the file is broken or cannot be written.
    """
    return publish_at(file, name or bundle.adapter, bundle.digest, os.path.relpath(bundle.path, file.parent))


def publish_at(file: Path, name: str, digest: str, path: str) -> Entry:
    """Make what lies at `path` (a URL, or relative to the file) the current version. Raises RegistryError."""
    if not is_name(name):
        raise RegistryError(f"{name[:60]!r} is no adapter name: {NAME_RULE}")
    document: dict[str, Any] = _load(file) if file.exists() else {"schema": SCHEMA, "adapters": {}}
    versions = document["adapters"].setdefault(name, {}).setdefault("versions", [])
    if not versions or (versions[-1]["digest"], versions[-1]["path"]) != (digest, path):
        number = max((entry["version"] for entry in versions), default=0) + 1
        versions.append({"version": number, "digest": digest, "path": path})
        _write(file, document)
    return Entry(name, versions[-1]["version"], digest, _located(file, path), document["adapters"][name].get("pool"))


def _located(file: Path, path: str) -> str:
    return path if "://" in path else str(file.parent / path)


def _write(file: Path, document: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".adapters-", delete=False) as out:
            out.write(dump(document))
            out.flush()
            os.fsync(out.fileno())
        Path(out.name).chmod(0o644)
        Path(out.name).replace(file)
    except OSError as error:
        raise RegistryError(f"{file}: cannot be written: {error.strerror}") from None


def _load(file: Path) -> dict[str, Any]:
    try:
        document = Document(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RegistryError(f"{file}: {error.strerror}") from None
    except (TextError, UnicodeDecodeError) as error:
        raise RegistryError(f"{file}: {error}") from None
    problems = [*document.duplicates(), *problems_of(document.data)]
    if problems:
        raise RegistryError(f"{file}: {document.tell(problems)}")
    return dict(document.data)


def _parse(file: Path) -> Content:
    return content_of(_load(file), lambda path: _located(file, path))
