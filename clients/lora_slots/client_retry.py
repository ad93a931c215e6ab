"""When a request may be tried again: before its first token, and only for what another try can mend.

UNAVAILABLE (no connection, no slot in time, a move that failed, a server that drains) is tried again after a pause that
grows, with chance in it; if the server says when, not before. An engine miss is tried again at once. What was asked
wrongly never is, nor anything once a token came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenacity import RetryCallState, retry_if_exception, stop_after_attempt, stop_any, stop_before_delay
from tenacity.wait import wait_random_exponential

from lora_slots.client_wire import is_miss
from lora_slots.errors import ServerError

REPEATABLE = frozenset({"status", "explain", "warm", "pin", "unpin", "drain", "verify", "missed", "end"})
"""Operations that do no harm if they are carried out twice."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long."""

    attempts: int = 4
    """Tries in all; 1: none again."""
    total_s: float = 30.0
    """No try begins later than so many seconds after the first."""
    first_s: float = 0.1
    """The longest first pause; the next may be twice as long, and so on."""
    max_s: float = 5.0
    """The longest pause."""


ONCE = Retry(attempts=1)


def is_safe(error: BaseException, *, own_id: bool = True, waits: bool = True) -> bool:
    """Whether the request may be sent again after this error, with no token seen.

    Args:
        own_id: the client made the request's id, so that the next try has another.
        waits: False: the caller asked not to wait for an adapter that is in no slot.
    """
    if not isinstance(error, ServerError):
        return False
    if error.code == "UNAVAILABLE":
        return waits or error.retry_after_s is None
    return is_miss(error) or (error.code == "ALREADY_EXISTS" and own_id)


def rules(retry: Retry, *, own_id: bool = True, waits: bool = True, within_s: float | None = None) -> dict[str, Any]:
    """Arguments of tenacity's Retrying and AsyncRetrying. `within_s` bounds it further; the rest as `is_safe`."""
    total_s = retry.total_s if within_s is None else min(retry.total_s, within_s)
    growing = wait_random_exponential(multiplier=retry.first_s, max=retry.max_s)

    def pause_s(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        if is_miss(error):
            return 0.0
        return growing(state) + ((error.retry_after_s or 0.0) if isinstance(error, ServerError) else 0.0)

    return {
        "retry": retry_if_exception(lambda error: is_safe(error, own_id=own_id, waits=waits)),
        "stop": stop_any(stop_after_attempt(retry.attempts), stop_before_delay(total_s)),
        "wait": pause_s,
        "reraise": True,
    }
