"""The adapters a plan is made for: groups of equal ones, each with its pages by the engine's own walk.

The walk is that of `geometry.CacheGeometry.pages_for`, over all adapters at a time: ten thousand different ones take a
fraction of a second.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_lora.errors import ContractError
from trtllm_lora.geometry import CacheGeometry
from trtllm_lora.modules import MODULES, dims, local_dims
from trtllm_lora.shape import ITEM_BYTES, EngineShape

USUAL_COUNT = 100
Rows = npt.NDArray[np.int64]
"""`lora_config` of one adapter: [rows, 4] of (module id, layer, rank, is_dora)."""


class FleetError(ContractError):
    """A description of adapters that cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Adapters with the same rows."""

    count: int
    rows: Rows
    rank: int
    """Largest rank of its rows."""
    num_bytes: int
    """Bytes of one adapter's weights, unsplit and unpadded."""
    names: tuple[str, ...] = ()
    """Who they are, one name each, where that is known."""
    is_new: bool = False
    """They are asked about (`tenants=+N`), and bring traffic of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """All adapters, in groups."""

    groups: tuple[Group, ...]
    _slots: dict[tuple[EngineShape, int], list[_Slots]] = field(default_factory=dict, init=False, repr=False)

    @property
    def count(self) -> int:
        """Number of adapters."""
        return sum(group.count for group in self.groups)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all of them; empty where nobody has one."""
        return tuple(name for group in self.groups for name in group.names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(group.count * group.num_bytes for group in self.groups)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that occur, ascending."""
        return tuple(sorted({group.rank for group in self.groups}))

    def plus(self, other: Fleet) -> Fleet:
        """Both fleets together."""
        return Fleet(self.groups + other.groups)

    def pages(self, geometry: CacheGeometry) -> list[tuple[int, int]]:
        """(pages of one adapter, how many such adapters) of each group, in order. Raises GeometryError."""
        key = (geometry.shape, geometry.page_width)  # what else a geometry has does not change the slots of a row
        if key not in self._slots:
            self._slots[key] = list(_slots_of(self.groups, geometry))
        found = np.zeros(len(self.groups), np.int64)
        for part in self._slots[key]:
            if part.slots.size and part.slots.max() > geometry.slots_per_page:
                worst = part.places[int(part.slots.max(axis=(0, 2)).argmax())]
                geometry.max_pages_for(self.groups[worst].rows.tolist())  # raises, and says which row is too large
            found[part.places] = _walk(part.slots, geometry.slots_per_page)
        return list(zip(found.tolist(), (group.count for group in self.groups), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Cache slots of each row, of all groups with the same number of rows."""

    places: list[int]
    """Where these groups stand in the fleet."""
    slots: npt.NDArray[np.int64]
    """[pipeline ranks, groups, rows]; 0 where a row's layer is another rank's."""


def _slots_of(groups: Sequence[Group], geometry: CacheGeometry) -> Iterator[_Slots]:
    shape, width = geometry.shape, geometry.page_width
    ins, outs = _sizes(shape, local=True)
    layers = shape.num_layers // shape.pp_size
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        by_length[len(group.rows)].append(place)
    for places in by_length.values():
        rows = np.stack([groups[place].rows for place in places])
        ids, layer, rank, dora = (rows[..., column] for column in range(4))
        elements = rank * (ins[ids] + outs[ids]) + dora * outs[ids]
        slots = -(-elements // width)
        yield _Slots(places, np.stack([np.where(layer // layers == pp, slots, 0) for pp in range(shape.pp_size)]))


def _walk(slots: npt.NDArray[np.int64], per_page: int) -> npt.NDArray[np.int64]:
    """Pages of each group on the pipeline rank where it takes most; a row never straddles two pages."""
    pages, used = np.ones(slots.shape[:2], np.int64), np.zeros(slots.shape[:2], np.int64)
    for row in range(slots.shape[2]):
        over = used + slots[..., row] > per_page
        pages += over
        used = np.where(over, 0, used) + slots[..., row]
    return np.asarray(pages.max(axis=0))


@functools.lru_cache(maxsize=8)
def _sizes(shape: EngineShape, *, local: bool) -> tuple[Rows, Rows]:
    """(in, out) by module id, of one tensor-parallel rank or whole."""
    size_of = local_dims if local else dims
    ins, outs = np.zeros(len(MODULES) + 1, np.int64), np.zeros(len(MODULES) + 1, np.int64)
    for name in shape.lora_modules:
        ins[MODULES[name].id], outs[MODULES[name].id] = size_of(name, shape)
    return ins, outs


def group_of_rows(
    count: int, rows: Sequence[Sequence[int]] | npt.NDArray[np.integer[Any]], shape: EngineShape
) -> Group:
    """`count` adapters with these rows of 3 or 4 columns, which must fit the engine (`row_problem`)."""
    whole = np.zeros((len(rows), 4), np.int64)
    given = np.asarray(rows, np.int64)
    whole[:, : given.shape[1]] = given
    whole[:, 3] = whole[:, 3] != 0
    return Group(count, whole, int(whole[:, 2].max()), _elements(whole, shape, local=False) * ITEM_BYTES[shape.dtype])


def row_problem(rows: Rows, shape: EngineShape) -> str:
    """Why the engine of a profile would refuse an adapter with these rows; "" if it takes it."""
    enabled = [MODULES[name].id for name in shape.lora_modules]
    for wrong, column, says in (
        (~np.isin(rows[:, 0], enabled), 0, "module id {}: is not enabled in the profile (lora.modules)"),
        ((rows[:, 1] < 0) | (rows[:, 1] >= shape.num_layers), 1, f"layer {{}}: the profile has {shape.num_layers}"),
        (
            (rows[:, 2] < 1) | (rows[:, 2] > shape.max_lora_rank),
            2,
            f"rank {{}}: the profile has lora.max_rank {shape.max_lora_rank}",
        ),
    ):
        if wrong.any():
            return says.format(rows[int(wrong.argmax()), column])
    return ""


def cached_bytes(group: Group, shape: EngineShape) -> int:
    """Bytes that an adapter fills in the cache of one rank (of all pipeline ranks together)."""
    return _elements(group.rows, shape, local=True) * ITEM_BYTES[shape.dtype]


def _elements(rows: Rows, shape: EngineShape, *, local: bool) -> int:
    ins, outs = _sizes(shape, local=local)
    ids, rank, dora = rows[:, 0], rows[:, 2], rows[:, 3]
    return int((rank * (ins[ids] + outs[ids]) + dora * outs[ids]).sum())


def group_of_rank(count: int, rank: int, shape: EngineShape, modules: Sequence[str] | None = None) -> Group:
    """`count` adapters of one rank on every layer.

    Raises:
        FleetError: a rank the engine would refuse, a module it does not have.
    """
    unknown = [name for name in modules or () if name not in shape.lora_modules]
    if unknown:
        raise FleetError(f"{', '.join(unknown)}: not enabled in this engine (it has {', '.join(shape.lora_modules)})")
    if not 1 <= rank <= shape.max_lora_rank:
        raise FleetError(f"rank {rank}: this engine takes ranks from 1 to {shape.max_lora_rank} (lora.max_rank)")
    ids = sorted(MODULES[name].id for name in (modules or shape.lora_modules))
    # in the order in which our converter writes them: by layer, then module id
    rows = np.array([(module, layer, rank) for layer in range(shape.num_layers) for module in ids])
    return group_of_rows(count, rows, shape)


def usual_fleet(shape: EngineShape, slots: int) -> str:
    """The adapters that are planned for where nobody says which, in words: what a profile allows at worst."""
    return f"{max(USUAL_COUNT, slots)}x{shape.max_lora_rank}"


def parse_fleet(text: str, shape: EngineShape) -> Fleet:
    """`200x16,20x64:attn_q+attn_k+attn_v`: count x rank, and modules where not all.

    Raises:
        FleetError: every part that cannot be read.
    """
    groups, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"(\d+)x(\d+)(?::([a-z0-9_+]+))?", part)
        if not found:
            problems.append(f"{part!r} is not COUNTxRANK or COUNTxRANK:MODULE+MODULE")
            continue
        try:
            modules = found[3].split("+") if found[3] else None
            groups.append(group_of_rank(int(found[1]), int(found[2]), shape, modules))
        except FleetError as error:
            problems.append(f"{part}: {error}")
    if not problems and not any(group.count for group in groups):
        problems.append("no adapters given: write COUNTxRANK, such as 200x16,20x64")
    if problems:
        raise FleetError("; ".join(problems))
    return Fleet(tuple(group for group in groups if group.count))


def with_rank(fleet: Fleet, rank: int, shape: EngineShape) -> Fleet:
    """The same adapters, each with `rank` in every row it has."""
    groups = []
    for group in fleet.groups:
        rows = group.rows.copy()
        rows[:, 2] = rank
        grown = group_of_rows(group.count, rows, shape)
        groups.append(replace(grown, names=group.names, is_new=group.is_new))
    return Fleet(tuple(groups))
