"""From the adapters' rows in the cache's pages to the stacked matrices of one step.

Rules:
1. The stack holds exactly the adapters of the step, in places 1 .. n; a step with the same adapters changes nothing.
2. An adapter that joins is written into the place of one that left, or behind the last; nothing else moves, save that
   the last one fills a hole that stays.
3. Every site and layer has its own rank, the largest among the held adapters; smaller ones are filled with zeros,
   which is exact. It grows when it must, and shrinks when less than half of it is used.
4. An id that was evicted and pushed again is another adapter here: what is compared is the stored rows, not the id.
5. Place 0 is the base model: no matrices, a delta of zero (graph.py), a magnitude of one.
6. Matrices lie as the rows of the pages do, so that writing one is a plain copy, into memory that was written before:
   the first touch of a page costs more than its bytes.

Legend: n held adapters, I site input, O part output, r rank of the site, P parts of the site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from reference_engine.lora_sites import Site
from reference_engine.weights import write_float32
from trtllm_lora import Row, module_name
from trtllm_lora.tensors import Array

BASE = None
"""The key of the base model among task ids."""
_KEPT_RANKS = 8
"""Memory is kept for ranks so many times as small as those it was made for."""

Floats = npt.NDArray[np.float32]
_Places = dict[tuple[str, int], dict[str, Row]]


class LoraStack:
    """The matrices of the adapters in the running step."""

    def __init__(self, sites: Sequence[Site], num_layers: int, capacity: int) -> None:
        """`capacity` is the largest number of different adapters in a step."""
        self._sites, self._num_layers, self._capacity = tuple(sites), num_layers, capacity
        self._order: list[int] = []
        self._rows: dict[int, _Places] = {}
        self._source: dict[int, Sequence[Row]] = {}
        self._ranks = {(site.name, layer): 0 for site in sites for layer in range(num_layers)}
        self._memory: dict[str, Floats] = {}
        self._matrices: dict[str, Floats] = {}
        self._magnitudes: dict[str, Floats] = {}
        self.only_base = True
        """Whether no adapter is in the step: the matrices then have rank 0."""
        self.version = 0
        """Changes whenever `arrays` would give other arrays; not when other numbers are written into the same."""

    @property
    def has_dora(self) -> bool:
        """Whether an adapter in the stack has magnitudes (DoRA)."""
        return not self.only_base and any(
            row.magnitude_O is not None
            for key in self._order
            for site in self._rows[key].values()
            for row in site.values()
        )

    @property
    def num_held(self) -> int:
        """n: adapters in the step."""
        return 0 if self.only_base else len(self._order)

    def place(self, task: int | None) -> int:
        """Place of a held task, 1 .. n; 0 for `BASE`, and for all in an engine without LoRA."""
        return 0 if task is BASE or self.only_base else 1 + self._order.index(task)

    def hold(self, tasks: Sequence[int | None], rows_of: Callable[[int], Sequence[Row]]) -> None:
        """Make the stack hold exactly these tasks (`BASE` among them needs no place)."""
        wanted, held = dict.fromkeys(task for task in tasks if task is not BASE), self.num_held
        self.only_base = not wanted
        if wanted:
            self._hold(wanted, rows_of)
        self.version += self.num_held != held

    def _hold(self, wanted: dict[int, None], rows_of: Callable[[int], Sequence[Row]]) -> None:
        sources = {task: rows_of(task) for task in wanted}
        joining = [task for task, rows in sources.items() if rows is not self._source.get(task)]
        if not joining and len(wanted) == len(self._order):
            return
        for task in joining:
            self._rows[task] = self._by_site(sources[task])
        holes = [place for place, task in enumerate(self._order) if task not in wanted]
        for task in joining:
            if task not in self._order:  # else it was pushed anew and stays where it is
                place = holes.pop(0) if holes else len(self._order)
                self._order[place : place + 1] = [task]
        needed = {at: max(self._rank(task, at) for task in wanted) for at in self._ranks}
        if any(needed[at] > rank or 2 * needed[at] <= rank for at, rank in self._ranks.items() if rank or needed[at]):
            self._order = [task for task in self._order if task in wanted]
            self._allocate(needed)
            joining = list(self._order)
        for task in joining:
            self._write(self._order.index(task), task)
        self._close_holes(wanted)
        self._rows = {task: self._rows[task] for task in self._order}
        self._source = sources

    def arrays(self, *, dora: bool) -> Iterator[tuple[str, Floats]]:
        """(graph input, array) of every matrix, cut to the n held places; with the n + 1 magnitudes if `dora`."""
        n = self.num_held
        for layer in range(self._num_layers):
            for site in self._sites:
                for name, shape in _shapes(site, layer, 0):
                    yield name, np.zeros((1, *shape), np.float32) if self.only_base else self._matrices[name][:n]
                name = f"{layer}.{site.name}.magnitude"
                if dora:
                    table = None if self.only_base else self._magnitudes.get(name)
                    yield name, np.ones((n + 1, site.d_out), np.float32) if table is None else table[: n + 1]

    def _rank(self, task: int, at: tuple[str, int]) -> int:
        site = next(s for s in self._sites if s.name == at[0])
        rows = self._rows[task].get(at, {})
        return max(sum(row.rank for module, row in rows.items() if module in (p, site.fused)) for p in site.parts)

    def _by_site(self, rows: Sequence[Row]) -> _Places:
        """Rows by site and layer; of two rows for one module and layer the last counts, as in the runtime."""
        places: _Places = {}
        for row in rows:
            module = module_name(row.module_id)
            site = next(s for s in self._sites if module in (*s.parts, s.fused))
            places.setdefault((site.name, row.layer), {})[module] = row
        return places

    def _allocate(self, ranks: dict[tuple[str, int], int]) -> None:
        self._ranks = ranks
        self.version += 1
        for layer in range(self._num_layers):
            for site in self._sites:
                for name, shape in _shapes(site, layer, ranks[site.name, layer]):
                    size = self._capacity * shape[0] * shape[1]
                    memory = self._memory.get(name)
                    if memory is None or not size <= memory.size <= _KEPT_RANKS * size:
                        # zeros come from the operating system untouched: only what is written takes memory
                        memory = self._memory[name] = np.zeros(size, np.float32)
                    self._matrices[name] = memory[:size].reshape(self._capacity, *shape)

    def _write(self, place: int, task: int) -> None:
        for layer in range(self._num_layers):
            for site in self._sites:
                rows = self._rows[task].get((site.name, layer), {})
                prefix, rank = f"{layer}.{site.name}", self._ranks[site.name, layer]
                for part, module in enumerate(site.parts):
                    _write_part(
                        self._matrices[f"{prefix}.a"][place, part * rank : (part + 1) * rank],
                        self._matrices[f"{prefix}.b{part}"][place],
                        [_part_of(site, part, name, rows[name]) for name in rows if name in (module, site.fused)],
                    )
                self._write_magnitude(f"{prefix}.magnitude", 1 + place, site, rows)

    def _write_magnitude(self, name: str, place: int, site: Site, rows: dict[str, Row]) -> None:
        given = {module: row.magnitude_O for module, row in rows.items() if row.magnitude_O is not None}
        if not given and name not in self._magnitudes:
            return
        if name not in self._magnitudes:
            self._magnitudes[name] = np.ones((1 + self._capacity, site.d_out), np.float32)
            self.version += 1
        table = self._magnitudes[name]
        table[place] = 1
        ends = np.cumsum(site.widths)
        for module, magnitude in given.items():
            begin = 0
            for part in [site.parts.index(module)] if module in site.parts else site.fused_order:
                width = site.widths[part]
                write_float32(table[place, ends[part] - width : ends[part]], magnitude[begin : begin + width])
                begin += width

    def _close_holes(self, wanted: dict[int, None]) -> None:
        for index in reversed(range(len(self._order))):
            if self._order[index] in wanted:
                continue
            last = len(self._order) - 1
            for matrix in self._matrices.values():
                matrix[index] = matrix[last]
            for table in self._magnitudes.values():
                table[1 + index] = table[1 + last]
            self._order[index] = self._order[last]
            self._order.pop()


def _shapes(site: Site, layer: int, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    prefix = f"{layer}.{site.name}"
    yield f"{prefix}.a", (len(site.parts) * rank, site.d_in)
    for part, width in enumerate(site.widths):
        yield f"{prefix}.b{part}", (width, rank)


def _part_of(site: Site, part: int, module: str, row: Row) -> tuple[Array, Array]:
    """(A [r, I], B [O, r]) that a row gives to one part of its site."""
    if module != site.fused:
        return row.a_RI, row.b_OR
    before = site.fused_order[: site.fused_order.index(part)]
    begin = sum(site.widths[other] for other in before)
    return row.a_RI, row.b_OR[begin : begin + site.widths[part]]


def _write_part(a_RI: Floats, b_OR: Floats, parts: list[tuple[Array, Array]]) -> None:
    """Put ranks beside ranks; what is left of both matrices is zero."""
    at = 0
    for a, b in parts:
        rank = a.shape[0]
        write_float32(a_RI[at : at + rank], a)
        write_float32(b_OR[:, at : at + rank], b)
        at += rank
    a_RI[at:] = 0
    b_OR[:, at:] = 0
