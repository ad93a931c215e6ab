"""Names -> bundles: `adapters.yaml`, re-read when it changes; the last good one stays when it breaks.

schema: 1
adapters:
  pirate:
    versions:                    # the last one is current; a version is never changed in place
      - version: 1
        digest: 5f0c…            # the bundle's digest
        path: bundles/5f0c…      # bundle directory, relative to this file
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adapter_slots.errors import RegistryError, UnknownAdapter
from trtllm_lora import Bundle

SCHEMA = 1
FILE_NAME = "adapters.yaml"


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter of the registry in its current version."""

    name: str
    version: int
    digest: str
    path: Path


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
        self._entries: Mapping[str, Entry] = {}
        self.refresh()
        if self.problem:
            raise RegistryError(self.problem)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Name -> entry of the last good file."""
        return self._entries

    def refresh(self) -> bool:
        """Re-read the file if it changed; True if the adapters may have changed. Never raises: see `problem`."""
        try:
            stat = self.file.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            entries = _parse(self.file)
        except (OSError, RegistryError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            self.problem = f"{self.file}: {reason}" if reason else str(error)
            return False
        self._entries, self.problem = entries, None
        return True

    def resolve(self, name: str) -> Entry:
        """The entry of a name.

        Raises:
            UnknownAdapter: with names that are close.
        """
        entry = self._entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.5)
            hint = f"near names: {', '.join(near)}" if near else f"{len(self._entries)} adapters are known"
            raise UnknownAdapter(f"no adapter {name[:80]!r}; {hint}", adapter=name[:80])
        return entry


def publish(file: Path, bundle: Bundle, name: str | None = None) -> Entry:
    """Make a bundle the current version of its adapter: one atomic write of `adapters.yaml`.

    Publishing the digest that is current already changes nothing.

    Raises:
        RegistryError: the file is broken or cannot be written.
    """
    name = name or bundle.adapter
    document: dict[str, Any] = _load(file) if file.exists() else {"schema": SCHEMA, "adapters": {}}
    versions = document["adapters"].setdefault(name, {}).setdefault("versions", [])
    if not versions or versions[-1]["digest"] != bundle.digest:
        path = os.path.relpath(bundle.path, file.parent)
        number = max((entry["version"] for entry in versions), default=0) + 1
        versions.append({"version": number, "digest": bundle.digest, "path": path})
        _write(file, document)
    return Entry(name, versions[-1]["version"], bundle.digest, bundle.path)


def _write(file: Path, document: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".adapters-", delete=False) as out:
            yaml.safe_dump(document, out, sort_keys=True)
            out.flush()
            os.fsync(out.fileno())
        Path(out.name).chmod(0o644)
        Path(out.name).replace(file)
    except OSError as error:
        raise RegistryError(f"{file}: cannot be written: {error.strerror}") from None


def _load(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RegistryError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    problems = list(_problems(document))
    if problems:
        raise RegistryError(f"{file}: " + "; ".join(problems))
    return dict(document)


def _parse(file: Path) -> Mapping[str, Entry]:
    entries = {}
    for name, adapter in _load(file)["adapters"].items():
        last = adapter["versions"][-1]
        entries[name] = Entry(name, last["version"], last["digest"], file.parent / last["path"])
    return entries


def _problems(document: Any) -> Iterator[str]:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        yield f"'schema: {SCHEMA}' expected at the top"
        return
    unknown = set(document) - {"schema", "adapters"}
    if unknown:
        yield f"unknown keys {', '.join(sorted(map(str, unknown)))}"
    adapters = document.get("adapters")
    if not isinstance(adapters, dict):
        yield "'adapters' must be a mapping of names"
        return
    for name, adapter in adapters.items():
        versions = adapter.get("versions") if isinstance(adapter, dict) else None
        if not isinstance(name, str) or not name.strip():
            yield f"adapter name {name!r} is not text"
        if not isinstance(versions, list) or not versions:
            yield f"{name}: 'versions' must be a list of at least one"
            continue
        for i, version in enumerate(versions):
            wanted = {"version": int, "digest": str, "path": str}
            if not isinstance(version, dict) or set(version) != set(wanted):
                yield f"{name}: versions[{i}] must have exactly {', '.join(wanted)}"
            elif not all(isinstance(version[key], kind) for key, kind in wanted.items()):
                yield f"{name}: versions[{i}]: version is a number, digest and path are text"
