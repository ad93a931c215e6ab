"""What a registry says: entries, aliases, and which entry a name means. Pure: no file, no clock, no random source.

A name means, in this order: an adapter or an alias of exactly that name; `adapter@N`, its version N. An alias shares
its requests out over its targets by weight. With a key (a session, a user) the choice is sticky: each target draws a
score from hash(alias, target, key) and its weight, and the best score wins (weighted rendezvous hashing). So a key
moves from one target to another only if that other one's weight grew relative to the first's: 5 % -> 20 % moves 15 %
of the keys, all of them to the canary. The adapter is chosen first, by the sum of its targets' weights, then its
version: a canary of one adapter moves no key of another.
"""

from __future__ import annotations

import bisect
import difflib
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from adapter_slots.errors import UnknownAdapter
from adapter_slots.pools import Pools

BASE_NAME = "base"
NAME_RULE = "a letter or digit, then up to 127 letters, digits or any of . _ : @ / -, no '..', and not 'base'"
COLD_POLICIES = ("wait", "fail", "base")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
_VERSIONED = re.compile(r"(.+)@(0|[1-9][0-9]{0,17})")
_COMPARED = 200
"""Names compared with an unknown one: a comparison takes some 0.1 ms, and other requests wait meanwhile."""


def is_name(name: object) -> bool:
    """Whether an adapter or an alias may be called so (NAME_RULE)."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and ".." not in name and name != BASE_NAME


def split_version(name: str) -> tuple[str, int] | None:
    """`adapter@3` -> ("adapter", 3); None if the text does not end so."""
    found = _VERSIONED.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def adapter_of(target: str) -> str:
    """The adapter of an alias' target: `adapter@3` -> "adapter"."""
    parts = split_version(target)
    return parts[0] if parts else target


@dataclass(frozen=True, slots=True)
class Entry:
    """One version of one adapter, with the rules of its adapter."""

    name: str
    version: int
    digest: str
    path: str
    """A directory, or a URL."""
    pool: str | None = None
    pinned: bool = False
    """The registry wants it in a slot (its adapter's current version)."""
    cold: str | None = None
    """What a request that says nothing does when it is cold: wait, fail or base; None: the server's default."""
    tenants: frozenset[str] | None = None
    """Who may use it; None: everybody."""
    base_model: str | None = None
    """`name@revision` of the base it was trained on, where known."""
    rank: int | None = None
    target_modules: tuple[str, ...] = ()
    created: str | None = None
    """ISO 8601."""
    signature: str | None = None
    """As `trtllm_lora.signing` writes it, over the digest."""

    @property
    def is_remote(self) -> bool:
        """Whether it has to be brought to this machine first."""
        return "://" in self.path

    @property
    def ref(self) -> str:
        """`name@version`: this very content, for ever."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that shares its requests out."""

    name: str
    targets: Mapping[str, float]
    """Adapter or `adapter@N` -> percent; they sum to 100."""
    _adapters: Mapping[str, Mapping[str, float]] = field(init=False, repr=False, compare=False)
    """Adapter -> those of the targets that are its versions."""

    def __post_init__(self) -> None:
        groups: dict[str, dict[str, float]] = {}
        for target, weight in self.targets.items():
            groups.setdefault(adapter_of(target), {})[target] = weight
        object.__setattr__(self, "_adapters", groups)

    def choose(self, key: str | None = None, draw: float | None = None) -> str:
        """The target of a key; without one that of a uniform draw in [0, 1); without either the heaviest.

        The same key has the same target as long as the weights are the same.
        """
        if key is not None:
            adapter = self._first({name: math.fsum(group.values()) for name, group in self._adapters.items()}, key)
            return self._first(self._adapters[adapter], f"{adapter}\0{key}")  # a draw of its own, not the adapter's
        heaviest = min(self.targets, key=lambda target: (-self.targets[target], target))
        left = draw * math.fsum(self.targets.values()) if draw is not None else math.inf
        for target in sorted(self.targets):
            left -= self.targets[target]
            if left < 0:
                return target
        return heaviest  # no draw, or one that rounding brought to the end

    def _first(self, weights: Mapping[str, float], key: str) -> str:
        """Whose first event comes first, were each weight a rate: the chance to be it is the weight's share."""
        if len(weights) == 1:
            return next(iter(weights))
        return min(weights, key=lambda name: (self._score(name, weights[name], key), name))

    def _score(self, name: str, weight: float, key: str) -> float:
        if weight <= 0:
            return math.inf
        text = "\0".join((self.name, name, key)).encode("utf-8", "surrogatepass")
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11
        return -math.log((number + 0.5) / 2**53) / weight


@dataclass(frozen=True)
class Content:
    """A whole registry, checked."""

    versions: Mapping[str, Mapping[int, Entry]] = field(default_factory=dict)
    """Adapter -> version number -> entry."""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    """Adapter -> its current version."""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    pools: Pools = field(default_factory=Pools)
    base_model: str | None = None
    """`name@revision` of the base that is served; None: not said."""
    require_signatures: bool = False
    trusted_keys: tuple[str, ...] = ()
    """Public keys as `trtllm_lora.signing.read_public_key` takes them."""

    def resolve(self, name: str, key: str | None = None, draw: float | None = None) -> Entry:
        """The entry a name means; `key` and `draw` choose among an alias' targets (see Alias.choose).

        Raises:
            UnknownAdapter: with names that are close, or the versions there are.
        """
        alias = self.aliases.get(name)
        entry = self.entry_of(alias.choose(key, draw) if alias is not None else name)
        if entry is None:
            raise UnknownAdapter(self._unknown(name), adapter=name[:80])
        return entry

    @cached_property
    def serving(self) -> Mapping[str, Entry]:
        """Digest -> entry of everything that a name without a version leads to: current ones and aliases' targets."""
        found = {entry.digest: entry for entry in self.entries.values()}
        for alias in self.aliases.values():
            for target in alias.targets:
                entry = self.entry_of(target)
                if entry is not None:
                    found.setdefault(entry.digest, entry)
        return found

    def all_entries(self) -> Sequence[Entry]:
        """Every version of every adapter."""
        return [entry for versions in self.versions.values() for entry in versions.values()]

    @cached_property
    def names(self) -> Sequence[str]:
        """Adapters and aliases, sorted."""
        return sorted((*self.entries, *self.aliases))

    def entry_of(self, name: str) -> Entry | None:
        """The entry of an adapter or an `adapter@version`; None if there is none: no near names are sought."""
        entry = self.entries.get(name)
        if entry is None and (parts := split_version(name)):
            entry = self.versions.get(parts[0], {}).get(parts[1])
        return entry

    def _unknown(self, name: str) -> str:
        parts = split_version(name)
        if parts and parts[0] in self.versions:
            there = ", ".join(map(str, sorted(self.versions[parts[0]])[-8:]))
            return f"adapter {parts[0]!r} has no version {parts[1]}; there are {there}"
        near = difflib.get_close_matches(name[:128], self._neighbours(name), n=3)
        few = ", ".join(self.names) if len(self.names) <= 8 else f"{len(self.names)} are known"
        hint = f"near names: {', '.join(near)}" if near else f"there are: {few or 'none'}"
        return f"no adapter {name[:80]!r}; {hint}"

    def _neighbours(self, name: str) -> Sequence[str]:
        """Names worth a comparison: all of a small registry, else those beside `name` in the alphabet."""
        names = self.names
        at = bisect.bisect(names, name)
        return names if len(names) <= _COMPARED else names[max(0, at - _COMPARED // 2) : at + _COMPARED // 2]
