"""Adapters brought into slots before traffic: which ones, and each by a real request, so that every link was used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import AsyncRetrying, RetryError, retry_if_exception, retry_if_result, stop_after_delay, wait_fixed

from adapter_slots.registry_entries import Content, split_version
from lora_slots.async_client import AsyncClient
from lora_slots.errors import ServerError, Unreachable

PROMPT = "Hello"
NOTICED_S = 15.0
"""How long a server may take to see a change of its registry (10 s in an object store)."""
_LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one adapter."""

    adapter: str
    found_in: str | None = None
    """Tier it was in: SLOT, HOST, DISK or REMOTE; None: it is not warm."""
    waited_s: float | None = None
    """Until it was in a slot, as the server says."""
    seconds: float = 0.0
    """All of it, the token included, as seen from here."""
    error: str | None = None
    code: str | None = None
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """What is warmed, the most important first, and what finds no slot."""

    names: Sequence[str]
    left_out: Sequence[str]
    slots: int


def names_of(content: Content) -> list[str]:
    """Everything a registry leads to, as `adapter@version`: the pinned first, then what aliases need, then the rest."""
    pinned = {entry.ref for entry in content.entries.values() if entry.pinned}
    targets = {content.resolve(target).ref for alias in content.aliases.values() for target in alias.targets}
    refs = {entry.ref for entry in content.serving.values()}
    return sorted(refs, key=lambda ref: (ref not in pinned, ref not in targets, ref))


def choose(names: Sequence[str], status: dict[str, Any]) -> Choice:
    """As many as there are slots that no other adapter is pinned in; `status` is the slot manager's."""
    names = list(dict.fromkeys(names))
    asked = {_adapter(name) for name in names}
    others = sum(a["pinned"] and a["tier"] == "SLOT" and _adapter(a["name"]) not in asked for a in status["adapters"])
    room = max(0, status["num_slots"] - others)
    return Choice(names[:room], names[room:], status["num_slots"])


async def until_ready(client: AsyncClient, seconds: float) -> None:
    """Wait so long for a server that can be asked. Raises Unreachable."""
    waiting = AsyncRetrying(
        retry=retry_if_result(lambda ready: not ready), stop=stop_after_delay(seconds), wait=wait_fixed(_LOOK_AGAIN_S)
    )
    try:
        await waiting(client.ready)
    except RetryError:
        raise Unreachable(f"no server was ready at {client.url} within {seconds:g} s") from None


async def prewarm(
    client: AsyncClient,
    names: Sequence[str],
    *,
    jobs: int,
    timeout_s: float,
    published: Collection[str] = (),
    told: Callable[[Outcome], object],
) -> list[Outcome]:
    """Warm each adapter and have it give one token through the ensemble, `jobs` at a time, in the order given.

    Args:
        timeout_s: for each adapter.
        published: names that a registry has, which the server may see a moment later.
        told: hears of each outcome as it comes.
    """
    turn = asyncio.Semaphore(jobs)

    async def one(name: str) -> Outcome:
        async with turn:
            outcome = await _warm(client, name, timeout_s, NOTICED_S if name in published else 0.0)
        told(outcome)
        return outcome

    return list(await asyncio.gather(*map(one, names)))


async def _warm(client: AsyncClient, name: str, timeout_s: float, noticed_s: float) -> Outcome:
    began = time.monotonic()
    unseen = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, ServerError) and error.code == "NOT_FOUND"),
        stop=stop_after_delay(min(noticed_s, timeout_s)),
        wait=wait_fixed(_LOOK_AGAIN_S),
        reraise=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            answer: dict[str, Any] = await unseen(client.warm, name)
            await client.generate(PROMPT, adapter=name, max_tokens=1)
    except TimeoutError:
        return Outcome(name, None, None, _since(began), f"not warm within {timeout_s:g} s", "DEADLINE_EXCEEDED")
    except ServerError as error:
        gone = isinstance(error, Unreachable)
        return Outcome(name, None, None, _since(began), str(error), error.code, gone)
    return Outcome(name, answer["found_in"], round(answer["waited_s"], 4), _since(began))


def _since(began: float) -> float:
    return round(time.monotonic() - began, 4)


def _adapter(name: str) -> str:
    parts = split_version(name)
    return parts[0] if parts else name
