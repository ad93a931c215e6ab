"""DISK against a model of it: who is there, in order of use.

Mutations it catches: a victim that is in use, or is not the least recently used; an eviction in vain; an eviction that
nobody is told of; a use that does not count.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from fakes.bundles import SHAPE, small_bundle
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapter_slots.disk import DiskTier
from adapter_slots.errors import DiskFull
from adapter_slots.host import SHM
from adapter_slots.store import Stores
from trtllm_lora import Bundle, CacheGeometry

COUNT = 7
INDEX = st.integers(0, COUNT - 1)


class DiskStory(RuleBasedStateMachine):
    """Adapters come, are used, held, and dropped; memory-backed, so that fsync costs nothing."""

    shop: list[Bundle]
    sizes: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="lora-slots-test-", dir=SHM))
        self.bound = sum(self.sizes) // 2
        self.disk = DiskTier(CacheGeometry.of(SHAPE), self.root, max_bytes=self.bound)
        self.order: list[int] = []
        """Who is there, least recently used first."""
        self.holds: dict[int, ExitStack] = {}

    def teardown(self) -> None:
        for hold in self.holds.values():
            hold.close()
        self.disk.close()
        shutil.rmtree(self.root)

    def used(self) -> int:
        return sum(self.sizes[i] for i in self.order)

    @rule(i=INDEX)
    def add(self, i: int) -> None:
        """The least recently used that nobody holds make room, no more than needed, or it is full."""
        victims: list[int] = []
        if i not in self.order:
            idle = [j for j in self.order if j not in self.holds]
            while self.used() - sum(self.sizes[j] for j in victims) + self.sizes[i] > self.bound and idle:
                victims.append(idle.pop(0))
            if self.used() - sum(self.sizes[j] for j in victims) + self.sizes[i] > self.bound:
                with pytest.raises(DiskFull):
                    self.disk.add(self.shop[i].digest, Stores().source(str(self.shop[i].path)))
                return
            self.order = [j for j in self.order if j not in victims] + [i]
        self.disk.add(self.shop[i].digest, Stores().source(str(self.shop[i].path))).verify()

    @rule(i=INDEX)
    def hold(self, i: int) -> None:
        """A hold counts as a use; holding what is not there does nothing."""
        stack = self.holds.get(i, ExitStack())
        stack.enter_context(self.disk.in_use(self.shop[i].digest))
        if i in self.order:
            self.holds[i] = stack
            self.order.remove(i)
            self.order.append(i)
        else:
            stack.close()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """All holds of one adapter end."""
        self.holds.pop(data.draw(st.sampled_from(sorted(self.holds)))).close()

    @rule(i=INDEX)
    def remove(self, i: int) -> None:
        """Only what is there and not held can be dropped."""
        can = i in self.order and i not in self.holds
        assert self.disk.remove(self.shop[i].digest) is can
        if can:
            self.order.remove(i)

    @invariant()
    def holds_to_the_model(self) -> None:
        """The same adapters, the same bytes, never more than the bound, no directory too many."""
        assert {self.shop[i].digest for i in self.order} == {p.name for p in self.root.iterdir() if p.name != ".lock"}
        assert self.used() == self.disk.used_bytes <= self.bound


def test_disk_does_what_the_model_does(tmp_path: Path) -> None:
    """Seven adapters of different sizes in room for half of them."""
    DiskStory.shop = [small_bundle(tmp_path, f"adapter-{i}", i, rank=i + 1) for i in range(COUNT)]
    DiskStory.sizes = [sum(file.stat().st_size for file in bundle.path.iterdir()) for bundle in DiskStory.shop]
    story = DiskStory.TestCase
    story.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    story().runTest()
