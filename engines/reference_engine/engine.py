"""The engine: one loop thread that admits, steps, samples and tells; requests join and leave between steps.

Rules:
1. Only the loop touches sequences, blocks, LoRA store and decoder: there is no lock but the mailbox's.
2. A request is checked and its adapter stored when it is fetched, before it waits for a place, in the runtime's order.
3. Whatever becomes of a request, its listener hears exactly one last word: a final progress, or a failure.
4. Listeners are called by the outbox thread, never by the loop: a slow client holds nobody up.
5. An error inside of a step ends all running requests, as the runtime's `forwardAsync` does, and the engine goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reference_engine.batch import Batch, group_tokens
from reference_engine.decoder import Decoder, Floats
from reference_engine.errors import RequestRefused, executor_failed, fetching
from reference_engine.kv_blocks import BlockPool
from reference_engine.lora_checks import check_lora_rows
from reference_engine.lora_stack import LoraStack
from reference_engine.lora_store import LoraStore
from reference_engine.outbox import Listener, Outbox
from reference_engine.progress import Progress
from reference_engine.request import GenerationRequest
from reference_engine.sampling import Sampler
from reference_engine.scheduler import Chunk, plan_step
from reference_engine.sequence import CANCELLED, Sequence
from trtllm_lora import EngineShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int = 256
    max_queue_size: int = 0
    """Requests that may wait; 0 for no bound."""


@dataclass(slots=True)
class _Fetched:
    """A request the loop has taken in, until its last sequence ends."""

    number: int
    request: GenerationRequest
    listener: Listener
    to_start: int
    unfinished: int


class Engine:
    """In-flight batching over one decoder. `submit`, `cancel` and `close` may be called from any thread."""

    def __init__(
        self,
        shape: EngineShape,
        decoder: Decoder,
        pool: BlockPool,
        store: LoraStore | None,
        limits: Limits,
        outbox: Outbox,
    ) -> None:
        """Start the loop. `store` is None for an engine without LoRA: LoRA requests are answered by the base."""
        self._shape, self._decoder, self._pool, self._store = shape, decoder, pool, store
        self._limits, self._outbox = limits, outbox
        self._stack = LoraStack(decoder.sites, shape.num_layers, limits.max_batch_size)
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._numbers = 0
        self._waiting: deque[_Fetched] = deque()
        self._running: list[Sequence] = []
        self._owners: dict[int, _Fetched] = {}
        self._thread = threading.Thread(target=self._loop, name="reference-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, listener: Listener) -> int:
        """Take a request; returns the executor's number for it. The listener hears everything else."""
        with self._wake:
            self._numbers += 1
            number = self._numbers
            self._mail.append(lambda: self._fetch(number, request, listener))
            self._wake.notify()
        return number

    def cancel(self, number: int) -> None:
        """End a request; its listener hears a final progress with what there is. Unknown numbers are ignored."""
        with self._wake:
            self._mail.append(lambda: self._cancel(number))
            self._wake.notify()

    def close(self) -> None:
        """Cancel what runs and waits, tell it, and stop the loop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # the loop -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._mail or self._running or self._waiting or self._closing):
                    self._wake.wait()
                mail, self._mail = self._mail, deque()
                closing = self._closing
            for act in mail:
                act()
            if closing:
                for number in [*(f.number for f in self._waiting), *(s.number for s in self._running)]:
                    self._cancel(number)
                return
            self._start_waiting()
            if self._running:
                self._run_step()

    def _run_step(self) -> None:
        chunks = plan_step(self._running, self._limits.max_num_tokens)
        try:
            batch = self._batch(chunks)
            logits = self._decoder.step(batch, self._stack)
            self._take(chunks, logits)
        except Exception as error:  # the loop outlives any step
            log.exception("step failed")
            self._fail_running(f"Encountered an error in forwardAsync function: {error}")
        self._end_finished()

    # requests ---------------------------------------------------------------------------------------------------

    def _fetch(self, number: int, request: GenerationRequest, listener: Listener) -> None:
        try:
            request = self._checked(request)
        except RequestRefused as error:
            listener_text = executor_failed(number, str(error))
            self._outbox.fail(listener, listener_text)
            return
        self._waiting.append(_Fetched(number, request, listener, request.num_sequences, request.num_sequences))

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        """The executor's checks in its order; on return the adapter is in progress and its tensors are let go."""
        limits, bound = self._limits, self._limits.max_queue_size
        if bound and len(self._waiting) >= bound:
            raise RequestRefused(f"Maximum queue size of {bound} has been reached, please try again later")
        if request.task is not None and self._store is not None:
            check_lora_rows(request.lora_weights, request.lora_config, self._shape)
            self._store.admit(request.task, request.lora_weights, request.lora_config)
        length = len(request.token_ids)
        problem = None
        if length > limits.max_input_len:
            problem = f"Prompt length ({length}) exceeds maximum input length ({limits.max_input_len})."
        longest = min(length + request.max_new_tokens, limits.max_seq_len)
        if self._pool.blocks_for(longest) > self._pool.num_blocks:
            capacity = self._pool.num_blocks * self._pool.block_tokens
            problem = f"{longest} tokens of prompt and answer exceed the paged KV cache of {capacity} tokens"
        if problem:
            if request.task is not None and self._store is not None:
                self._store.release(request.task)
            raise RequestRefused(fetching(problem))
        return dataclasses.replace(request, max_new_tokens=longest - length, lora_weights=None, lora_config=None)

    def _start_waiting(self) -> None:
        """Give places to waiting requests, in order; one that only lacks device pages lets others pass."""
        passed: deque[_Fetched] = deque()
        while self._waiting and len(self._running) < self._limits.max_batch_size:
            fetched = self._waiting[0]
            if not self._device_holds(fetched.request.task):
                passed.append(self._waiting.popleft())
            elif not self._start(fetched):
                break
            elif fetched.to_start == 0:
                self._waiting.popleft()
        self._waiting.extendleft(reversed(passed))

    def _device_holds(self, task: int | None) -> bool:
        if task is None or self._store is None:
            return True
        return self._store.device_holds((s.task for s in self._running if s.task is not None), task)

    def _start(self, fetched: _Fetched) -> bool:
        request, index = fetched.request, fetched.request.num_sequences - fetched.to_start
        total = len(request.token_ids) + request.max_new_tokens
        taken = self._pool.take(request.task, request.token_ids, total, reuse=not request.wants_context_logits)
        if taken is None:
            return False
        if request.task is not None and self._store is not None:
            self._store.bring(request.task)
        blocks, reused = taken
        sampling = dataclasses.replace(request.sampling, seed=request.sampling.seed + index)
        sampler = Sampler(sampling, self._shape.vocab_size, request.token_ids)
        computed = reused * self._pool.block_tokens
        sequence = Sequence(request, fetched.number, index, blocks, computed, reused, sampler, list(request.token_ids))
        sequence.first_scheduled_ns = time.monotonic_ns()
        fetched.to_start -= 1
        self._owners[id(sequence)] = fetched
        self._running.append(sequence)
        return True

    def _cancel(self, number: int) -> None:
        for fetched in self._waiting:
            if fetched.number == number:
                self._waiting.remove(fetched)
                fetched.unfinished -= fetched.to_start
                if fetched.unfinished == 0:
                    self._forget(fetched)
                for index in range(fetched.request.num_sequences - fetched.to_start, fetched.request.num_sequences):
                    self._outbox.tell(fetched.listener, Progress.unstarted(fetched.request, index))
                break
        for sequence in self._running:
            if sequence.number == number and not sequence.finished:
                sequence.finish(CANCELLED)
                self._outbox.tell(self._owners[id(sequence)].listener, Progress.of(sequence, self._pool))
        self._end_finished()

    def _forget(self, fetched: _Fetched) -> None:
        if fetched.request.task is not None and self._store is not None:
            self._store.release(fetched.request.task)

    # one step ---------------------------------------------------------------------------------------------------

    def _batch(self, chunks: list[Chunk]) -> Batch:
        tasks = [chunk.sequence.task if self._store is not None else None for chunk in chunks]
        if self._store is not None:
            self._stack.hold(tasks, self._store.rows)
        sizes = np.array([chunk.num_tokens for chunk in chunks], np.int32)
        past = np.array([chunk.sequence.num_computed for chunk in chunks], np.int32)
        begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        used = [self._pool.blocks_for(int(end)) for end in past + sizes]
        places = np.repeat(np.array([self._stack.place(task) for task in tasks], np.int32), sizes)
        groups, place = group_tokens(places, self._stack.num_held)
        rows = [self._logit_rows(chunk, int(begins[i])) for i, chunk in enumerate(chunks)]
        return Batch(
            token_ids_T=np.array([t for c in chunks for t in _tokens(c)], np.int32),
            positions_T=np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in zip(past, sizes, strict=True)]),
            past_lens_S=past,
            begins_S1=begins,
            block_ids=np.array([b for c, n in zip(chunks, used, strict=True) for b in c.sequence.blocks[:n]], np.int32),
            block_begins_S1=np.concatenate([[0], np.cumsum(used)]).astype(np.int32),
            logit_rows_R=np.array([row for some in rows for row in some], np.int32),
            groups_nm=groups,
            place_T=place,
            adapter_T=places,
        )

    def _logit_rows(self, chunk: Chunk, begin: int) -> range:
        """Rows of the step whose logits this chunk needs: all for context logits, else the last if it is sampled."""
        end = begin + chunk.num_tokens
        if chunk.sequence.request.wants_context_logits and not chunk.sequence.num_generated:
            return range(begin, end)
        return range(end - 1, end)

    def _take(self, chunks: list[Chunk], logits: Floats) -> None:
        """Choose tokens from the step's logits and tell the listeners."""
        best, row = logits.argmax(axis=1), 0
        for chunk in chunks:
            sequence = chunk.sequence
            rows = len(self._logit_rows(chunk, 0))
            if sequence.request.wants_context_logits and not sequence.num_generated:
                sequence.context_logits.append(logits[row : row + rows].copy())
            row += rows
            sequence.num_computed += chunk.num_tokens
            if sequence.num_computed < len(sequence.tokens):
                continue
            if not sequence.num_generated:
                self._pool.learn(sequence.task, sequence.tokens, sequence.blocks)
            sequence.choose(logits[row - 1], int(best[row - 1]))
            if sequence.finished or sequence.request.streaming:
                self._outbox.tell(self._owners[id(sequence)].listener, Progress.of(sequence, self._pool))

    def _end_finished(self) -> None:
        ended = [sequence for sequence in self._running if sequence.finished]
        if not ended:
            return
        self._running = [sequence for sequence in self._running if not sequence.finished]
        for sequence in ended:
            self._pool.learn(sequence.task, sequence.tokens[: sequence.num_computed], sequence.blocks)
            self._pool.give_back(sequence.blocks)
            fetched = self._owners.pop(id(sequence))
            fetched.unfinished -= 1
            if fetched.unfinished == 0:
                self._forget(fetched)

    def _fail_running(self, text: str) -> None:
        for sequence in self._running:
            if not sequence.finished:
                sequence.finish(CANCELLED)
                self._outbox.fail(self._owners[id(sequence)].listener, executor_failed(sequence.number, text))


def _tokens(chunk: Chunk) -> list[int]:
    sequence = chunk.sequence
    return sequence.tokens[sequence.num_computed : sequence.num_computed + chunk.num_tokens]
