"""Changes of a registry's document. Pure: plain data in, new plain data out, what is not touched is shared.

Each raises ChangeRefused with what is in the way and does nothing then. Whether the result is a good registry as a
whole (an alias whose target went away, say) is for registry_rules to tell, before it is written.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from adapter_slots.errors import ChangeRefused
from adapter_slots.registry_entries import NAME_RULE, adapter_of, is_name, split_version
from adapter_slots.registry_rules import SCHEMA, current_of

Doc = dict[str, Any]
EMPTY: Doc = {"schema": SCHEMA, "adapters": {}}
_SHOWN = 8


def add_version(doc: Doc, name: str, version: Mapping[str, Any], *, makes_current: bool = True) -> tuple[Doc, int]:
    """A new version of an adapter, or the first one of a new adapter; its number is the next one never given before."""
    if not is_name(name):
        raise ChangeRefused(f"{name[:60]!r} is no adapter name: {NAME_RULE}")
    if name in doc.get("aliases", {}):
        raise ChangeRefused(f"{name!r} is an alias; adapters and aliases share one name space")
    parts = split_version(name)
    if parts and parts[0] in doc["adapters"]:
        raise ChangeRefused(f"{name!r} reads as version {parts[1]} of the adapter {parts[0]!r}")
    adapter = doc["adapters"].get(name, {"versions": []})
    known = [v["version"] for v in adapter["versions"]]
    number = max(*known, doc.get("last_versions", {}).get(name, 0), 0) + 1
    changed = {**adapter, "versions": [*adapter["versions"], {"version": number, **version}]}
    changed.pop("current", None)  # then the last one is
    if not makes_current and known:
        changed["current"] = current_of(adapter)
    return with_name(doc, "adapters", name, changed), number


def make_current(doc: Doc, name: str, number: int) -> Doc:
    """Requests that name no version get this one."""
    check_version(doc, name, number)
    adapter = _adapter(doc, name)
    changed = {**adapter, "current": number}
    if number == _numbers(adapter)[-1]:
        del changed["current"]
    return with_name(doc, "adapters", name, changed)


def check_version(doc: Doc, name: str, number: int) -> None:
    """Raise ChangeRefused if there is no such version."""
    numbers = _numbers(_adapter(doc, name))
    if number not in numbers:
        raise ChangeRefused(f"adapter {name!r} has no version {number}; there are {_list(numbers)}")


def set_rules(doc: Doc, name: str, rules: Mapping[str, Any]) -> Doc:
    """Other rules of an adapter (pool, pinned, cold, tenants); None takes one away."""
    changed = {**_adapter(doc, name), **rules}
    for key, value in rules.items():
        if value is None or (key == "pinned" and value is False):
            del changed[key]
    return with_name(doc, "adapters", name, changed)


def set_alias(doc: Doc, name: str, targets: Mapping[str, float]) -> Doc:
    """Make or replace an alias."""
    return with_name(doc, "aliases", name, {"targets": {target: _plain(weight) for target, weight in targets.items()}})


def remove_alias(doc: Doc, name: str) -> Doc:
    """Take an alias away."""
    _alias(doc, name)
    return with_name(doc, "aliases", name, None)


def give_share(doc: Doc, alias: str, target: str, percent: float | None, *, beside: str | None = None) -> Doc:
    """Let a target have so many percent of an alias; None: all that its adapter has there.

    What it gains or loses, the other versions of its adapter lose or gain, in proportion; if there are none, all the
    other targets. An alias that is not there yet is made, with `beside` for the rest.
    """
    if percent is not None and not 0 <= percent <= 100:
        raise ChangeRefused(f"a share is 0 to 100 percent, found {percent:g}")
    if alias not in doc.get("aliases", {}) and beside not in (None, target):
        return set_alias(doc, alias, _sharing({str(beside): 100.0}, target, 100.0 if percent is None else percent))
    targets = _alias(doc, alias)["targets"]
    adapter = adapter_of(target)
    family = {name: weight for name, weight in targets.items() if adapter_of(name) == adapter or name == target}
    if set(family) <= {target}:
        if percent is None and targets != {target: targets.get(target)}:
            has = f"the only version of {adapter}" if family else f"no target yet, nor is any version of {adapter}"
            raise ChangeRefused(f"{target} is {has} in alias {alias!r}: say how many percent it shall have")
        return set_alias(doc, alias, _sharing(targets, target, 100.0 if percent is None else percent))
    room = math.fsum(family.values())
    if percent is not None and percent > room + 1e-9:
        raise ChangeRefused(
            f"{adapter} has {room:g} % of alias {alias!r} in all, {percent:g} % is more; `alias set` takes any weights"
        )
    others = {name: weight for name, weight in targets.items() if name not in family}
    return set_alias(doc, alias, {**others, **_sharing(family, target, room if percent is None else percent)})


def remove(doc: Doc, name: str, number: int | None = None) -> Doc:
    """Take an adapter away, or one version of it. Refused while an alias needs it."""
    adapter = _adapter(doc, name)
    if number is not None:
        check_version(doc, name, number)
    numbers = _numbers(adapter)
    whole = number is None or numbers == [number]
    if not whole and number == current_of(adapter):
        raise ChangeRefused(f"{name}@{number} is the current version: promote another one first")
    users = [
        f"{alias} ({target}, {weight:g} %)"
        for alias, content in doc.get("aliases", {}).items()
        for target, weight in content["targets"].items()
        if target == f"{name}@{number}" or (whole and (target == name or split_version(target) in _refs(name, numbers)))
    ]
    if users:
        raise ChangeRefused(f"{name}{'' if whole else f'@{number}'} is a target of alias {', '.join(users)}")
    marks = {**doc.get("last_versions", {}), name: max(*numbers, doc.get("last_versions", {}).get(name, 0))}
    changed = None
    if not whole:
        changed = {**adapter, "versions": [v for v in adapter["versions"] if v["version"] != number]}
        if changed.get("current") == changed["versions"][-1]["version"]:
            del changed["current"]
    return with_name({**doc, "last_versions": dict(sorted(marks.items()))}, "adapters", name, changed)


def set_signature(doc: Doc, name: str, number: int, signature: str) -> Doc:
    """Put a signature to a version."""
    check_version(doc, name, number)
    adapter = _adapter(doc, name)
    versions = [{**v, "signature": signature} if v["version"] == number else v for v in adapter["versions"]]
    return with_name(doc, "adapters", name, {**adapter, "versions": versions})


def with_name(doc: Doc, section: str, name: str, value: Any) -> Doc:
    """The document with another value of one name; None takes the name away, and the last alias its section."""
    names = {**doc.get(section, {}), name: value}
    if value is None:
        del names[name]
    changed = {**doc, section: names}
    if section == "aliases" and not names:
        del changed[section]
    return changed


def _sharing(weights: Mapping[str, float], target: str, percent: float) -> dict[str, float]:
    """The same sum: `target` has `percent` of it, the others share the rest as before; who comes to nothing goes."""
    total = math.fsum(weights.values())
    others = {name: weight for name, weight in weights.items() if name != target}
    had = math.fsum(others.values())
    rest = {name: round((total - percent) * (w / had if had else 1 / len(others)), 4) for name, w in others.items()}
    new = {name: weight for name, weight in rest.items() if weight > 0}
    largest = max(new, key=lambda name: new[name], default=None)
    if largest is not None:
        new[largest] = round(new[largest] + total - percent - math.fsum(new.values()), 6)  # what rounding lost
    return {**new, target: percent if new else total}


def _adapter(doc: Doc, name: str) -> dict[str, Any]:
    adapter = doc["adapters"].get(name)
    if adapter is None:
        if name in doc.get("aliases", {}):
            raise ChangeRefused(f"{name!r} is an alias; an adapter is expected here")
        raise ChangeRefused(f"there is no adapter {name[:80]!r}{_near(name, doc['adapters'])}")
    return dict(adapter)


def _alias(doc: Doc, name: str) -> dict[str, Any]:
    alias = doc.get("aliases", {}).get(name)
    if alias is None:
        raise ChangeRefused(f"there is no alias {name[:80]!r}{_near(name, doc.get('aliases', {}))}")
    return dict(alias)


def _numbers(adapter: Mapping[str, Any]) -> list[int]:
    return [v["version"] for v in adapter["versions"]]


def _refs(name: str, numbers: Sequence[int]) -> set[tuple[str, int]]:
    return {(name, number) for number in numbers}


def _near(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name[:128], list(names)[:2000], n=3)
    return f"; near names: {', '.join(near)}" if near else ""


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[-_SHOWN:]))


def _plain(weight: float) -> float:
    """5.0 is written 5."""
    return int(weight) if float(weight).is_integer() else weight
