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
"""

from __future__ import annotations

import bisect
import difflib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adapter_slots.errors import RegistryError, UnknownAdapter
from adapter_slots.pools import Pool, Pools
from trtllm_lora import Bundle

SCHEMA = 1
FILE_NAME = "adapters.yaml"
BASE_NAME = "base"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where it is there: ten times as fast, and a registry of thousands is read while requests wait."""
_COMPARED = 200
"""Names compared with an unknown one: a comparison takes some 0.1 ms, and other requests wait meanwhile."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
NAME_RULE = "a letter or digit, then up to 127 letters, digits or any of . _ : @ / -, no '..', and not 'base'"


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter of the registry in its current version."""

    name: str
    version: int
    digest: str
    path: str
    """A directory, or a URL."""
    pool: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it has to be brought to this machine first."""
        return "://" in self.path


@dataclass(frozen=True, slots=True)
class _Content:
    entries: Mapping[str, Entry]
    pools: Pools


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
        self._content = _Content({}, Pools())
        self.refresh()
        if self.problem:
            raise RegistryError(self.problem)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Name -> entry of the last good file."""
        return self._content.entries

    @property
    def pools(self) -> Pools:
        """The pools of the last good file (a change of them takes effect at the next start)."""
        return self._content.pools

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
        self._content, self.problem = content, None
        return True

    def resolve(self, name: str) -> Entry:
        """The entry of a name.

        Raises:
            UnknownAdapter: with names that are close.
        """
        entry = self.entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(name[:128], self._neighbours(name), n=3, cutoff=0.5)
            few = ", ".join(sorted(self.entries)) if len(self.entries) <= 8 else f"{len(self.entries)} are known"
            hint = f"near names: {', '.join(near)}" if near else f"there are: {few or 'none'}"
            raise UnknownAdapter(f"no adapter {name[:80]!r}; {hint}", adapter=name[:80])
        return entry

    def _neighbours(self, name: str) -> list[str]:
        """Names worth a comparison: all of a small registry, else those beside `name` in the alphabet."""
        names = sorted(self.entries)
        at = bisect.bisect(names, name)
        return names if len(names) <= _COMPARED else names[max(0, at - _COMPARED // 2) : at + _COMPARED // 2]


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
            yaml.safe_dump(document, out, sort_keys=True)
            out.flush()
            os.fsync(out.fileno())
        Path(out.name).chmod(0o644)
        Path(out.name).replace(file)
    except OSError as error:
        raise RegistryError(f"{file}: cannot be written: {error.strerror}") from None


def _load(file: Path) -> dict[str, Any]:
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)  # noqa: S506 - a safe one
    except OSError as error:
        raise RegistryError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # dates and tags raise what Python does
        raise RegistryError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    problems = list(_problems(document))
    if problems:
        raise RegistryError(f"{file}: " + "; ".join(problems))
    return dict(document)


def _parse(file: Path) -> _Content:
    document = _load(file)
    entries = {}
    for name, adapter in document["adapters"].items():
        last = adapter["versions"][-1]
        entries[name] = Entry(name, last["version"], last["digest"], _located(file, last["path"]), adapter.get("pool"))
    pools = {name: Pool(**rights) for name, rights in document.get("pools", {}).items()}
    return _Content(entries, Pools(pools))


def _problems(document: Any) -> Iterator[str]:
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        yield f"'schema: {SCHEMA}' expected at the top"
        return
    unknown = set(document) - {"schema", "adapters", "pools"}
    if unknown:
        yield f"unknown keys {', '.join(sorted(map(str, unknown)))}"
    pools = document.get("pools", {})
    if not isinstance(pools, dict):
        yield "'pools' must be a mapping of names"
        pools = {}
    for name, rights in pools.items():
        if (
            not isinstance(rights, dict)
            or set(rights) - {"reserved", "cap"}
            or not all(_is_count(v) for v in rights.values())
        ):
            yield f"pool {name}: 'reserved' and 'cap' are whole numbers, and there is nothing else"
    adapters = document.get("adapters")
    if not isinstance(adapters, dict):
        yield "'adapters' must be a mapping of names"
        return
    for name, adapter in adapters.items():
        if not is_name(name):
            yield f"{str(name)[:60]!r} is no adapter name: {NAME_RULE}"
        yield from _adapter_problems(str(name), adapter, pools)


def _adapter_problems(name: str, adapter: Any, pools: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(adapter, dict) or set(adapter) - {"versions", "pool"}:
        yield f"{name}: 'versions' and perhaps 'pool' expected, nothing else"
        return
    if adapter.get("pool") is not None and adapter["pool"] not in list(pools):  # YAML has values that cannot be hashed
        yield f"{name}: there is no pool {adapter['pool']!r}"
    versions = adapter.get("versions")
    if not isinstance(versions, list) or not versions:
        yield f"{name}: 'versions' must be a list of at least one"
        return
    wanted = {"version": int, "digest": str, "path": str}
    for i, version in enumerate(versions):
        if not isinstance(version, dict) or set(version) != set(wanted):
            yield f"{name}: versions[{i}] must have exactly {', '.join(wanted)}"
        elif not all(isinstance(version[key], kind) for key, kind in wanted.items()):
            yield f"{name}: versions[{i}]: version is a number, digest and path are text"


def is_name(name: object) -> bool:
    """Whether an adapter may be called so (NAME_RULE)."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and ".." not in name and name != BASE_NAME


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
