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

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_slots.admission import Terms, same_base
from adapter_slots.errors import RegistryError
from adapter_slots.pools import Pools
from adapter_slots.registry_entries import BASE_NAME, NAME_RULE, Alias, Content, Entry, is_name
from adapter_slots.registry_home import Home, Stamp, home_of
from adapter_slots.registry_rules import content_of, problems_of
from adapter_slots.registry_text import Document, Problem, TextError
from adapter_slots.registry_writing import FILE_NAME, publish, publish_at
from trtllm_lora.errors import SignatureError
from trtllm_lora.signing import PublicKey, read_public_key

__all__ = ["BASE_NAME", "FILE_NAME", "NAME_RULE", "Alias", "Entry", "Registry", "is_name", "publish", "publish_at"]


@dataclass(frozen=True, slots=True)
class _Good:
    """What one good text says."""

    content: Content
    terms: Terms


class Registry:
    """The adapters that exist, by name. Reads only what changed. Safe to use from many threads.

    Raises:
        RegistryError: at construction, if there is no good registry yet.
    """

    def __init__(
        self,
        place: Path | str,
        *,
        base_model: str | None = None,
        endpoint_url: str | None = None,
        refresh_s: float = 0.0,
    ) -> None:
        """Read the registry at `place`, a file or `s3://bucket/key`.

        Args:
            base_model: `name@revision` of what this server serves, if it knows.
            endpoint_url: of S3 that is not AWS.
            refresh_s: look for changes at most so often; 0: what suits the place.
        """
        self.home: Home = home_of(place, endpoint_url=endpoint_url)
        self.problem: str | None = None
        """Why the registry as it is now is not in use; None when it is."""
        self._base_model = base_model
        self._refresh_s = refresh_s
        self._stamp: Stamp | None = None
        self._broken: str | None = None
        """Why the text with that stamp is not in use."""
        self._good = _Good(Content(), Terms())
        self._digests: dict[tuple[str, int], str] = {}
        """Of every version that was ever read here, also of those that went away meanwhile."""
        self._reading = threading.Lock()
        self.refresh()
        if self.problem:
            raise RegistryError(self.problem)

    @property
    def interval_s(self) -> float:
        """How often to look for changes, at most; 0: whenever it suits."""
        return self._refresh_s or self.home.interval_s

    @property
    def content(self) -> Content:
        """All of the last good text."""
        return self._good.content

    @property
    def terms(self) -> Terms:
        """What is asked of every adapter."""
        return self._good.terms

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Adapter -> its current version."""
        return self._good.content.entries

    @property
    def aliases(self) -> Mapping[str, Alias]:
        """Name -> alias."""
        return self._good.content.aliases

    @property
    def pools(self) -> Pools:
        """The pools (a change of them takes effect at the next start)."""
        return self._good.content.pools

    def refresh(self) -> bool:
        """Re-read if it changed; True if the adapters may have changed. Never raises: see `problem`. Blocks on I/O."""
        with self._reading:
            try:
                reading = self.home.read(self._stamp)
            except RegistryError as error:
                self.problem = str(error)
                return False
            if reading is None:
                self.problem = self._broken
                return False
            self._stamp = reading.stamp
            try:
                good = self._parsed(reading.text)
            except RegistryError as error:
                self.problem = self._broken = str(error)
                return False
            self._good, self.problem, self._broken = good, None, None
            self._digests.update({(e.name, e.version): e.digest for e in good.content.all_entries()})
            return True

    def resolve(self, name: str, key: str | None = None, draw: float | None = None) -> Entry:
        """The entry of an adapter, an `adapter@version` or an alias.

        Args:
            key: of an alias' request, a session or user: the same key has the same target while the weights stay.
            draw: uniform in [0, 1), for a request of an alias without a key. Without either, the heaviest target.

        Raises:
            UnknownAdapter: with names that are close.
        """
        return self._good.content.resolve(name, key, draw)

    def _parsed(self, text: str) -> _Good:
        try:
            document = Document(text)
        except TextError as error:
            raise RegistryError(f"{self.home.name}: {error}") from None
        problems = list(problems_of(document.data))
        keys: dict[str, PublicKey] = {}
        if not problems:
            keys, problems = _keys(document.data.get("trusted_keys", ()), self.home.folder)
        if problems or document.has_duplicates:
            raise RegistryError(f"{self.home.name}: {document.tell(problems)}")
        content = content_of(document.data, self.home.located)
        problems = [*_changed_in_place(self._digests, content), *self._another_base(content)]
        if problems:
            raise RegistryError(f"{self.home.name}: {document.tell(problems)}")
        return _Good(content, Terms(self._base_model or content.base_model, content.require_signatures, keys))

    def _another_base(self, content: Content) -> list[Problem]:
        if not self._base_model or not content.base_model or same_base(self._base_model, content.base_model):
            return []
        return [Problem(("base_model",), f"it is for {content.base_model}, this server has {self._base_model}")]


def terms_of(content: Content, folder: Path | None) -> Terms:
    """What a registry asks of every adapter; `folder` is where paths of keys start. Raises RegistryError."""
    keys, problems = _keys(content.trusted_keys, folder)
    if problems:
        raise RegistryError("; ".join(problem.what for problem in problems))
    return Terms(content.base_model, content.require_signatures, keys)


def _keys(texts: tuple[str, ...], folder: Path | None) -> tuple[dict[str, PublicKey], list[Problem]]:
    keys, problems = {}, []
    for i, text in enumerate(texts):
        try:
            key = read_public_key(text, folder)
            keys[key.id] = key
        except SignatureError as error:
            problems.append(Problem(("trusted_keys", i), str(error)))
    return keys, problems


def _changed_in_place(known: Mapping[tuple[str, int], str], content: Content) -> list[Problem]:
    """Versions that have another digest than before: a name with a version means one content for ever."""
    return [
        Problem(
            ("adapters", entry.name),
            f"version {entry.version} had digest {before[:12]} and has {entry.digest[:12]} now: "
            "a version is never changed in place; add a new one",
        )
        for entry in content.all_entries()
        if (before := known.get((entry.name, entry.version), entry.digest)) != entry.digest
    ]
