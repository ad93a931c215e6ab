"""What if? A change of a wish in one word: `pin=3`, `max-rank=64`, `tenants=+50x16`, `slots=64`, `gpu=80GiB`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from trtllm_lora.fleet import Fleet, FleetError, Group, group_of_rank, with_rank
from trtllm_lora.plan import Wish
from trtllm_lora.profile import parse_bytes

FORMS = "pin=N, max-rank=R, ranks=R, tenants=+N or tenants=+NxR, slots=N, context=TOKENS, gpu=SIZE"


def apply(wish: Wish, text: str) -> Wish:
    """The wish with one change.

    `max-rank=R` builds the engine for rank R and lets the largest adapters grow to it; `ranks=R` gives every adapter R.

    Raises:
        FleetError: not a change that is known, or one that cannot be.
    """
    name, _, value = text.partition("=")
    change = _CHANGES.get(name.strip())
    if change is None or not value:
        raise FleetError(f"--what-if {text!r} is not known; write one of {FORMS}")
    try:
        return change(wish, value.strip())
    except ValueError as error:
        raise FleetError(f"--what-if {text!r}: {error}; write one of {FORMS}") from None


def _pin(wish: Wish, value: str) -> Wish:
    return replace(wish, pinned=wish.pinned + _whole(value))


def _max_rank(wish: Wish, value: str) -> Wish:
    rank = _whole(value)
    lora = wish.profile.lora.model_copy(update={"max_rank": rank})
    serving = wish.profile.serving.model_copy(update={"lora_max_rank": None})
    profile = wish.profile.model_copy(update={"lora": lora, "serving": serving})
    largest = max(wish.fleet.ranks)
    groups: list[Group] = []
    for group in wish.fleet.groups:
        if group.rank == largest or group.rank > rank:
            groups += with_rank(Fleet((group,)), rank, profile.shape()).groups
        else:
            groups.append(group)
    return replace(wish, profile=profile, fleet=Fleet(tuple(groups)))


def _ranks(wish: Wish, value: str) -> Wish:
    rank = _whole(value)
    if rank > wish.profile.lora.max_rank:
        wish = _max_rank(wish, value)
    return replace(wish, fleet=with_rank(wish.fleet, rank, wish.profile.shape()))


def _tenants(wish: Wish, value: str) -> Wish:
    found = re.fullmatch(r"\+?(\d+)(?:x(\d+))?", value)
    if not found:
        raise ValueError("a number of adapters is expected")
    usual = max(wish.fleet.groups, key=lambda group: group.count)
    if found[2] is None:
        more = replace(usual, count=int(found[1]))
    else:
        more = group_of_rank(int(found[1]), int(found[2]), wish.profile.shape())
    return replace(wish, fleet=wish.fleet.plus(Fleet((more,))))


def _slots(wish: Wish, value: str) -> Wish:
    return replace(wish, slots=_whole(value))


def _context(wish: Wish, value: str) -> Wish:
    return replace(wish, context=_whole(value))


def _gpu(wish: Wish, value: str) -> Wish:
    size = _whole(str(parse_bytes(value)))
    if size < 2**20:
        raise ValueError(f"that is {size} bytes, and no GPU: write the unit, such as {value}GiB")
    return replace(wish, gpu_bytes=size)


def _whole(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError("a number of at least 1 is expected")
    return number


_CHANGES: dict[str, Callable[[Wish, str], Wish]] = {
    "pin": _pin,
    "max-rank": _max_rank,
    "ranks": _ranks,
    "tenants": _tenants,
    "slots": _slots,
    "context": _context,
    "gpu": _gpu,
}
