"""Key/value blocks: who owns which, bounded, and which may be used again.

Rules:
1. A block belongs to the sequences that hold it; it is free when the last one gives it back.
2. A full block whose tokens are known stays findable after that, keyed by (task id, all tokens up to its end), until
   its place is needed: least recently freed first. Keys carry the task id as the runtime's `BlockKey` does.
3. A sequence takes all blocks it can ever need when it is admitted (`guaranteed_no_evict`), so that it never stalls.
4. At least the last prompt token is computed anew: its logits choose the first token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[int, tuple[int, ...]]
"""(number of the block before, or at the beginning a number below 1 for the task; the block's tokens)."""


class BlockPool:
    """Accounting of `num_blocks` blocks of `block_tokens` tokens; holds no keys and values itself."""

    def __init__(self, num_blocks: int, block_tokens: int, *, reuse: bool) -> None:
        self.num_blocks, self.block_tokens, self._reuse = num_blocks, block_tokens, reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._key: dict[int, _Key] = {}
        self._number: dict[int, int] = {}
        self._next_number = 0
        self._found: dict[_Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.reused_blocks = 0
        """Blocks found by their key, since the start."""

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_tokens)

    def take(
        self, task: int | None, prompt: Sequence[int], num_tokens: int, *, reuse: bool = True
    ) -> tuple[list[int], int] | None:
        """Blocks for a sequence of up to `num_tokens` tokens, and how many of the first are already computed.

        None if there are not enough now; nothing is taken then.
        """
        known = self._match(task, prompt) if self._reuse and reuse else []
        wanted = self.blocks_for(num_tokens) - len(known)
        if wanted > self.num_available - sum(1 for block in known if self._holders[block] == 0):
            return None
        for block in known:
            self._hold(block)
        self.reused_blocks += len(known)
        return known + [self._new() for _ in range(wanted)], len(known)

    def learn(self, task: int | None, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Make full blocks findable; `tokens` are those whose keys and values have been computed."""
        if not self._reuse:
            return
        parent = _root(task)
        for i in range(len(tokens) // self.block_tokens):
            key = (parent, tuple(tokens[i * self.block_tokens : (i + 1) * self.block_tokens]))
            block = self._found.get(key, blocks[i])
            if block not in self._key:
                self._next_number += 1
                self._found[key], self._key[block], self._number[block] = block, key, self._next_number
            parent = self._number[block]

    def give_back(self, blocks: Sequence[int]) -> None:
        """A sequence ended."""
        for block in reversed(blocks):  # the end of a prompt is less likely to be seen again than its beginning
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._key:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _match(self, task: int | None, prompt: Sequence[int]) -> list[int]:
        blocks: list[int] = []
        parent = _root(task)
        for i in range((len(prompt) - 1) // self.block_tokens):
            block = self._found.get((parent, tuple(prompt[i * self.block_tokens : (i + 1) * self.block_tokens])))
            if block is None:
                break
            blocks.append(block)
            parent = self._number[block]
        return blocks

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] += 1

    def _new(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._found[self._key.pop(block)]
        self._holders[block] = 1
        return block


def _root(task: int | None) -> int:
    return 0 if task is None else -1 - task
