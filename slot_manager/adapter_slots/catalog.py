"""Names and task ids -> digests the machine knows; what cannot be served is remembered, and costs nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from adapter_slots.admission import Terms
from adapter_slots.errors import SlotError, UnknownAdapter
from adapter_slots.events import Facts
from adapter_slots.ports import Clock
from adapter_slots.registry import Entry, Registry
from trtllm_lora import task_id_for

REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a change of the registry means for digests that the machine knows."""

    gone: Collection[str]
    """Nothing names them any more."""
    superseded: Collection[str]
    """Only `adapter@version` still leads to them."""
    relabelled: Collection[Entry]
    """Their name or pool is another now."""


class Catalog:
    """The registry as requests see it."""

    def __init__(
        self, registry: Registry, know: Callable[[Entry], Facts | None], *, forget_s: float, clock: Clock
    ) -> None:
        self._registry = registry
        self._know = know
        self._forget_s = forget_s
        self._clock = clock
        self._terms: Terms = registry.terms
        self._told: dict[str, Entry] = {}
        """What the machine was told, by digest."""
        self._stale: set[str] = set()
        """Those of them that have to be looked at again before their next use."""
        self._passed: dict[str, set[tuple[object, ...]]] = {}
        """What of the entries with a digest was looked at: two names of one content may claim different things."""
        self._labels: dict[str, str] = {}
        self._refused: OrderedDict[tuple[str, object], tuple[float, SlotError]] = OrderedDict()
        self._task_ids: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def resolve(self, name: str, key: str | None = None, draw: float | None = None) -> Entry:
        """As Registry.resolve. Raises UnknownAdapter, or what the adapter was refused with a moment ago."""
        self._raise_remembered("name", name)
        try:
            entry = self._registry.resolve(name, key, draw)
        except UnknownAdapter as error:
            self._remember("name", name, error)
            raise
        self._raise_remembered("entry", _claims(entry), entry)
        return entry

    def label(self, entry: Entry) -> str:
        """What the machine calls it: its adapter's name if it is the current version, else `adapter@version`."""
        current = self._registry.entries.get(entry.name)
        return entry.name if current is not None and current.digest == entry.digest else entry.ref

    def name_of_task(self, task_id: int) -> str:
        """Name, or `adapter@version`, of a task id. Raises UnknownAdapter."""
        if not self._names:
            content = self._registry.content
            for entry in [*content.all_entries(), *content.serving.values()]:  # those that serve have the last word
                self._names[self._task_ids.get(entry.digest) or task_id_for(entry.digest)] = self.label(entry)
        name = self._names.get(task_id)
        if name is None:
            raise UnknownAdapter(f"no adapter has task id {task_id}")
        return name

    def learnt(self, digest: str, task_id: int) -> None:
        """A bundle's true task id (a raw adapter's is not made from its digest)."""
        if self._task_ids.get(digest) != task_id:
            self._task_ids[digest] = task_id
            self._names = {}

    def first_use(self, entry: Entry) -> tuple[bool, Facts | None]:
        """Whether the machine must be told of this entry, and with which facts. Raises AdapterRejected."""
        if entry.digest not in self._stale and _source(entry) in self._passed.get(entry.digest, ()):
            return False, None
        try:
            facts = self._know(entry)
        except SlotError as error:
            self._remember("entry", _claims(entry), error)
            raise
        return True, facts

    def told(self, entry: Entry) -> None:
        """The machine knows this entry now."""
        if entry.digest in self._stale:
            self._stale.discard(entry.digest)
            self._passed.pop(entry.digest, None)
        self._passed.setdefault(entry.digest, set()).add(_source(entry))
        self.relabelled(entry)

    def relabelled(self, entry: Entry) -> None:
        """The machine calls it by this entry's name now; nobody has looked at it."""
        self._told[entry.digest] = entry
        self._labels[entry.digest] = self.label(entry)

    def forget(self, digest: str) -> None:
        """The machine was told to let it go."""
        self._told.pop(digest, None)
        self._passed.pop(digest, None)
        self._labels.pop(digest, None)
        self._stale.discard(digest)

    def leads_to(self, digest: str) -> bool:
        """Whether a name without a version leads to this digest."""
        return digest in self._registry.content.serving

    def changed(self) -> Renewal:
        """The registry was read anew: forget refusals, and look again at what it says otherwise now."""
        self._refused.clear()
        self._names = {}
        content = self._registry.content
        serving = content.serving
        named = {entry.digest: entry for entry in content.all_entries()}
        self._task_ids = {digest: task for digest, task in self._task_ids.items() if digest in named}
        relabelled = []
        for digest, before in self._told.items():
            now = serving.get(digest) or named.get(digest)
            if now is None:
                continue
            if self._terms != self._registry.terms or _source(now) != _source(before):
                self._stale.add(digest)
            elif self.label(now) != self._labels[digest] or now.pool != before.pool:
                relabelled.append(now)
        self._terms = self._registry.terms
        gone = [digest for digest in self._told if digest not in named]
        superseded = [digest for digest in self._told if digest in named and digest not in serving]
        return Renewal(gone, superseded, relabelled)

    def _raise_remembered(self, kind: str, key: object, asked: Entry | None = None) -> None:
        remembered = self._refused.get((kind, key))
        if remembered is not None:
            until, error = remembered
            if self._clock() < until:
                raise error if asked is None else error.about(asked.name, asked.version)
            self._refused.pop((kind, key), None)

    def _remember(self, kind: str, key: object, error: SlotError) -> None:
        self._refused[kind, key] = (self._clock() + self._forget_s, error)
        while len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)


def _claims(entry: Entry) -> tuple[object, ...]:
    """A content and what an entry says of it: another name of it may say something else, and be served."""
    return entry.digest, *_source(entry)


def _source(entry: Entry) -> tuple[object, ...]:
    """What of an entry decides whether its bundle is admitted, and where it is."""
    return entry.path, entry.base_model, entry.signature
