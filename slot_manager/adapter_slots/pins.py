"""Who wants which adapter pinned: operators by their commands, the registry by `pinned: true`. Pure.

A pin is on a name: when another version becomes current, the pin goes with the name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adapter_slots.errors import BadRequest, SlotError
from adapter_slots.registry_entries import Entry


@dataclass(frozen=True, slots=True)
class Repinning:
    """What has to be posted so that the right digests are pinned; `refused` says why a name cannot be."""

    pin: Mapping[str, str]
    """Digest -> name."""
    unpin: frozenset[str]
    refused: Mapping[str, str]


class Pins:
    """Names wanted pinned, and the digests that are. Not thread-safe: call under one lock."""

    def __init__(self) -> None:
        self.operator: dict[str, str] = {}
        """Name -> digest of what operators pinned, oldest first: the names are kept over restarts."""
        self.refused: Mapping[str, str] = {}
        """Names that should be pinned and are not: why."""
        self._held: set[str] = set()

    def asked(self, name: str, digest: str) -> None:
        """An operator's pin was granted."""
        self.operator[name] = digest
        self._held.add(digest)

    def check_unpin(self, digest: str, entries: Mapping[str, Entry]) -> None:
        """Raises BadRequest if the registry holds it: an operator's unpin would not last."""
        holder = next((entry.name for entry in entries.values() if entry.pinned and entry.digest == digest), None)
        if holder is not None:
            raise BadRequest(f"{holder} is pinned by the registry: `lora-slots adapters pin --off {holder}` ends that")

    def unasked(self, digest: str) -> None:
        """An operator's pin is over, whatever name it was on."""
        self.operator = {name: pinned for name, pinned in self.operator.items() if pinned != digest}
        self._held.discard(digest)

    def repinning(self, entries: Mapping[str, Entry], known: Callable[[str], str]) -> Repinning:
        """What to do now.

        Args:
            entries: adapter -> current version.
            known: digest of a name, made known to the machine. Raises SlotError.
        """
        wanted: dict[str, str] = {}
        refused: dict[str, str] = {}
        held = set(self._held)  # before the names are read: `asked` adds the name first
        for name in dict.fromkeys([*(entry.name for entry in entries.values() if entry.pinned), *self.operator]):
            try:
                digest = known(name)
            except SlotError as error:
                refused[name] = str(error)
                continue
            wanted.setdefault(digest, name)
            if name in self.operator:
                self.operator[name] = digest
        pin = {digest: name for digest, name in wanted.items() if digest not in held}
        return Repinning(pin, frozenset(held - set(wanted)), refused)

    def held(self, digest: str) -> None:
        """A pin was posted and taken."""
        self._held.add(digest)

    def let_go(self, digest: str) -> None:
        """An unpin was posted, or the machine was told to forget the digest."""
        self._held.discard(digest)
