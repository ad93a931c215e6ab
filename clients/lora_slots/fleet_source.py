"""Where a plan's adapters come from: words (`200x16`), a registry, or a folder of bundles.

Only `lora_config` of a bundle is read, which is small; files with the same bytes are parsed once. An adapter of a
registry that is no bundle on this machine counts by what the registry says of it: its rank on all its modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    from adapter_slots.registry import Entry


def from_bundles(folder: Path, shape: EngineShape) -> Fleet:
    """All bundles below a folder.

    Raises:
        Refused: no bundle there, or bundles that this engine does not take, each with its reason.
    """
    files = sorted(folder.glob(f"*/{CONFIG_FILE}"))
    if not files:
        raise Refused(f"{folder}: no bundle here (a folder with {CONFIG_FILE} for each adapter)")
    groups, problems = _of_files(files, shape)
    return _fleet(groups, problems)


def from_registry(place: str, shape: EngineShape) -> Fleet:
    """The current version of every adapter in `adapters.yaml`, a file or s3://bucket/key.

    Raises:
        Refused: adapters that do not fit, or of which nothing is known. RegistryError: the file is broken.
    """
    from adapter_slots.registry import Registry

    entries = list(Registry(place).entries.values())
    if not entries:
        raise Refused(f"{place}: no adapters in it")
    here = {entry.name: Path(entry.path) / CONFIG_FILE for entry in entries if "://" not in entry.path}
    files = [here[entry.name] for entry in entries if entry.name in here and here[entry.name].is_file()]
    read = set(files)
    groups, problems = _of_files(files, shape)
    rest = [entry for entry in entries if entry.name not in here or here[entry.name] not in read]
    more, wrong = _of_facts(rest, shape)
    return _fleet(groups + more, problems + wrong)


def _fleet(groups: list[Group], problems: list[str]) -> Fleet:
    if problems:
        raise Refused("\n".join(problems))
    return Fleet(tuple(groups))


def _of_files(files: Iterable[Path], shape: EngineShape) -> tuple[list[Group], list[str]]:
    """Groups of equal files, and what is wrong with the others."""
    kinds: Counter[bytes] = Counter()
    first: dict[bytes, Path] = {}
    problems = []
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            problems.append(f"{file}: {error.strerror}")
            continue
        kinds[data] += 1
        first.setdefault(data, file)
    groups = []
    for data, count in kinds.items():
        rows = _rows(data)
        wrong = rows if isinstance(rows, str) else row_problem(rows, shape)
        if isinstance(rows, str) or wrong:
            problems.append(f"{first[data].parent}: {wrong}" + (f" ({count} like it)" if count > 1 else ""))
        else:
            groups.append(group_of_rows(count, rows, shape))
    return groups, problems


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
    kinds: Counter[tuple[int, tuple[str, ...]]] = Counter()
    problems = []
    for entry in entries:
        if entry.rank is None:
            problems.append(f"{entry.ref}: is not on this machine, and the registry does not say its rank")
            continue
        names = (HF_NAMES.get(leaf, leaf) for leaf in entry.target_modules)
        kinds[entry.rank, tuple(name for name in names if name in shape.lora_modules)] += 1
    groups = []
    for (rank, modules), count in kinds.items():
        try:
            groups.append(group_of_rank(count, rank, shape, modules))
        except FleetError as error:
            problems.append(f"{count} adapters of the registry: {error}")
    return groups, problems
