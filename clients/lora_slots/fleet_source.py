"""Where a plan's adapters come from: words (`200x16`), a registry, or a folder of bundles.

Only `lora_config` of a bundle is read, which is small, once; files with the same bytes are parsed once. An adapter of a
registry that is no bundle on this machine counts by what the registry says of it: its rank on all its modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_slots.refusals import Refused
from trtllm_lora import EngineShape
from trtllm_lora.arrays import load_array
from trtllm_lora.bundle import CONFIG_FILE
from trtllm_lora.fleet import Fleet, FleetError, Group, Rows, group_of_rank, group_of_rows, row_problem
from trtllm_lora.lora_rules import HF_NAMES

if TYPE_CHECKING:
    from adapter_slots.registry_entries import Content, Entry

_PROBLEMS = 20
"""Told at once; the rest is counted."""


@dataclass(frozen=True)
class Source:
    """The adapters, and which of them a name means."""

    fleet: Fleet
    content: Content | None = None
    """The registry they are from."""

    def knows(self, name: str) -> bool:
        """Whether a name means one of the adapters: quick, also for thousands of names that mean none."""
        if self.content is not None:
            return name in self.content.aliases or self.content.entry_of(name) is not None
        return name in self._names

    def named(self, name: str, draw: float | None = None) -> str:
        """The adapter of the fleet that a name means, as the slot manager resolves it; `draw` chooses for an alias.

        Raises:
            FleetError: there is none.
        """
        if self.content is not None:
            from adapter_slots.errors import UnknownAdapter

            try:
                return self.content.resolve(name, draw=draw).ref
            except UnknownAdapter as error:
                raise FleetError(str(error)) from None
        if name not in self._names:
            raise FleetError(f"no bundle {name[:80]!r} among the {self.fleet.count}")
        return name

    @cached_property
    def _names(self) -> Collection[str]:
        return frozenset(self.fleet.names)


def from_bundles(folder: Path, shape: EngineShape) -> Source:
    """All bundles below a folder, named like their folders.

    Raises:
        Refused: no bundle there, or bundles that this engine does not take, each with its reason.
    """
    files = {file.parent.name: file for file in sorted(folder.glob(f"*/{CONFIG_FILE}"))}
    if not files:
        raise Refused(f"{folder}: no bundle here (a folder with {CONFIG_FILE} for each adapter)")
    groups, problems, _ = _of_files(files, shape)
    return Source(_fleet(groups, problems))


def from_registry(place: str, shape: EngineShape, asked_for: Iterable[str] = ()) -> Source:
    """The current version of every adapter in `adapters.yaml`, a file or s3://bucket/key, named `adapter@version`.

    With them are the other versions that a name of `asked_for` means, or that an alias in it leads to.

    Raises:
        Refused: adapters that do not fit, or of which nothing is known; the file is broken, each problem on a line.
    """
    content = read_content(place)
    wanted = {entry.ref: entry for entry in content.entries.values()}
    if not wanted:
        raise Refused(f"{place}: no adapters in it")
    for name in asked_for:
        alias = content.aliases.get(name)
        entries = map(content.entry_of, alias.targets if alias else (name,))
        wanted.update((entry.ref, entry) for entry in entries if entry is not None)
    files = {ref: Path(entry.path, CONFIG_FILE) for ref, entry in wanted.items() if not entry.is_remote}
    groups, problems, missing = _of_files(files, shape)
    rest = [entry for ref, entry in wanted.items() if entry.is_remote or ref in missing]
    more, wrong = _of_facts(rest, shape)
    return Source(_fleet(groups + more, problems + wrong), content)


def read_content(place: str) -> Content:
    """What a registry says, by the reader of the slot manager.

    Raises:
        Refused: it cannot be read, or is none: each problem as file:line.
    """
    from adapter_slots.errors import RegistryError
    from adapter_slots.registry_home import home_of
    from adapter_slots.registry_rules import content_of, problems_of
    from adapter_slots.registry_text import Document, TextError

    try:
        home = home_of(place)
        reading = home.read()
    except RegistryError as error:
        raise Refused(str(error)) from None
    try:
        document = Document(reading.text if reading else "")
    except TextError as error:
        raise Refused(f"{home.name}:{error.line}: {error}") from None
    problems = list(problems_of(document.data))
    if problems or document.has_duplicates:
        told = document.told(problems)
        more = [f"{home.name}: … and {len(told) - _PROBLEMS} more"] if len(told) > _PROBLEMS else []
        raise Refused("\n".join([f"{home.name}:{line}: {what}" for line, what in told[:_PROBLEMS]] + more))
    return content_of(document.data, home.located)


def _fleet(groups: list[Group], problems: list[str]) -> Fleet:
    if problems:
        raise Refused("\n".join(problems))
    return Fleet(tuple(groups))


def _of_files(files: Mapping[str, Path], shape: EngineShape) -> tuple[list[Group], list[str], set[str]]:
    """Groups of equal files, what is wrong with others, and the names whose file is not there."""
    kinds: defaultdict[bytes, list[str]] = defaultdict(list)
    problems, missing = [], set[str]()
    for name, file in files.items():
        try:
            with open(file, "rb", buffering=0) as source:  # noqa: PTH123 - ten thousand of them
                kinds[source.read()].append(name)
        except (FileNotFoundError, NotADirectoryError):
            missing.add(name)
        except OSError as error:
            problems.append(f"{file}: {error.strerror}")
    groups = []
    for data, names in kinds.items():
        rows = _rows(data)
        wrong = rows if isinstance(rows, str) else row_problem(rows, shape)
        if isinstance(rows, str) or wrong:
            more = f" ({len(names)} like it)" if len(names) > 1 else ""
            problems.append(f"{files[names[0]].parent}: {wrong}{more}")
        else:
            groups.append(replace(group_of_rows(len(names), rows, shape), names=tuple(names)))
    return groups, problems, missing


def _rows(data: bytes) -> Rows | str:
    """The rows of a `lora_config`, or why they are none."""
    table, why = load_array(data)
    if why:
        return f"{CONFIG_FILE} is not a readable array: {why}"
    if not isinstance(table, np.ndarray):
        return f"{CONFIG_FILE} is an archive of arrays"
    if table.ndim != 3 or table.shape[2] not in (3, 4) or not table.size or table.dtype.kind not in "iu":
        return f"{CONFIG_FILE} is [1, rows, 3 or 4] int32, found {list(table.shape)} {table.dtype}"
    return np.asarray(table.reshape(-1, table.shape[2]), np.int64)


def _of_facts(entries: Iterable[Entry], shape: EngineShape) -> tuple[list[Group], list[str]]:
    """Groups by rank and modules as the registry has them; modules that this engine has under another name stay out."""
    kinds: defaultdict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
    problems = []
    for entry in entries:
        if entry.rank is None:
            problems.append(f"{entry.ref}: is not on this machine, and the registry does not say its rank")
        else:
            kinds[entry.rank, entry.target_modules].append(entry.ref)
    groups = []
    for (rank, targets), names in kinds.items():
        modules = (HF_NAMES.get(leaf, leaf) for leaf in targets)
        try:
            group = group_of_rank(len(names), rank, shape, tuple(m for m in modules if m in shape.lora_modules))
            groups.append(replace(group, names=tuple(names)))
        except FleetError as error:
            problems.append(f"{len(names)} adapters of the registry: {error}")
    return groups, problems
