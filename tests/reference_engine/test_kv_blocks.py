"""Blocks are never given twice, never lost, and found again only for the same task and tokens."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reference_engine.kv_blocks import BlockPool

NUM, SIZE = 12, 4


class Pool(RuleBasedStateMachine):
    """Sequences take, learn and give back at random; a model remembers what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM, SIZE, reuse=True)
        self.held: list[tuple[int, list[int], list[int]]] = []
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}

    @rule(task=st.integers(1, 2), prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), more=st.integers(1, 8))
    def take(self, task: int, prompt: list[int], more: int) -> None:
        """A request is admitted, computes its prompt and makes it known."""
        available = self.pool.num_available
        taken = self.pool.take(task, prompt, len(prompt) + more)
        if taken is None:
            assert self.pool.num_available == available
            assert self.pool.blocks_for(len(prompt) + more) > available - self.pool.blocks_for(len(prompt))
            return
        blocks, known = taken
        assert len(blocks) == len(set(blocks)) == self.pool.blocks_for(len(prompt) + more)
        assert known * SIZE < len(prompt)
        for i, block in enumerate(blocks[:known]):
            assert self.content[block] == (task, tuple(prompt[: (i + 1) * SIZE]))
        owned = {block for _, _, others in self.held for block in others}
        assert not owned & set(blocks[known:])
        for i, block in enumerate(blocks):
            self.content[block] = (task, tuple(prompt[: (i + 1) * SIZE]))
        self.pool.learn(task, prompt, blocks)
        self.held.append((task, prompt, blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A request ends."""
        _, _, blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.give_back(blocks)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Held and available blocks are all there is."""
        held = {block for _, _, blocks in self.held for block in blocks}
        assert self.pool.num_available + len(held) == NUM


Pool.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
test_blocks = Pool.TestCase


def test_without_reuse_nothing_is_found() -> None:
    """`enable_kv_cache_reuse` false."""
    pool = BlockPool(NUM, SIZE, reuse=False)
    prompt = [1] * 12
    blocks, known = pool.take(1, prompt, 13) or ([], -1)
    pool.learn(1, prompt, blocks)
    pool.give_back(blocks)
    assert known == 0
    assert (pool.take(1, prompt, 13) or ([], -1))[1] == 0


@given(st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_another_task_finds_nothing(prompt: list[int]) -> None:
    """Keys carry the task id; the base model has a key of its own."""
    pool = BlockPool(NUM, SIZE, reuse=True)
    blocks, _ = pool.take(0, prompt, 10) or ([], 0)
    pool.learn(0, prompt, blocks)
    assert (pool.take(None, prompt, 10) or ([], -1))[1] == 0
    assert (pool.take(1, prompt, 10) or ([], -1))[1] == 0
    assert (pool.take(0, prompt, 10) or ([], -1))[1] == 2
