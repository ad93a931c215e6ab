"""What every request of the gateway shares, and what is done with one before the engine sees it."""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from adapter_slots.registry import Registry
from lora_slots.gateway.bodies import ChatBody, CompletionBody
from lora_slots.gateway.door import Door
from lora_slots.gateway.errors import invalid, unauthorized
from lora_slots.gateway.generation import Generation
from lora_slots.gateway.jobs import EngineFacts, Job, chat_job, chat_text, check_text, completion_job, encode_prompts
from lora_slots.gateway.limits import TenantLimits
from lora_slots.gateway.metrics import GatewayMetrics
from lora_slots.gateway.names import Target, allowed, resolve, unknown
from lora_slots.gateway.record import COLD_HEADER, Record
from lora_slots.gateway.tenants import Caller, Tenant, TenantsSource
from lora_slots.text import Tokenizer

SESSION_HEADER = "x-session-id"
COLD = ("wait", "fail", "base")
_chance = random.SystemRandom()
MAX_ANSWERS = 128
"""Answers of one request: prompts × n."""
_LONG_TEXT = 4096
"""Characters of a request from which they are tokenised in a thread: a few ms of it would hold up every stream."""
_MESSAGE = 64
"""Characters that count for a message beside its text: the template takes its time for an empty one too."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a raw PEFT adapter becomes a bundle for a server that cannot do it (it has no `disk_dir`)."""

    base: Path
    engine: Path


@dataclass(slots=True)
class Gateway:
    """The parts of a running gateway."""

    door: Door
    registry: Registry
    tokenizer: Tokenizer
    facts: EngineFacts
    base: str
    """The base model's served name."""
    tenants: TenantsSource | None
    """None: everybody may use everything; only for a gateway that listens on loopback."""
    max_body_bytes: int
    body_timeout_s: float
    conversion: Conversion | None
    """None: raw PEFT adapters are the server's to convert."""
    started: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    limits: TenantLimits = field(default_factory=TenantLimits)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    _names: dict[str | None, tuple[object, object, list[str]]] = field(default_factory=dict)

    def authenticate(self, authorization: str | None) -> Caller:
        """Who sends a request, by its Authorization header. Raises ApiError 401."""
        if self.tenants is None:
            return Caller(None)
        key = _bearer(authorization)
        if key is None:
            raise unauthorized("An API key is needed: 'Authorization: Bearer ls-…'.")
        caller = self.tenants.current().caller(key)
        if caller is None:
            raise unauthorized("This API key is not known.")
        return caller

    def authenticate_admin(self, authorization: str | None) -> None:
        """Let only a key of the admin port through, by its Authorization header. Raises ApiError 401."""
        key = _bearer(authorization)
        if key is None or self.tenants is None or not self.tenants.current().is_admin(key):
            raise unauthorized("A key of the admin port is needed: 'Authorization: Bearer ls-…'.")

    def names(self, tenant: Tenant | None) -> Sequence[str]:
        """The model names a tenant may use, sorted; made anew when the registry or the tenant changed."""
        name, content = tenant.name if tenant else None, self.registry.content
        known = self._names.get(name)
        if known is None or known[0] is not content or known[1] is not tenant:
            known = self._names[name] = (content, tenant, allowed(content, self.base, tenant))
        return known[2]

    def find(self, model: str, tenant: Tenant | None, *, key: str | None, draw: float) -> Target:
        """What a model name means. Raises ApiError 404."""
        target = resolve(self.registry.content, self.base, model, tenant, key=key, draw=draw)
        if target is None:
            raise unknown(model, self.names(tenant))
        return target

    async def generation(
        self, body: ChatBody | CompletionBody, record: Record, headers: Mapping[str, str]
    ) -> Generation:
        """One request, not begun. Raises ApiError: no such model, a wrong field."""
        caller = record.caller or Caller(None)
        key = headers.get(SESSION_HEADER) or body.user or caller.key_id
        draw = _chance.random()

        def resolve_now() -> Target:
            return self.find(body.model, caller.tenant, key=key, draw=draw)

        resolve_now()
        cold = headers.get(COLD_HEADER)
        if cold is not None and cold not in COLD:
            raise invalid(f"{COLD_HEADER}: must be one of {', '.join(COLD)}", COLD_HEADER)
        job = await (self._chat(body) if isinstance(body, ChatBody) else self._completion(body))
        record.prompt_tokens = job.prompt_tokens
        record.prompt_hash = prompt_hash(job)
        return Generation(self.door, self.limits, self.tokenizer, job, resolve_now, cold, self.base, record)

    async def _chat(self, body: ChatBody) -> Job:
        check_count(1, body.n)

        def encode() -> list[int]:
            text = chat_text(body, self.tokenizer)
            check_text(text, self.tokenizer, self.facts, "messages")
            return self.tokenizer.encode_batch([text], add_special_tokens=False)[0]

        size = sum(len(message.content) + _MESSAGE for message in body.messages)
        return chat_job(body, await _run(encode, size), self.tokenizer, self.facts, new_seed())

    async def _completion(self, body: CompletionBody) -> Job:
        check_count(len(body.prompt), body.n)
        texts = [one for one in body.prompt if isinstance(one, str)]
        encode = partial(encode_prompts, texts, self.tokenizer, self.facts)
        ids = await _run(encode, sum(map(len, texts))) if texts else body.prompt
        return completion_job(body, ids, self.tokenizer, self.facts, new_seed())


async def _run(encode: Callable[[], _Result], size: int) -> _Result:
    """The result, from a thread if `size` characters would take long."""
    return encode() if size < _LONG_TEXT else await asyncio.to_thread(encode)


def check_count(prompts: int, n: int | None) -> None:
    """Raises ApiError 400: more answers than one request may have."""
    count = prompts * (n or 1)
    if count > MAX_ANSWERS:
        param = "n" if prompts == 1 else "prompt"
        raise invalid(f"{param}: {count} answers in one request, and at most {MAX_ANSWERS} are given", param)


def prompt_hash(job: Job) -> str:
    """What a log may have of a prompt: equal prompts have equal ones."""
    digest = hashlib.sha256()
    for prompt in job.prompts:
        digest.update(array("i", prompt).tobytes())
    return digest.hexdigest()[:16]


def new_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(63)


def _bearer(authorization: str | None) -> str | None:
    """The key in an Authorization header; None if there is none."""
    kind, _, key = (authorization or "").partition(" ")
    return key.strip() or None if kind.lower() == "bearer" else None
