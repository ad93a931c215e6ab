"""What `lora_router` does with a request: adapter name -> lease -> `lora_task_id`, or an operation.

The Triton model translates tensors to and from `Incoming`; every decision is here. A request without an adapter goes
on untouched. Weights never come from clients: they would push adapters out of the engine behind the machine's back.
"""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from adapter_slots.errors import AdapterCold, BadRequest, SlotError
from adapter_slots.events import Grant
from adapter_slots.manager import Owner, SlotManager
from adapter_slots.operations import OPERATIONS, Arguments
from adapter_slots.ports import Clock
from adapter_slots.registry import Entry
from adapter_slots.settings import FIRST_TOKEN_S
from trtllm_lora.request_rules import RequestLimits, problems

ANONYMOUS_MARGIN_S = 2.0
GUESSED_TOKEN_S = 0.1
COLD = ("wait", "fail", "base")
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
    parameters: Mapping[str, Any]
    """Triton's request parameters. HTTP's generate makes one of every field that is no input: of a misspelt one too."""

    def numbers(self) -> Mapping[str, float]:
        """The engine's input tensors of one number: name -> number."""

    def prompt_len(self) -> int:
        """Tokens of the prompt."""

    def forward(self, task_id: int | None) -> None:
        """Send the request on, under a task id or (None) to the base model."""

    def fail(self, error: SlotError) -> None:
        """Answer the request with an error."""


@dataclass(slots=True)
class _Running:
    """A lease whose end will be reported."""

    granted_at: float
    open_sequences: int
    """Answers that have not ended; the lease ends with the last."""


class Router:
    """Routes requests through one slot manager. Thread-safe as the manager is."""

    def __init__(
        self,
        manager: SlotManager,
        limits: RequestLimits,
        *,
        wait_s: float,
        cold: str = "wait",
        first_token_s: float = FIRST_TOKEN_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """`limits` are the engine's; a request waits `wait_s` for its adapter, or by `cold` does not wait.

        `first_token_s` is the time the engine may take to begin an answer: a lease is not reaped before.
        """
        self._manager = manager
        self._limits = limits
        self._wait_s = wait_s
        self._cold = cold
        self._first_token_s = first_token_s
        self._clock = clock
        self._token_s = GUESSED_TOKEN_S
        self._running: dict[str, _Running] = {}
        self._numbers = itertools.count(1)

    def route(self, incoming: Incoming) -> None:
        """Grant, wait or refuse; `incoming` is told exactly once. Never blocks."""
        try:
            name = self._adapter_of(incoming)
            numbers, prompt_len = incoming.numbers(), incoming.prompt_len()
            if found := problems(numbers, prompt_len, self._limits):
                # the engine would say the same, but without a code, and past postprocessing: the lease would stay
                raise BadRequest("; ".join(found))
            if name is None:
                incoming.forward(None)
                return
            entry = self._manager.resolve(name, _session(incoming.parameters) or incoming.request_id or None)
            new_tokens = self._limits.new_tokens(prompt_len, int(numbers.get("request_output_len", 0)))
            sequences = int(numbers.get("num_return_sequences", 1))
            lease = _client_lease(incoming.request_id) if incoming.request_id else f"anonymous:{next(self._numbers)}"

            def granted(grant: Grant) -> None:
                if incoming.request_id:
                    self._running[lease] = _Running(self._clock(), sequences)
                incoming.forward(grant.task_id)

            self._manager.acquire(
                entry,
                lease,
                Owner(granted, incoming.fail, lambda: self._forget(lease)),
                wait_s=self._wait_s,
                hold_s=self._hold_s(new_tokens, reported=bool(incoming.request_id)),
                waits=self._waits(str(incoming.parameters.get("cold", "")), entry),
            )
        except SlotError as error:
            incoming.fail(error)

    def operate(self, op: str, arguments: str, reply: Reply, fail: Fail, gone: Gone = lambda: False) -> None:
        """Carry out an operation (see OPERATIONS). Answers once, perhaps from another thread.

        `gone` says whether the caller has left meanwhile: a lease is not given to nobody.
        """
        try:
            values = Arguments(arguments)
            match op:
                case "status":
                    reply(self._manager.status())
                case "explain":
                    reply(self._manager.explain(values.text("adapter")))
                case "lease":
                    self._lease(values, reply, fail, gone)
                case "end":
                    reply({"ended": self.end(values.text("request_id"), values.count("tokens", 0))})
                case "verify":
                    self._manager.verify()
                    reply({"op": op})
                case "missed":
                    self._manager.missed(values.text("adapter"))
                    reply({"op": op})
                case "warm":
                    self._warm(values.text("adapter"), reply, fail)
                case "pin" | "unpin" | "evict":
                    adapter = values.text("adapter")
                    getattr(self._manager, op)(adapter)
                    reply({"op": op, "adapter": adapter})
                case "drain":
                    on = values.flag("on", True)
                    self._manager.drain(on)
                    reply({"op": op, "on": on})
                case _:
                    raise BadRequest(f"no operation {op[:40]!r}; there are {', '.join(OPERATIONS)}")
        except SlotError as error:
            fail(error)

    def end(self, request_id: str, tokens: int) -> bool:
        """One answer of a request has ended, with `tokens` tokens; the last one ends the lease.

        False if the request held no lease (any more).
        """
        lease = _client_lease(request_id)
        running = self._running.get(lease)
        if running is not None:
            if tokens > 0:
                seconds = (self._clock() - running.granted_at) / tokens
                self._token_s += 0.2 * (seconds - self._token_s)
            running.open_sequences -= 1
            if running.open_sequences > 0:
                return True
        self._forget(lease)
        return self._manager.release(lease)

    def _forget(self, lease: str) -> None:
        self._running.pop(lease, None)

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

    def _hold_s(self, new_tokens: int, *, reported: bool) -> float:
        generation_s = new_tokens * self._token_s
        if reported:
            return self._first_token_s + 4 * generation_s
        # nobody will report the end: hold about as long as the answer takes
        return ANONYMOUS_MARGIN_S + 1.5 * generation_s

    def _waits(self, cold: str, entry: Entry) -> bool:
        """By the request's own policy, else the adapter's. Its `base` is `fail` here: an answer could not be marked."""
        if cold not in ("", "wait", "fail"):
            raise BadRequest(f"cold policy {cold[:20]!r}: an ensemble's request can 'wait' or 'fail'")
        return (cold or entry.cold or self._cold) == "wait"

    def _lease(self, values: Arguments, reply: Reply, fail: Fail, gone: Gone) -> None:
        """The direct door: a lease for a client that talks to `tensorrt_llm` itself and reports the end by `end`."""
        request_id = values.text("request_id")
        entry = self._manager.resolve(values.text("adapter"), values.optional("session") or request_id)
        lease = _client_lease(request_id)
        cold = values.choice("cold", COLD, entry.cold or self._cold)
        wait_s = values.number("wait_s", self._wait_s)
        new_tokens = self._limits.new_tokens(0, values.count("max_tokens", 0))

        def granted(grant: Grant) -> None:
            if gone():
                self._manager.release(lease)
                return
            self._running[lease] = _Running(self._clock(), 1)
            found = {"found_in": grant.found_in.name, "waited_s": grant.waited_s}
            chosen = {"adapter": entry.name, "version": entry.version}
            reply({"task_id": grant.task_id, "digest": grant.adapter, "base": False, **chosen, **found})

        def refused(error: SlotError) -> None:
            if cold == "base" and isinstance(error, AdapterCold):
                reply({"task_id": None, "digest": None, "base": True, "why": str(error)})
            else:
                fail(error)

        self._manager.acquire(
            entry,
            lease,
            Owner(granted, refused, lambda: self._forget(lease)),
            wait_s=wait_s,
            hold_s=self._hold_s(new_tokens, reported=True),
            waits=cold == "wait",
        )

    def _warm(self, adapter: str, reply: Reply, fail: Fail) -> None:
        lease = f"warm:{next(self._numbers)}"

        def granted(grant: Grant) -> None:
            self._manager.release(lease)
            reply({"op": "warm", "adapter": adapter, "found_in": grant.found_in.name, "waited_s": grant.waited_s})

        self._manager.acquire(adapter, lease, Owner(granted, fail), wait_s=self._wait_s, hold_s=self._wait_s)


def _client_lease(request_id: str) -> str:
    """The lease of a client's request; no id a client chooses can name a lease of the router's own."""
    return f"request:{request_id}"


def _session(parameters: Mapping[str, Any]) -> str:
    """The request parameter `session`, by which an alias is sticky; "" if there is none."""
    session = parameters.get("session")
    return "" if session is None else str(session)


def _means_adapter(field: str) -> bool:
    """Whether an unknown field was most likely meant to choose an adapter: the base must not answer it."""
    plain = field.lower().replace("-", "_")
    return plain in _OTHER_NAMES or bool(difflib.get_close_matches(plain, ("adapter",), n=1, cutoff=0.7))
