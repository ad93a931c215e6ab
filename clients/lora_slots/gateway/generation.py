"""The life of one request: a lease, the engine's stream, its text, and everything given back at the end.

Rules:
1. The lease is held before the first byte of an answer, and given back however the request ends.
2. An engine miss before the first token is healed and tried again once, unseen.
3. When every answer has ended (a stop string, the length), the engine is told to stop.
4. A version that the server does not know yet, or any more, is looked up again for a moment: both read the registry at
   their own pace.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from types import TracebackType
from typing import Self

import structlog

from adapter_slots.registry import Entry
from lora_slots.client_wire import is_miss
from lora_slots.direct import Lease
from lora_slots.errors import ServerError
from lora_slots.gateway.choice import Choice
from lora_slots.gateway.door import Door
from lora_slots.gateway.errors import from_engine, from_lease, invalid
from lora_slots.gateway.jobs import Job
from lora_slots.gateway.limits import TenantLimits
from lora_slots.gateway.names import Target
from lora_slots.gateway.record import BASE_FOUND_IN, COLD_HEADER, Record
from lora_slots.gateway.responses import Piece
from lora_slots.gateway.tenants import Tenant
from lora_slots.text import Tokenizer

log = structlog.get_logger("lora_slots.gateway")
REGISTRY_LAG_S = 5.0
_LOOK_AGAIN_S = 0.1


class Generation:
    """One request. Inside the `async with` block it is being answered, and `record` says by what."""

    def __init__(
        self,
        door: Door,
        limits: TenantLimits,
        tokenizer: Tokenizer,
        job: Job,
        resolve: Callable[[], Target],
        cold: str | None,
        base: str,
        record: Record,
    ) -> None:
        """
        Args:
            resolve: what the model's name means now.
            cold: the request's wish for a cold adapter; None: the adapter's own.
            base: name of the base model.
        """
        self._door, self._limits, self.job = door, limits, job
        self._resolve, self._cold, self._base, self.record = resolve, cold, base, record
        self._lease: Lease | None = None
        self._stands_in = False
        """The base answers in an adapter's place."""
        self._pieces: AsyncGenerator[Piece, None] | None = None
        self._first: Piece | None = None
        self.choices = [
            Choice(index, job, tokenizer, job.echoes[index // job.n] if job.echoes else "")
            for index in range(len(job.prompts) * job.n)
        ]

    @property
    def served_model(self) -> str:
        """What the answer's `model` says: the name that was asked for, or the base's where it answered instead."""
        return self._base if self._stands_in else self.record.model or self._base

    async def __aenter__(self) -> Self:
        """Wait for the lease and for the engine's first word. Raises ApiError."""
        try:
            try:
                self._first = await self._start()
            except ServerError as error:
                adapter = self._lease.adapter if self._lease else None
                if not is_miss(error) or adapter is None:
                    raise
                await self._give_back()
                await self._door.operate("missed", adapter=adapter)
                self._first = await self._start()
        except ServerError as error:
            await self._give_back()
            raise from_engine(error) from None
        except BaseException:
            await self._give_back()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._give_back()

    async def texts(self) -> AsyncGenerator[tuple[Choice, str], None]:
        """Pieces of the answers as they come; a choice that has ended says so. Raises ApiError."""
        first, pieces = self._first, self._pieces
        try:
            if first is not None and pieces is not None:
                choice = self.choices[first.prompt * self.job.n + first.sequence]
                yield choice, choice.push(first.tokens, first.log_probs)
                if self._over():
                    return
                async for prompt, sequence, tokens, log_probs in pieces:
                    choice = self.choices[prompt * self.job.n + sequence]
                    if choice.finish_reason is not None:
                        continue
                    text = choice.push(tokens, log_probs)
                    if text or choice.finish_reason is not None:
                        yield choice, text
                        if choice.finish_reason is not None and self._over():
                            return
        except ServerError as error:
            raise from_engine(error) from None
        for choice in self.choices:
            if choice.finish_reason is None:
                yield choice, choice.end()

    def _over(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    async def _start(self) -> Piece | None:
        self._lease = await self._acquire()
        self._pieces = self._one_prompt(0) if len(self.job.prompts) == 1 else self._all_prompts()
        return await anext(self._pieces, None)

    async def _acquire(self) -> Lease:
        loop = asyncio.get_running_loop()
        until = loop.time() + REGISTRY_LAG_S
        while True:
            target = self._resolve()
            self.record.model = target.asked
            if target.entry is None:
                self._base_answers()
                return Lease(self.record.request_id, None, None, None, None, 0.0)
            try:
                return await self._ask(target.entry)
            except ServerError as error:
                if error.code != "NOT_FOUND" or loop.time() > until:
                    raise from_lease(error, target.asked) from None
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _ask(self, entry: Entry) -> Lease:
        tenant = self.record.caller.tenant if self.record.caller else None
        self.record.adapter, self.record.digest = entry.ref, entry.digest
        cold = self._cold or entry.cold or "wait"
        if cold == "base" and tenant is not None and not tenant.base:
            if self._cold:
                raise invalid(f"{COLD_HEADER}: you may not ask the base model", COLD_HEADER)
            cold = "wait"
        lease_id = f"{self.record.request_id}/{secrets.token_hex(4)}"  # two requests may have one id
        tokens = self.job.max_tokens * len(self.choices)
        with ExitStack() as loading:
            if tenant is not None:
                await self._count_load(tenant, entry, loading)
            try:
                lease = await self._door.lease(entry.ref, lease_id, max_tokens=tokens, cold=cold)
            except ServerError:
                if cold != "wait" and tenant is not None:
                    self._door.behind(self._until_loaded(entry.ref, loading.pop_all()))
                raise
            if lease.task_id is None and tenant is not None:
                self._door.behind(self._until_loaded(entry.ref, loading.pop_all()))
        if lease.digest not in (None, entry.digest):
            # the server's registry is older or newer than ours, and so may be what the tenant may use
            self._door.end(lease, 0)
            raise ServerError(f"{entry.ref} has another digest there", code="NOT_FOUND")
        self.record.waited_s = lease.waited_s
        self.record.found_in = (lease.found_in or "").lower()
        self._stands_in = lease.task_id is None
        if self._stands_in:
            self._base_answers(lease.waited_s)
        return lease

    def _base_answers(self, waited_s: float = 0.0) -> None:
        record = self.record
        record.adapter, record.digest, record.found_in, record.waited_s = self._base, None, BASE_FOUND_IN, waited_s

    async def _count_load(self, tenant: Tenant, entry: Entry, loading: ExitStack) -> None:
        """Count the adapter as waited for. Raises ApiError 429: it is in no slot, and enough others are waited for."""
        if not self._limits.may_load(tenant, entry.digest):
            state = await self._door.operate("explain", adapter=entry.ref)
            if state["tier"] != "SLOT":
                raise self._limits.too_many_loads(tenant)
        loading.enter_context(self._limits.loading(tenant, entry.digest))

    async def _until_loaded(self, adapter: str, loading: ExitStack) -> None:
        """A request that did not wait has begun a load all the same: it counts until it has ended."""
        with loading:
            try:
                await self._door.operate("warm", adapter=adapter)
            except ServerError as error:
                log.info("not loaded", adapter=adapter, why=str(error))

    def _one_prompt(self, index: int) -> AsyncGenerator[Piece, None]:
        job, lease = self.job, self._lease
        return self._door.generate(
            job.prompts[index],
            job.values,
            job.arrays,
            request_id=self.record.request_id,
            task_id=lease.task_id if lease else None,
            streaming=job.stream or bool(job.stops),
            number=index,
        )

    async def _all_prompts(self) -> AsyncGenerator[Piece, None]:
        """All prompts at once; the first error ends them."""
        news: asyncio.Queue[Piece | ServerError | None] = asyncio.Queue()

        async def follow(index: int) -> None:
            try:
                async with aclosing(self._one_prompt(index)) as pieces:
                    async for piece in pieces:
                        news.put_nowait(piece)
                news.put_nowait(None)
            except ServerError as error:
                news.put_nowait(error)

        tasks = [asyncio.ensure_future(follow(index)) for index in range(len(self.job.prompts))]
        try:
            running = len(tasks)
            while running:
                one = await news.get()
                if isinstance(one, ServerError):
                    raise one
                if one is None:
                    running -= 1
                else:
                    yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_back(self) -> None:
        pieces, self._pieces = self._pieces, None
        lease, self._lease = self._lease, None
        self.record.completion_tokens = sum(choice.num_tokens for choice in self.choices)
        try:
            if pieces is not None:
                await pieces.aclose()
        finally:
            if lease is not None:
                self._door.end(lease, self.record.completion_tokens)
