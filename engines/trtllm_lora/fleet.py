"""The adapters a plan is made for: groups of equal ones, each with its pages by the engine's own walk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trtllm_lora.errors import ContractError
from trtllm_lora.geometry import CacheGeometry
from trtllm_lora.modules import MODULES, dims, local_dims
from trtllm_lora.shape import ITEM_BYTES, EngineShape

ConfigRows = tuple[tuple[int, ...], ...]


class FleetError(ContractError):
    """A description of adapters that cannot be read."""


@dataclass(frozen=True, slots=True)
class Group:
    """Adapters with the same rows."""

    count: int
    rows: ConfigRows
    """`lora_config` rows: (module id, layer, rank[, is_dora])."""
    num_bytes: int
    """Bytes of one adapter's weights."""

    @property
    def rank(self) -> int:
        """Largest rank of its rows."""
        return max(row[2] for row in self.rows)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All adapters, in groups."""

    groups: tuple[Group, ...]

    @property
    def count(self) -> int:
        """Number of adapters."""
        return sum(group.count for group in self.groups)

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
        return [(geometry.max_pages_for(group.rows), group.count) for group in self.groups]


def rows_of_rank(rank: int, shape: EngineShape, modules: Sequence[str] | None = None, dora: bool = False) -> ConfigRows:
    """Rows of an adapter of one rank on every layer, ordered as our converter writes them: by layer, then module id."""
    ids = sorted(MODULES[name].id for name in (modules or shape.lora_modules))
    tail = (rank, 1) if dora else (rank,)
    return tuple((module, layer, *tail) for layer in range(shape.num_layers) for module in ids)


def bytes_of_rows(rows: Iterable[Sequence[int]], shape: EngineShape) -> int:
    """Bytes of the weights of these rows, unsplit and unpadded."""
    names = {module.id: name for name, module in MODULES.items()}
    total = 0
    for row in rows:
        d_in, d_out = dims(names[row[0]], shape)
        total += row[2] * (d_in + d_out) + (d_out if len(row) > 3 and row[3] else 0)
    return total * ITEM_BYTES[shape.dtype]


def cached_bytes(rows: Iterable[Sequence[int]], shape: EngineShape) -> int:
    """Bytes that these rows fill in the cache of one rank (of all pipeline ranks together)."""
    names = {module.id: name for name, module in MODULES.items()}
    total = 0
    for row in rows:
        d_in, d_out = local_dims(names[row[0]], shape)
        total += row[2] * (d_in + d_out) + (d_out if len(row) > 3 and row[3] else 0)
    return total * ITEM_BYTES[shape.dtype]


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
    rows = rows_of_rank(rank, shape, modules)
    return Group(count, rows, bytes_of_rows(rows, shape))


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
        rows = tuple((row[0], row[1], rank, *row[3:]) for row in group.rows)
        groups.append(replace(group, rows=rows, num_bytes=bytes_of_rows(rows, shape)))
    return Fleet(tuple(groups))
