"""A folder of adapters as a registry: a folder (or prefix in S3) for each adapter, named as it is, as NIM 1.x has them.

`scan` looks at the source and publishes what it finds in an `adapters.yaml` of its own: a new folder is a new adapter,
other bytes in it are its next version, a folder that is gone takes its adapter along. What cannot be served (not whole
yet, of a form that cannot be read, of too high a rank) is told with the reason, and what its name had before stays.
Bytes are read once, and again only if size, time or ETag are others.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adapter_slots.errors import ChangeRefused
from adapter_slots.registry import FILE_NAME
from adapter_slots.registry_changes import Doc, add_version, remove
from adapter_slots.registry_entries import NAME_RULE, is_name
from adapter_slots.registry_home import home_of
from adapter_slots.registry_writing import change
from lora_slots.adapters_source import examined
from lora_slots.base_model.errors import disk_errors
from lora_slots.base_model.store import cache_folder
from lora_slots.errors import UsageError
from lora_slots.peft_listing import Listing, list_source
from lora_slots.refusals import Refused
from trtllm_lora.files import replace_text

MEMORY = "scan.json"
"""What was found in a folder of a certain stamp, so that its bytes are not read again."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a look at the source changed. Names of adapters."""

    added: Sequence[str] = ()
    renewed: Sequence[str] = ()
    removed: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Folder -> why it is not served, or not in its present state."""
    kept: str | None = None
    """Why nothing was changed at all."""

    def lines(self) -> list[str]:
        """In words, a line for each thing."""
        told = [("new", self.added), ("another version", self.renewed), ("gone", self.removed)]
        lines = [f"{word}: {', '.join(names)}" for word, names in told if names]
        return [*lines, *(f"{name}: {why}" for name, why in self.refused.items()), *([self.kept] if self.kept else [])]


class PeftSource:
    """One source and the registry that is made of it."""

    def __init__(
        self,
        place: str,
        *,
        max_rank: int | None = None,
        endpoint_url: str | None = None,
        cache: Path | None = None,
    ) -> None:
        """`place` is a directory or s3://bucket/prefix; the registry lies in the cache, under the place's hash.

        Args:
            max_rank: adapters of a higher rank are refused.
            endpoint_url: of S3 that is not AWS.
        """
        self.place = place.rstrip("/") if "://" in place else str(Path(place).expanduser().absolute())
        key = hashlib.sha256(self.place.encode()).hexdigest()[:16]
        self.home = cache_folder(cache) / "peft" / key
        self._max_rank = max_rank
        self._endpoint_url = endpoint_url
        self._served = 0
        self._told: Mapping[str, str] = {}

    @property
    def registry(self) -> Path:
        """The `adapters.yaml`."""
        return self.home / FILE_NAME

    @property
    def disk(self) -> Path:
        """Where a slot manager may keep what it fetches and converts, if it has no place of its own."""
        return self.home / "disk"

    def scan(self) -> Scan:
        """Look at the source and publish.

        Raises:
            UsageError: the source cannot be read. RegistryError, BaseModelError: the registry or the cache.
        """
        listed = list_source(self.place, self._endpoint_url)
        if not listed and self._served:
            return Scan(kept=f"{self.place} is empty all of a sudden: what was served stays until it is not")
        with disk_errors(self.home):
            self.home.mkdir(parents=True, exist_ok=True)
            memory = _read_memory(self.home / MEMORY)
            seen = {name: self._look(listing, memory.get(name)) for name, listing in sorted(listed.items())}
            replace_text(self.home / MEMORY, json.dumps(seen))
        refused = {name: why for name, found in seen.items() if (why := self._refusal(found))}
        scan = self._publish({name: found for name, found in seen.items() if name not in refused}, set(listed))
        refused |= scan.refused
        self._served = len(seen) - len(refused)
        news = {name: why for name, why in refused.items() if self._told.get(name) != why}
        self._told = refused
        return Scan(scan.added, scan.renewed, scan.removed, news)

    def follow(self, every_s: float, stop: threading.Event, told: Callable[[Sequence[str]], object]) -> None:
        """Scan so often until `stop` is set, and tell what changed; a source that cannot be read is told once."""
        problem = ""
        while not stop.wait(every_s):
            try:
                lines, failed = self.scan().lines(), ""
            except Exception as error:  # noqa: BLE001 - whatever it is, the next look may find it gone
                failed = f"{self.place} cannot be read, what was served stays: {error}"
                lines = [failed] if failed != problem else []
            problem = failed
            if lines:
                told(lines)

    def _look(self, listing: Listing, known: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a folder has: digest, path and facts, or why it is refused."""
        if known is not None and known.get("stamp") == listing.stamp:
            return dict(known)
        return {"stamp": listing.stamp, **self._examine(listing)}

    def _refusal(self, found: Mapping[str, Any]) -> str | None:
        rank = found.get("facts", {}).get("rank")
        if self._max_rank is not None and rank is not None and rank > self._max_rank:
            return f"rank {rank} is above the {self._max_rank} that are allowed"
        return found.get("refused")

    def _examine(self, listing: Listing) -> dict[str, Any]:
        if not is_name(listing.name):
            return {"refused": f"no adapter name: {NAME_RULE}"}
        if listing.problem:
            return {"refused": listing.problem}
        try:
            with examined(listing.place, self._endpoint_url) as found:
                path = str(found.folder) if found.folder is not None and "://" not in listing.place else listing.place
                return {"digest": found.digest, "path": path, "facts": dict(found.facts)}
        except (Refused, UsageError) as error:
            return {"refused": " ".join(str(error).split())}

    def _publish(self, good: Mapping[str, Mapping[str, Any]], listed: set[str]) -> Scan:
        added: list[str] = []
        renewed: list[str] = []
        removed: list[str] = []
        refused: dict[str, str] = {}

        def edit(doc: Doc) -> Doc:
            for kept in (added, renewed, removed):
                kept.clear()
            for name in [name for name in doc["adapters"] if name not in listed]:
                try:
                    doc = remove(doc, name)
                    removed.append(name)
                except ChangeRefused as error:
                    refused[name] = str(error)
            for name, found in good.items():
                before = doc["adapters"].get(name)
                if before and (before["versions"][-1]["digest"], before["versions"][-1]["path"]) == _content(found):
                    continue
                try:
                    doc, _ = add_version(doc, name, _version(found))
                    for version in before["versions"] if before else ():  # its bytes are there no more
                        doc = remove(doc, name, version["version"])
                    (renewed if before else added).append(name)
                except ChangeRefused as error:
                    refused[name] = str(error)
            return doc

        change(home_of(self.registry), f"scan {self.place}", edit)
        return Scan(added, renewed, removed, refused)


def _content(found: Mapping[str, Any]) -> tuple[str, str]:
    return found["digest"], found["path"]


def _version(found: Mapping[str, Any]) -> dict[str, Any]:
    created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"digest": found["digest"], "path": found["path"], "created": created, **found["facts"]}


def _read_memory(file: Path) -> dict[str, dict[str, Any]]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): dict(found) for name, found in read.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # the first look, or a file that was cut: everything is read
