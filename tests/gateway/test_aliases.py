"""Aliases at the door: shared out by weight, the same session always to the same version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.gateways import RunningGateway, ask, until

from adapter_slots.registry_changes import remove_alias, set_alias
from adapter_slots.registry_entries import Alias, Content, Entry
from adapter_slots.registry_home import home_of
from adapter_slots.registry_writing import change
from lora_slots.embedded import Prepared
from lora_slots.gateway.names import resolve

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "half", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TWO = {number: Entry("pirate", number, f"digest{number}", "path") for number in (1, 2)}
CANARY = Content({"pirate": TWO}, {"pirate": TWO[2]}, {"prod": Alias("prod", {"pirate@1": 95.0, "pirate@2": 5.0})})


def test_ten_thousand_requests_are_split_by_weight() -> None:
    """5 % within 1 %, by draws as by sessions; a session stays where it is."""
    draws = Counter(
        target.entry.version
        for i in range(10_000)
        if (target := resolve(CANARY, "base", "prod", None, key=None, draw=i / 10_000)) and target.entry
    )
    sessions = [
        target.entry.version
        for i in range(10_000)
        if (target := resolve(CANARY, "base", "prod", None, key=f"session-{i}", draw=0.5)) and target.entry
    ]
    again = [
        target.entry.version
        for i in range(10_000)
        if (target := resolve(CANARY, "base", "prod", None, key=f"session-{i}", draw=0.1)) and target.entry
    ]
    assert abs(draws[2] / 10_000 - 0.05) < 0.01
    assert abs(sessions.count(2) / 10_000 - 0.05) < 0.01
    assert sessions == again


@pytest.fixture
def half(prepared: Prepared, door: RunningGateway) -> Iterator[None]:
    """An alias of two adapters, known to the gateway."""
    home = home_of(prepared.registry)
    change(home, "test", lambda doc: set_alias(doc, "half", {"json": 50, "robot": 50}))
    until("known", lambda: ask(door.url, "/v1/models/half").status == 200)
    yield
    change(home, "test", lambda doc: remove_alias(doc, "half"))


@pytest.mark.triton
def test_sessions_and_users_are_sticky(door: RunningGateway, half: None) -> None:
    """By x-session-id, else by the field `user`; without either both targets come up."""
    where: dict[str, set[str]] = {}
    for _ in range(2):
        for i in range(6):
            by_header = ask(door.url, CHAT, ASKED, x_session_id=f"session-{i}")
            by_user = ask(door.url, CHAT, {**ASKED, "user": f"session-{i}"})
            for reply in (by_header, by_user):
                assert reply.status == 200, reply.body
                assert reply.json()["model"] == "half"
                where.setdefault(f"session-{i}", set()).add(reply.headers["x-lora-slots-adapter"])
    assert all(len(adapters) == 1 for adapters in where.values())
    drawn = {ask(door.url, CHAT, ASKED).headers["x-lora-slots-adapter"] for _ in range(24)}
    assert drawn == {"json@1", "robot@1"}
    model = ask(door.url, "/v1/models/half").json()
    assert model["root"] in ("json@1", "robot@1")
