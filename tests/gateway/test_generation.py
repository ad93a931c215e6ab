"""One request's life where the server says something that the gateway did not expect."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from adapter_slots.registry_entries import Entry
from lora_slots.direct import Lease
from lora_slots.errors import ServerError
from lora_slots.gateway import generation
from lora_slots.gateway.errors import ApiError, from_lease
from lora_slots.gateway.generation import Generation
from lora_slots.gateway.limits import TenantLimits
from lora_slots.gateway.names import Target
from lora_slots.gateway.record import Record


class Door:
    """Grants leases on these digests, one after the other, the last one for ever; nobody generates."""

    def __init__(self, *digests: str) -> None:
        self.digests = list(digests)
        self.granted: list[str] = []
        self.ended: list[str] = []
        self.generated = False

    async def lease(self, adapter: str, lease_id: str, **_: Any) -> Lease:
        """Granted."""
        self.granted.append(lease_id)
        digest = self.digests.pop(0) if len(self.digests) > 1 else self.digests[0]
        return Lease(lease_id, adapter, 7, digest, "SLOT", 0.0)

    def end(self, lease: Lease, tokens: int) -> None:
        """Given back."""
        assert tokens == 0
        self.ended.append(lease.request_id)

    async def generate(self, *_: Any, **__: Any) -> Any:
        """No token."""
        self.generated = True
        return
        yield


def begin(door: Door, digest: str) -> Record:
    """A request for pirate@1, which the gateway's registry has under this digest; it is begun and left again."""
    job: Any = type("Job", (), {"prompts": ((1,),), "n": 1, "echoes": (), "stops": (), "max_tokens": 1})
    job.values, job.arrays, job.stream, job.end_ids, job.log_probs = {}, {}, False, frozenset(), False
    tokenizer: Any = type("Tokenizer", (), {"incremental_decoder": lambda _: None})()
    record = Record("req", 0.0)
    target = Target("pirate", Entry("pirate", 1, digest, "path"))
    made = Generation(cast(Any, door), TenantLimits(), tokenizer, job, lambda: target, None, "base", record)

    async def enter() -> None:
        async with made:
            pass

    asyncio.run(enter())
    return record


def test_another_digest_is_another_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is given back, it is looked for again for a moment, and then the client is told to come back."""
    monkeypatch.setattr(generation, "REGISTRY_LAG_S", 0.15)
    door = Door("other")
    with pytest.raises(ApiError, match="does not know it yet") as told:
        begin(door, "ours")
    assert (told.value.status, told.value.code) == (503, "adapter_unavailable")
    assert len(door.granted) > 1
    assert door.ended == door.granted
    assert not door.generated


def test_a_server_that_has_caught_up_answers() -> None:
    """Of a registry that was read a moment later nobody hears anything."""
    door = Door("older", "ours")
    record = begin(door, "ours")
    assert door.generated
    assert (record.adapter, record.digest) == ("pirate@1", "ours")
    assert len(door.granted) == 2
    assert door.ended == door.granted


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "FAILED_PRECONDITION"])
def test_tenants_are_not_told_what_operators_can_do(code: str) -> None:
    """The slot manager's hint is for those who have its commands."""
    hint = "the slot manager is draining; `lora-slots slots drain --off` ends it"
    told = from_lease(ServerError(hint, code=code), "pirate")
    assert str(told) == "the slot manager is draining"
    assert b"lora-slots" not in told.body()
