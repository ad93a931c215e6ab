"""Names and task ids -> digests the machine knows; what cannot be served is remembered, and costs nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from adapter_slots.errors import SlotError, UnknownAdapter
from adapter_slots.events import Facts
from adapter_slots.ports import Clock
from adapter_slots.registry import Entry, Registry
from trtllm_lora import task_id_for

REMEMBERED = 4096


class Catalog:
    """The registry as requests see it."""

    def __init__(
        self, registry: Registry, know: Callable[[Entry], Facts | None], *, forget_s: float, clock: Clock
    ) -> None:
        self._registry = registry
        self._know = know
        self._forget_s = forget_s
        self._clock = clock
        self._added: set[str] = set()
        self._refused: OrderedDict[str, tuple[float, SlotError]] = OrderedDict()
        self._names: dict[int, str] = {}

    def resolve(self, name: str) -> Entry:
        """The entry of a name. Raises UnknownAdapter, or what the adapter was refused with a moment ago."""
        remembered = self._refused.get(name)
        if remembered is not None:
            until, error = remembered
            if self._clock() < until:
                raise error
            self._refused.pop(name, None)
        try:
            return self._registry.resolve(name)
        except UnknownAdapter as error:
            self._remember(name, error)
            raise

    def name_of_task(self, task_id: int) -> str:
        """Adapter name of a task id. Raises UnknownAdapter."""
        if not self._names:
            self._names = {task_id_for(entry.digest): entry.name for entry in self._registry.entries.values()}
        name = self._names.get(task_id)
        if name is None:
            raise UnknownAdapter(f"no adapter has task id {task_id}")
        return name

    def learnt(self, digest: str, task_id: int) -> None:
        """A bundle's true task id (a raw adapter's is not made from its digest)."""
        if self._names:
            names = {entry.digest: entry.name for entry in self._registry.entries.values()}
            if digest in names:
                self._names[task_id] = names[digest]

    def first_use(self, entry: Entry) -> tuple[bool, Facts | None]:
        """Whether the machine must be told of this entry, and with which facts. Raises AdapterRejected."""
        if entry.digest in self._added:
            return False, None
        try:
            return True, self._know(entry)
        except SlotError as error:
            self._remember(entry.name, error)
            raise

    def told(self, digest: str) -> None:
        """The machine knows this digest now."""
        self._added.add(digest)

    def changed(self) -> set[str]:
        """The registry was read anew: forget refusals; returns the digests nothing names any more."""
        self._refused.clear()
        self._names.clear()
        gone = self._added - {entry.digest for entry in self._registry.entries.values()}
        self._added -= gone
        return gone

    def _remember(self, name: str, error: SlotError) -> None:
        self._refused[name] = (self._clock() + self._forget_s, error)
        while len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)
