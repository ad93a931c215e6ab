"""Limits of tenants at given times, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_slots.gateway.errors import ApiError
from lora_slots.gateway.limits import TenantLimits
from lora_slots.gateway.tenants import Limits, Tenant


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock that the library reads, to seconds of a whole minute."""

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0 + seconds)

    set_clock(0)
    return set_clock


def limited(call: Callable[[], object]) -> ApiError:
    """The 429 of a call."""
    with pytest.raises(ApiError) as error:
        call()
    assert error.value.status == 429
    return error.value


def test_requests_in_a_moving_minute(at: Callable[[float], None]) -> None:
    """The third of two has to wait until the first is a minute old; others are not touched."""
    limits, tenant = TenantLimits(), Tenant("a", limits=Limits(requests_per_minute=2))
    limits.request(tenant)
    at(20)
    limits.request(tenant)
    at(30)
    error = limited(lambda: limits.request(tenant))
    assert (error.code, error.headers["retry-after"]) == ("requests_exceeded", "31")
    limits.request(Tenant("b", limits=Limits(requests_per_minute=2)))
    at(61)
    limits.request(tenant)
    limited(lambda: limits.request(tenant))


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_tokens_are_charged_before_and_after() -> None:
    """An answer may overdraw; nothing is let in until that has fallen away; the wait that is told is enough."""
    clock = Clock()
    limits, tenant = TenantLimits(clock), Tenant("a", limits=Limits(tokens_per_minute=100))
    limits.prompt(tenant, 60)
    limits.answer(tenant, 90)
    error = limited(lambda: limits.prompt(tenant, 10))
    assert (error.code, error.headers["retry-after"]) == ("tokens_exceeded", "37"), "60 tokens fall away in 36 s"
    limits.prompt(Tenant("b", limits=Limits(tokens_per_minute=100)), 10)
    clock.now += 35.9
    limited(lambda: limits.prompt(tenant, 10))
    clock.now += 0.2
    limits.prompt(tenant, 10)


def test_what_is_overdrawn_at_once_is_missing_for_as_long_as_it_takes() -> None:
    """20 requests at once make 2,420 tokens of 100 a minute: the next is let in after 23 minutes, not after two."""
    clock = Clock()
    limits, tenant = TenantLimits(clock), Tenant("a", limits=Limits(tokens_per_minute=100))
    for _ in range(20):
        limits.prompt(tenant, 1)
    for _ in range(20):
        limits.answer(tenant, 120)
    clock.now += 90
    wait_s = int(limited(lambda: limits.prompt(tenant, 1)).headers["retry-after"])
    assert 1300 < wait_s < 1400
    clock.now += wait_s - 2
    limited(lambda: limits.prompt(tenant, 1))
    clock.now += 2
    limits.prompt(tenant, 1)


@given(
    most=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 300), st.integers(1, 500), st.integers(0, 3000)), max_size=40),
)
def test_no_course_of_requests_has_more_than_the_limit_in_the_long_run(
    most: int, steps: list[tuple[float, int, int]]
) -> None:
    """Whenever a prompt is let in, all that was charged is within the time's share; what is refused has to wait."""
    clock = Clock()
    limits, tenant = TenantLimits(clock), Tenant("a", limits=Limits(tokens_per_minute=most))
    began, charged = clock.now, 0
    for pause_s, prompt, answer in steps:
        clock.now += pause_s
        if prompt > most:
            assert limited(lambda: limits.prompt(tenant, prompt)).headers == {"x-should-retry": "false"}  # noqa: B023
            continue
        try:
            limits.prompt(tenant, prompt)
        except ApiError as error:
            wait_s = int(error.headers["retry-after"])
            clock.now += max(0, wait_s - 1.001)
            if wait_s > 1:
                limited(lambda: limits.prompt(tenant, prompt))  # noqa: B023
            clock.now += 1.001
            limits.prompt(tenant, prompt)
        charged += prompt
        assert charged <= most * (1 + (clock.now - began) / 60) + 1e-6
        limits.answer(tenant, answer)
        charged += answer


def test_a_limit_that_is_changed_counts_at_once() -> None:
    """For what is left of the level, too."""
    clock = Clock()
    limits = TenantLimits(clock)
    limits.answer(Tenant("a", limits=Limits(tokens_per_minute=100)), 1100)
    wider = Tenant("a", limits=Limits(tokens_per_minute=1000))
    limited(lambda: limits.prompt(wider, 100))
    clock.now += 13
    limits.prompt(wider, 100)


def test_a_prompt_beyond_the_limit_can_never_pass() -> None:
    """So that OpenAI's client does not try again."""
    tenant = Tenant("a", limits=Limits(tokens_per_minute=100))
    error = limited(lambda: TenantLimits().prompt(tenant, 101))
    assert error.headers == {"x-should-retry": "false"}
    assert "101" in str(error)


def test_requests_at_once() -> None:
    """One more than allowed is refused; when one ends there is room, however it ended."""
    limits, tenant = TenantLimits(), Tenant("a", limits=Limits(concurrent=1))
    with pytest.raises(ZeroDivisionError), limits.running(tenant):
        assert limited(lambda: limits.running(tenant).__enter__()).code == "concurrency_exceeded"
        raise ZeroDivisionError
    with limits.running(tenant):
        pass


def test_cold_loads_count_adapters_not_requests() -> None:
    """Many that wait for one adapter are one load."""
    limits, tenant = TenantLimits(), Tenant("a", limits=Limits(cold_loads=1))
    with limits.loading(tenant, "one"):
        assert limits.may_load(tenant, "one")
        assert not limits.may_load(tenant, "two")
        with limits.loading(tenant, "one"):
            pass
        assert not limits.may_load(tenant, "two")
        assert limits.may_load(Tenant("b", limits=Limits(cold_loads=1)), "two")
    assert limits.may_load(tenant, "two")
    assert not limits.may_load(Tenant("none", limits=Limits(cold_loads=0)), "one")
