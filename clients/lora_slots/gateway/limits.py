"""What a tenant has used up: rates by the library `limits`, what runs now by counting. One event loop, no lock.

Requests are counted in a window that moves with them, exactly. Tokens are counted in the library's sliding counter of
two fixed minutes, whose cost does not grow with the limit; a prompt is charged before it runs and an answer when it has
ended, since nobody knows its length before. So an answer may overdraw the minute, by what runs at once, and what is
overdrawn is missing from the next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from lora_slots.gateway.errors import limited
from lora_slots.gateway.tenants import Tenant

WINDOW_S = 60
_COLD_RETRY_S = 1.0


class TenantLimits:
    """The counters of all tenants."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(self._storage)
        self._running: Counter[str] = Counter()
        self._loading: dict[str, Counter[str]] = {}

    def request(self, tenant: Tenant) -> None:
        """Count a request. Raises ApiError 429."""
        most = tenant.limits.requests_per_minute
        if most is None:
            return
        item = RateLimitItemPerMinute(most, namespace="requests")
        if not self._requests.hit(item, tenant.name):
            reset = self._requests.get_window_stats(item, tenant.name).reset_time
            raise limited(
                f"{most} requests a minute are allowed and have been used.", "requests_exceeded", reset - time.time()
            )

    def prompt(self, tenant: Tenant, tokens: int) -> None:
        """Charge the tokens of a prompt. Raises ApiError 429."""
        most = tenant.limits.tokens_per_minute
        if most is None:
            return
        if tokens > most:
            text = f"The prompt has {tokens} tokens and {most} a minute are allowed: it can never pass."
            raise limited(text, "tokens_exceeded", None)
        if not self._storage.acquire_sliding_window_entry(self._key(tenant), most, WINDOW_S, tokens):
            previous, previous_left_s, current, current_left_s = self._storage.get_sliding_window(
                self._key(tenant), WINDOW_S
            )
            wait_s = seconds_until(previous, previous_left_s, current, current_left_s - WINDOW_S, most - tokens)
            text = f"{most} tokens a minute are allowed; the prompt's {tokens} are more than is left."
            raise limited(text, "tokens_exceeded", wait_s)

    def answer(self, tenant: Tenant, tokens: int) -> None:
        """Charge the tokens of an answer that has ended; never refused."""
        if tenant.limits.tokens_per_minute is not None and tokens:
            _, current = self._storage.sliding_window_keys(self._key(tenant), WINDOW_S, time.time())
            self._storage.incr(current, 2 * WINDOW_S, tokens)

    @contextmanager
    def running(self, tenant: Tenant) -> Iterator[None]:
        """Count a request as running while the block runs. Raises ApiError 429."""
        most = tenant.limits.concurrent
        if most is not None and self._running[tenant.name] >= most:
            raise limited(f"{most} requests at once are allowed, and run.", "concurrency_exceeded", 1.0)
        self._running[tenant.name] += 1
        try:
            yield
        finally:
            self._running[tenant.name] -= 1

    def may_load(self, tenant: Tenant, digest: str) -> bool:
        """Whether waiting for this adapter could be one cold load more than the tenant may have."""
        most = tenant.limits.cold_loads
        loading = self._loading.get(tenant.name, Counter())
        return most is None or digest in loading or len(loading) < most

    def too_many_loads(self, tenant: Tenant) -> Exception:
        """The 429 of a cold load."""
        most = tenant.limits.cold_loads
        return limited(
            f"{most} adapters at once may be brought into slots for you, and are.", "cold_loads_exceeded", _COLD_RETRY_S
        )

    @contextmanager
    def loading(self, tenant: Tenant, digest: str) -> Iterator[None]:
        """Count an adapter as waited for while the block runs; waiting for one many times is one load."""
        loading = self._loading.setdefault(tenant.name, Counter())
        loading[digest] += 1
        try:
            yield
        finally:
            loading[digest] -= 1
            if not loading[digest]:
                del loading[digest]
            if not loading:
                self._loading.pop(tenant.name, None)

    @staticmethod
    def _key(tenant: Tenant) -> str:
        return f"tokens/{tenant.name}"


def seconds_until(
    previous: int, previous_left_s: float, current: int, current_left_s: float, allowed: int, window_s: float = WINDOW_S
) -> float:
    """When a sliding counter will have come down to `allowed`.

    Args:
        previous, current: counts of the last whole minute and of this one.
        previous_left_s: how much of the last minute still counts.
        current_left_s: seconds to the end of this minute.
        allowed: what may be counted so that a request passes; not below 0.
    """
    if current <= allowed and previous:
        return max(0.0, previous_left_s - (allowed - current) * window_s / previous)
    if current <= allowed:
        return 0.0
    return current_left_s + window_s * (1 - allowed / current)
