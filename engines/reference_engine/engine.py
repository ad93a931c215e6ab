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

from reference_engine.decoder import Decoder, Floats
from reference_engine.errors import RequestRefused, executor_failed, fetching
from reference_engine.kv_blocks import BlockPool
from reference_engine.lora_stack import LoraStack
from reference_engine.lora_store import LoraStore
from reference_engine.outbox import Listener, Outbox
from reference_engine.progress import Progress
from reference_engine.request import GenerationRequest
from reference_engine.sampling import Sampler
from reference_engine.scheduler import Chunk, plan_step
from reference_engine.sequence import CANCELLED, Sequence
from reference_engine.step import build_batch, num_logit_rows
from trtllm_lora import EngineShape
from trtllm_lora.request_rules import too_long

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
        request = self._staged(request)
        with self._wake:
            self._numbers += 1
            number = self._numbers
            self._mail.append(lambda: self._fetch(number, request, listener))
            self._wake.notify()
        return number

    def _staged(self, request: GenerationRequest) -> GenerationRequest:
        """Copy what a request pushes in the caller's thread: neither the loop nor any stream waits for it."""
        if self._store is None or request.task is None or request.lora_weights is None or request.lora_config is None:
            return request
        staged = self._store.stage(request.task, request.lora_weights, request.lora_config)
        return dataclasses.replace(request, lora_staged=staged)

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
                while not (self._mail or self._running or self._closing):
                    self._wake.wait()
                mail, self._mail = self._mail, deque()
                closing = self._closing
            for act in mail:
                act()
                self._start_waiting()
            if closing:
                for number in [*(f.number for f in self._waiting), *(s.number for s in self._running)]:
                    self._cancel(number)
                return
            if self._running:
                self._run_step()
                self._start_waiting()

    def _run_step(self) -> None:
        chunks = plan_step(self._running, self._limits.max_num_tokens)
        try:
            if self._store is not None:
                self._stack.hold([chunk.sequence.task for chunk in chunks], self._store.rows)
            batch = build_batch(chunks, self._pool, self._stack)
            self._take(chunks, self._decoder.step(batch, self._stack))
        except Exception as error:  # the loop outlives any step
            log.exception("step failed")
            self._fail_running(f"Encountered an error in forwardAsync function: {error}")
        self._end_finished()

    # requests ---------------------------------------------------------------------------------------------------

    def _fetch(self, number: int, request: GenerationRequest, listener: Listener) -> None:
        try:
            request = self._checked(request)
        except RequestRefused as error:
            self._outbox.fail(listener, executor_failed(number, str(error)))
            return
        except Exception as error:  # whatever a request does, the loop goes on and its sender hears of it
            log.exception("request %d failed", number)
            self._outbox.fail(listener, executor_failed(number, fetching(str(error))))
            return
        self._waiting.append(_Fetched(number, request, listener, request.num_sequences, request.num_sequences))

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        """The executor's checks in its order; on return the adapter is in progress and its tensors are let go."""
        limits, bound = self._limits, self._limits.max_queue_size
        if bound and len(self._waiting) >= bound:
            raise RequestRefused(f"Maximum queue size of {bound} has been reached, please try again later")
        if request.task is not None and self._store is not None:
            self._store.admit(request.task, request.lora_weights, request.lora_config, request.lora_staged)
        length = len(request.token_ids)
        problem = None
        if length > limits.max_input_len:
            problem = too_long(length, limits.max_input_len)
        longest = min(length + request.max_new_tokens, limits.max_seq_len)
        if self._pool.blocks_for(longest) > self._pool.num_blocks:
            capacity = self._pool.num_blocks * self._pool.block_tokens
            problem = f"{longest} tokens of prompt and answer exceed the paged KV cache of {capacity} tokens"
        if problem:
            if request.task is not None and self._store is not None:
                self._store.release(request.task)
            raise RequestRefused(fetching(problem))
        return dataclasses.replace(
            request, max_new_tokens=longest - length, lora_weights=None, lora_config=None, lora_staged=None
        )

    def _start_waiting(self) -> None:
        """Give places to waiting requests, in order; one that only lacks device pages lets others pass."""
        passed: deque[_Fetched] = deque()
        while self._waiting and len(self._running) < self._limits.max_batch_size:
            fetched = self._waiting[0]
            if not self._device_ready(fetched.request.task):
                passed.append(self._waiting.popleft())
            elif not self._start(fetched):
                break
            elif fetched.to_start == 0:
                self._waiting.popleft()
        self._waiting.extendleft(reversed(passed))

    def _device_ready(self, task: int | None) -> bool:
        if task is None or self._store is None:
            return True
        return self._store.bring(task, [s.task for s in self._running if s.task is not None])

    def _start(self, fetched: _Fetched) -> bool:
        request, index = fetched.request, fetched.request.num_sequences - fetched.to_start
        total = len(request.token_ids) + request.max_new_tokens
        taken = self._pool.take(request.task, request.token_ids, total, reuse=not request.wants_context_logits)
        if taken is None:
            return False
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

    def _take(self, chunks: list[Chunk], logits: Floats) -> None:
        """Choose tokens from the step's logits and tell the listeners."""
        best, row = logits.argmax(axis=1), 0
        for chunk in chunks:
            sequence = chunk.sequence
            rows = num_logit_rows(chunk)
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
