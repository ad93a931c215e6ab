"""What `model` means, and for whom. Pure.

A name means, in this order: the base (its served name, or `base`), an adapter or alias of the registry,
`adapter@version`, `base:adapter`. What a tenant may not use does not exist for it: the same answer, the same near
names, as for a name nobody ever took.
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from adapter_slots.errors import UnknownAdapter
from adapter_slots.registry import BASE_NAME, Entry
from adapter_slots.registry_entries import Content, adapter_of
from lora_slots.gateway.errors import ApiError
from lora_slots.gateway.tenants import Tenant

OWNER = "lora-slots"
_COMPARED = 200
"""Names compared with an unknown one."""


@dataclass(frozen=True, slots=True)
class Target:
    """What answers a request."""

    asked: str
    """The name in `model`."""
    entry: Entry | None
    """None: the base model."""


def resolve(
    content: Content, base: str, model: str, tenant: Tenant | None, *, key: str | None, draw: float
) -> Target | None:
    """What a model name means for a tenant (None: there are no tenants); None: nothing that there is for it.

    Args:
        key: of the session or user, for an alias.
        draw: uniform in [0, 1), for an alias without a key.
    """
    if model in (base, BASE_NAME) and (tenant is None or tenant.base):
        return Target(model, None)
    for name in (model, model.removeprefix(f"{base}:")):
        if reads_as_base(name, base):
            continue
        try:
            entry = content.resolve(name, key, draw)
        except UnknownAdapter:
            continue
        if all(may_use(content, name, one, tenant) for one in (entry, *_entries(content, name))):
            return Target(model, entry)
    return None


def reads_as_base(name: str, base: str) -> bool:
    """Whether an adapter or alias of this name could not be told from the base, or from `base:adapter`."""
    return name == base or name.startswith(f"{base}:")


def may_use(content: Content, name: str, entry: Entry, tenant: Tenant | None) -> bool:
    """Whether a tenant may ask for `name`, which leads to `entry`.

    Both have a say: the tenant's list must have the adapter's or the alias' name, and the registry's list of the
    adapter's tenants must have the tenant.
    """
    if tenant is None:
        return entry.tenants is None
    plain = name if name in content.aliases else entry.name
    return tenant.may_use(plain) and (entry.tenants is None or tenant.name in entry.tenants)


def unknown(model: str, names: Sequence[str]) -> ApiError:
    """The 404 of a name; it tells of `names` only, which are those the tenant may use, sorted."""
    at = bisect.bisect(names, model)
    some = names if len(names) <= _COMPARED else names[max(0, at - _COMPARED // 2) : at + _COMPARED // 2]
    near = difflib.get_close_matches(model[:128], some, n=3, cutoff=0.5)
    few = f"there are: {', '.join(names)}" if len(names) <= 8 else f"/v1/models lists all {len(names)}"
    hint = f"near names: {', '.join(near)}" if near else few
    return ApiError(404, f"There is no model {model[:80]!r}; {hint}.", code="model_not_found", param="model")


def allowed(content: Content, base: str, tenant: Tenant | None) -> list[str]:
    """The names a tenant may use, sorted: base, adapters, aliases."""
    names = [base] if tenant is None or tenant.base else []
    names += [
        name
        for name in (*content.entries, *content.aliases)
        if not reads_as_base(name, base)
        and all(may_use(content, name, entry, tenant) for entry in _entries(content, name))
    ]
    return sorted(names)


def model_object(content: Content, base: str, name: str, started: int) -> dict[str, Any]:
    """OpenAI's model object of a name that there is.

    `root` says what it leads to (an alias: its heaviest target), `parent` is the base. `started`, in seconds since
    1970, stands for a time of making that the registry does not have.
    """
    is_base = name in (base, BASE_NAME)
    known = name in content.entries or name in content.aliases
    entry = None if is_base else content.resolve(name if known else name.removeprefix(f"{base}:"))
    return {
        "id": name,
        "object": "model",
        "created": _seconds(entry.created, started) if entry else started,
        "owned_by": OWNER,
        "root": entry.ref if entry else base,
        "parent": None if is_base else base,
    }


def _seconds(created: str | None, otherwise: int) -> int:
    try:
        return int(datetime.fromisoformat(created or "").timestamp())
    except ValueError:
        return otherwise


def _entries(content: Content, name: str) -> Sequence[Entry]:
    """What a name without a version may lead to: of an alias every target, drawn or not."""
    alias = content.aliases.get(name)
    if alias is None:
        return [content.entries[name]] if name in content.entries else []
    return [content.entries[adapter_of(target)] for target in alias.targets]
