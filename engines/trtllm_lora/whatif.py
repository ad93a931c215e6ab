"""What if? A change of a wish in one word: `pin=3`, `pin=pirate`, `max-rank=64`, `tenants=+50x16`, `slots=64`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from trtllm_lora.fleet import Fleet, FleetError, Group, group_of_rank, with_rank
from trtllm_lora.plan import Wish
from trtllm_lora.profile import parse_bytes

FORMS = "pin=N or pin=NAME, max-rank=R, ranks=R, tenants=+N or tenants=+NxR, slots=N, context=TOKENS, gpu=SIZE"


def apply(wish: Wish, text: str, named: Callable[[str], str] | None = None) -> Wish:
    """The wish with one change. `named` gives the adapter that a name means, or raises FleetError.

    `max-rank=R` builds the engine for rank R and lets the largest adapters grow to it; `ranks=R` gives every adapter R.

    Raises:
        FleetError: not a change that is known, or one that cannot be.
    """
    name, _, value = text.partition("=")
    change = _CHANGES.get(name.strip())
    if change is None or not value:
        raise FleetError(f"--what-if {text!r} is not known; write one of {FORMS}")
    try:
        if change is _pin and not value.strip().isdecimal():
            return _pin_by_name(wish, value.strip(), named)
        return change(wish, value.strip())
    except FleetError as error:
        raise FleetError(f"--what-if {text}: {error}") from None
    except ValueError as error:
        raise FleetError(f"--what-if {text!r}: {error}; write one of {FORMS}") from None


def _pin(wish: Wish, value: str) -> Wish:
    return replace(wish, pinned=wish.pinned + _whole(value))


def _pin_by_name(wish: Wish, value: str, named: Callable[[str], str] | None) -> Wish:
    if named is None:
        raise ValueError("adapters have no names here; give --adapters, --bundles or --log")
    name = named(value)
    return wish if name in wish.pins else replace(wish, pinned=wish.pinned + 1, pins=(*wish.pins, name))


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
    more = usual if found[2] is None else group_of_rank(1, int(found[2]), wish.profile.shape())
    names = tuple(f"new tenant {i}" for i in range(1, 1 + _whole(found[1])))
    return replace(wish, fleet=wish.fleet.plus(Fleet((replace(more, count=len(names), names=names, is_new=True),))))


def _slots(wish: Wish, value: str) -> Wish:
    return replace(wish, slots=_whole(value))


def _context(wish: Wish, value: str) -> Wish:
    tokens, longest = _whole(value), wish.profile.engine.max_seq_len
    if tokens > longest:
        raise ValueError(f"the engine's max_seq_len is {longest}")
    return replace(wish, context=tokens)


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
