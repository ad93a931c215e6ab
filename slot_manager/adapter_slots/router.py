"""What `lora_router` does with a request: adapter name -> lease -> `lora_task_id`, or an operation.

The Triton model translates tensors to and from `Incoming`; every decision is here. A request without an adapter goes
on untouched. Weights never come from clients: they would push adapters out of the engine behind the machine's back.
"""

from __future__ import annotations

import difflib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from adapter_slots.errors import AdapterCold, BadRequest, SlotError
from adapter_slots.events import Grant
from adapter_slots.manager import Owner, SlotManager
from adapter_slots.ports import Clock

FIRST_TOKEN_S = 30.0
"""Added to every lease's deadline: queueing and prefill."""
MAX_HELD_TOKENS = 8192
"""Tokens a lease is held for at most: max_tokens is the client's word, and an absurd one would hold a slot for ever."""
ANONYMOUS_MARGIN_S = 2.0
GUESSED_TOKEN_S = 0.1

OPERATIONS = ("status", "explain", "lease", "end", "missed", "verify", "warm", "pin", "unpin", "evict", "drain")
_OTHER_NAMES = ("lora", "lora_name", "lora_path", "lora_adapter", "adapter_name", "adapter_id", "model_id")
"""What other servers call the choice of an adapter."""
Reply = Callable[[Mapping[str, Any]], None]
Fail = Callable[[SlotError], None]
Gone = Callable[[], bool]


class Incoming(Protocol):
    """One request of the ensemble, as the Triton model hands it over."""

    request_id: str
    """The client's id; empty if it gave none."""
    adapter: str | None
    task_id: int | None
    has_weights: bool
    max_tokens: int
    parameters: Mapping[str, Any]
    """Triton's request parameters. HTTP's generate makes one of every field that is no input: of a misspelt one too."""

    def forward(self, task_id: int | None, *, report_end: bool) -> None:
        """Send the request on, under a task id or (None) to the base model."""

    def fail(self, error: SlotError) -> None:
        """Answer the request with an error."""


class Router:
    """Routes requests through one slot manager. Thread-safe as the manager is."""

    def __init__(
        self, manager: SlotManager, *, wait_s: float, cold: str = "wait", clock: Clock = time.monotonic
    ) -> None:
        self._manager = manager
        self._wait_s = wait_s
        self._cold = cold
        self._clock = clock
        self._token_s = GUESSED_TOKEN_S
        self._granted_at: dict[str, float] = {}
        self._numbers = itertools.count(1)

    def route(self, incoming: Incoming) -> None:
        """Grant, wait or refuse; `incoming` is told exactly once. Never blocks."""
        try:
            name = self._adapter_of(incoming)
            if name is None:
                incoming.forward(None, report_end=False)
                return
            lease = incoming.request_id or f"anonymous-{next(self._numbers)}"
            owner = Owner(lambda grant: self._granted(incoming, grant), incoming.fail)
            self._manager.acquire(
                name,
                lease,
                owner,
                wait_s=self._wait_s,
                hold_s=self._hold_s(incoming.max_tokens, reported=bool(incoming.request_id)),
                waits=self._waits(str(incoming.parameters.get("cold", ""))),
            )
        except SlotError as error:
            incoming.fail(error)

    def operate(self, op: str, arguments: str, reply: Reply, fail: Fail, gone: Gone = lambda: False) -> None:
        """Carry out an operation (see OPERATIONS). Answers once, perhaps from another thread.

        `gone` says whether the caller has left meanwhile: a lease is not given to nobody.
        """
        try:
            values = _arguments(arguments)
            match op:
                case "status":
                    reply(self._manager.status())
                case "explain":
                    reply(self._manager.explain(_text(values, "adapter")))
                case "lease":
                    self._lease(values, reply, fail, gone)
                case "end":
                    reply({"ended": self.end(_text(values, "request_id"), int(values.get("tokens", 0)))})
                case "verify":
                    self._manager.verify()
                    reply({"op": op})
                case "missed":
                    self._manager.missed(_text(values, "adapter"))
                    reply({"op": op})
                case "warm":
                    self._warm(_text(values, "adapter"), reply, fail)
                case "pin" | "unpin" | "evict":
                    adapter = _text(values, "adapter")
                    getattr(self._manager, op)(adapter)
                    reply({"op": op, "adapter": adapter})
                case "drain":
                    self._manager.drain(bool(values.get("on", True)))
                    reply({"op": op, "on": bool(values.get("on", True))})
                case _:
                    raise BadRequest(f"no operation {op[:40]!r}; there are {', '.join(OPERATIONS)}")
        except SlotError as error:
            fail(error)

    def end(self, request_id: str, tokens: int) -> bool:
        """The final response of a request was seen; False if it held no lease (any more)."""
        granted_at = self._granted_at.pop(request_id, None)
        if granted_at is not None and tokens > 0:
            seconds = (self._clock() - granted_at) / tokens
            self._token_s += 0.2 * (seconds - self._token_s)
        return self._manager.release(request_id)

    def _adapter_of(self, incoming: Incoming) -> str | None:
        if incoming.has_weights:
            raise BadRequest(
                "lora_weights and lora_config are pushed by the slot manager: publish the adapter in adapters.yaml "
                "and name it in the input 'adapter'"
            )
        if incoming.adapter == "":
            raise BadRequest("the input 'adapter' is empty: leave it out to ask the base model")
        strange = [key for key in incoming.parameters if _means_adapter(key)]
        if strange:
            raise BadRequest(f"there is no input {strange[0][:40]!r}; did you mean 'adapter'?")
        if incoming.adapter is not None and incoming.task_id is not None:
            raise BadRequest("give 'adapter' or 'lora_task_id', not both")
        if incoming.task_id is not None:
            return self._manager.name_of_task(incoming.task_id)
        return incoming.adapter

    def _granted(self, incoming: Incoming, grant: Grant) -> None:
        if incoming.request_id:
            self._granted_at[incoming.request_id] = self._clock()
        incoming.forward(grant.task_id, report_end=bool(incoming.request_id))

    def _hold_s(self, max_tokens: int, *, reported: bool) -> float:
        generation_s = max(0, min(max_tokens, MAX_HELD_TOKENS)) * self._token_s
        if reported:
            return FIRST_TOKEN_S + 4 * generation_s
        # nobody will report the end: hold about as long as the answer takes
        return ANONYMOUS_MARGIN_S + 1.5 * generation_s

    def _waits(self, cold: str) -> bool:
        policy = cold or self._cold
        if policy not in ("wait", "fail"):
            raise BadRequest(f"cold policy {policy[:20]!r}: an ensemble's request can 'wait' or 'fail'")
        return policy == "wait"

    def _lease(self, values: Mapping[str, Any], reply: Reply, fail: Fail, gone: Gone) -> None:
        """The direct door: a lease for a client that talks to `tensorrt_llm` itself and reports the end by `end`."""
        adapter, lease, cold = _text(values, "adapter"), _text(values, "request_id"), values.get("cold", self._cold)
        if cold not in ("wait", "fail", "base"):
            raise BadRequest(f"cold policy {str(cold)[:20]!r}: there are wait, fail, base")

        def granted(grant: Grant) -> None:
            if gone():
                self._manager.release(lease)
                return
            self._granted_at[lease] = self._clock()
            found = {"found_in": grant.found_in.name, "waited_s": grant.waited_s}
            reply({"task_id": grant.task_id, "digest": grant.adapter, "base": False, **found})

        def refused(error: SlotError) -> None:
            if cold == "base" and isinstance(error, AdapterCold):
                reply({"task_id": None, "digest": None, "base": True, "why": str(error)})
            else:
                fail(error)

        self._manager.acquire(
            adapter,
            lease,
            Owner(granted, refused),
            wait_s=float(values.get("wait_s", self._wait_s)),
            hold_s=self._hold_s(int(values.get("max_tokens", 0)), reported=True),
            waits=cold == "wait",
        )

    def _warm(self, adapter: str, reply: Reply, fail: Fail) -> None:
        lease = f"warm-{next(self._numbers)}"

        def granted(grant: Grant) -> None:
            self._manager.release(lease)
            reply({"op": "warm", "adapter": adapter, "found_in": grant.found_in.name, "waited_s": grant.waited_s})

        self._manager.acquire(adapter, lease, Owner(granted, fail), wait_s=self._wait_s, hold_s=self._wait_s)


def _means_adapter(field: str) -> bool:
    """Whether an unknown field was most likely meant to choose an adapter: the base must not answer it."""
    plain = field.lower().replace("-", "_")
    return plain in _OTHER_NAMES or bool(difflib.get_close_matches(plain, ("adapter",), n=1, cutoff=0.7))


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text or "{}")
    except ValueError as error:
        raise BadRequest(f"op_args is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest("op_args must be a JSON object")
    return values


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"op_args needs {key!r}")
    return value
