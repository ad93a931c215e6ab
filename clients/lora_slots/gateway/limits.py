"""What a tenant has used up: requests by the library `limits`, tokens by a level, what runs now by counting. One event
loop, no lock.

Requests are counted in a window that moves with them, exactly. Tokens fill a level that falls by the limit in a minute,
without steps; a prompt is let in if the level, with it, is not above the limit. An answer is charged when it has ended,
since nobody knows its length before: it may lift the level above the limit by any amount, and nothing is let in until
that has fallen away. So however much runs at once, what has been charged when a prompt is let in, that prompt included,
is never more than the limit and what the time since the beginning allows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from lora_slots.gateway.errors import limited
from lora_slots.gateway.tenants import Tenant

MINUTE_S = 60
_COLD_RETRY_S = 1.0


class TenantLimits:
    """The counters of all tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds, for tokens; the library reads the wall clock."""
        self._clock = clock
        self._requests = MovingWindowRateLimiter(MemoryStorage())
        self._levels: dict[str, tuple[float, float]] = {}
        """Of each tenant, and when it was so high."""
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
        level = self._level(tenant, most)
        if level + tokens > most:
            text = f"{most} tokens a minute are allowed; the prompt's {tokens} are more than is left."
            raise limited(text, "tokens_exceeded", (level + tokens - most) * MINUTE_S / most)
        self._levels[tenant.name] = level + tokens, self._clock()

    def answer(self, tenant: Tenant, tokens: int) -> None:
        """Charge the tokens of an answer that has ended; never refused."""
        most = tenant.limits.tokens_per_minute
        if most is not None:
            self._levels[tenant.name] = self._level(tenant, most) + tokens, self._clock()

    def _level(self, tenant: Tenant, most: int) -> float:
        """Tokens that have been charged and have not fallen away."""
        level, then = self._levels.get(tenant.name, (0.0, 0.0))
        return max(0.0, level - (self._clock() - then) * most / MINUTE_S)

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
