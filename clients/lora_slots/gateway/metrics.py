"""The gateway's own metrics; what adapters do is told by `lora_router` (docs/metrics.md)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lora_slots.gateway.record import Record

NO_TENANT = "-"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class GatewayMetrics:
    """Counters of one gateway. No label has an adapter's name: there may be ten thousand."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        prefix = "lora_slots_gateway_"
        self._requests = Counter(
            f"{prefix}requests", "Requests that have ended", ("route", "tenant", "outcome"),
            registry=self._registry,
        )  # fmt: skip
        self._tokens = Counter(
            f"{prefix}tokens", "Tokens, by tenant and kind", ("tenant", "kind"), registry=self._registry
        )
        self._first = Histogram(
            f"{prefix}first_token_seconds", "From a request to its first token, by where its adapter was",
            ("found_in",), buckets=_FIRST_TOKEN_S, registry=self._registry,
        )  # fmt: skip
        self.running = Gauge(f"{prefix}running", "Requests that run now", registry=self._registry)

    def ended(self, route: str, record: Record) -> None:
        """Count a request that has ended."""
        tenant = record.caller.tenant.name if record.caller and record.caller.tenant else NO_TENANT
        self._requests.labels(route, tenant, record.outcome or "ok").inc()
        self._tokens.labels(tenant, "prompt").inc(record.prompt_tokens)
        self._tokens.labels(tenant, "completion").inc(record.completion_tokens)
        if record.first_token_s is not None:
            self._first.labels(record.found_in or "none").observe(record.first_token_s)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
