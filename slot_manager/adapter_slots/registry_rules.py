"""What `adapters.yaml` must be: every rule, every breach at once; then the content, ready to be asked.

The shape of the file is published as `registry.schema.json`; a test holds the two against each other. What a schema
cannot say stands here too: names that collide, targets that are not there, weights that do not sum to 100.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from typing import Any

from adapter_slots.pools import Pool, Pools
from adapter_slots.registry_entries import (
    COLD_POLICIES,
    NAME_RULE,
    Alias,
    Content,
    Entry,
    is_name,
    split_version,
)
from adapter_slots.registry_text import Problem, Where

SCHEMA = 1
TOP_KEYS = (
    "schema",
    "adapters",
    "pools",
    "aliases",
    "base_model",
    "require_signatures",
    "trusted_keys",
    "last_versions",
)
ADAPTER_KEYS = ("versions", "pool", "pinned", "cold", "tenants", "current")
VERSION_KEYS = ("version", "digest", "path", "base_model", "rank", "target_modules", "created", "signature")
_WANTED = ("version", "digest", "path")


def problems_of(document: Any) -> Iterator[Problem]:
    """Everything that is wrong with a document, in no particular order."""
    if not isinstance(document, dict) or not _is_int(document.get("schema")) or document["schema"] != SCHEMA:
        yield Problem(("schema",), f"'schema: {SCHEMA}' expected at the top")
        return
    yield from _unknown((), document, TOP_KEYS)
    yield from _kinds((), document, _TOP_KINDS)
    if document.get("require_signatures") is True and not document.get("trusted_keys"):
        yield Problem(("require_signatures",), "no adapter could be served: name 'trusted_keys'")
    pools = document.get("pools", {})
    if not isinstance(pools, dict):
        yield Problem(("pools",), "must be a mapping of names")
        pools = {}
    for name, rights in pools.items():
        if (
            not isinstance(rights, dict)
            or set(rights) - {"reserved", "cap"}
            or not all(_is_int(v) and v >= 0 for v in rights.values())
        ):
            yield Problem(("pools", str(name)), "'reserved' and 'cap' are whole numbers, and there is nothing else")
    adapters = document.get("adapters")
    if not isinstance(adapters, dict):
        yield Problem(("adapters",), "must be a mapping of names")
        return
    for name, adapter in adapters.items():
        if not is_name(name):
            yield Problem(("adapters", str(name)), f"{str(name)[:60]!r} is no adapter name: {NAME_RULE}")
        elif taken := _reads_as_another(name, adapters, document.get("base_model")):
            yield Problem(("adapters", name), taken)
        yield from _adapter_problems(("adapters", str(name)), adapter, pools)
    yield from _alias_problems(document.get("aliases", {}), adapters, document.get("base_model"))


def content_of(document: Mapping[str, Any], located: Callable[[str], str]) -> Content:
    """The content of a document without problems; `located` makes a path absolute, or a URL."""
    versions: dict[str, dict[int, Entry]] = {}
    entries: dict[str, Entry] = {}
    for name, adapter in document["adapters"].items():
        tenants = adapter.get("tenants")
        rules = {
            "pool": adapter.get("pool"),
            "pinned": adapter.get("pinned", False),
            "cold": adapter.get("cold"),
            "tenants": None if tenants is None else frozenset(tenants),
        }
        versions[name] = {v["version"]: _entry(name, v, located, rules) for v in adapter["versions"]}
        entries[name] = versions[name][current_of(adapter)]
    aliases = {
        name: Alias(name, {target: float(weight) for target, weight in alias["targets"].items()})
        for name, alias in document.get("aliases", {}).items()
    }
    return Content(
        versions,
        entries,
        aliases,
        Pools({name: Pool(**rights) for name, rights in document.get("pools", {}).items()}),
        document.get("base_model"),
        document.get("require_signatures", False),
        tuple(document.get("trusted_keys", ())),
    )


def current_of(adapter: Mapping[str, Any]) -> int:
    """Number of an adapter's current version: the one it says, else the last."""
    number: int = adapter["current"] if adapter.get("current") is not None else adapter["versions"][-1]["version"]
    return number


def _entry(name: str, version: Mapping[str, Any], located: Callable[[str], str], rules: Mapping[str, Any]) -> Entry:
    created = version.get("created")
    return Entry(
        name,
        version["version"],
        version["digest"],
        located(version["path"]),
        base_model=version.get("base_model"),
        rank=version.get("rank"),
        target_modules=tuple(version.get("target_modules") or ()),
        created=created.isoformat() if isinstance(created, date) else created,  # YAML reads a bare date as one
        signature=version.get("signature"),
        **rules,
    )


def _adapter_problems(where: Where, adapter: Any, pools: Mapping[str, Any]) -> Iterator[Problem]:
    if not isinstance(adapter, dict):
        yield Problem(where, "'versions' expected, and perhaps " + ", ".join(ADAPTER_KEYS[1:]))
        return
    yield from _unknown(where, adapter, ADAPTER_KEYS)
    yield from _kinds(where, adapter, _ADAPTER_KINDS)
    pool = adapter.get("pool")
    if pool is not None and not isinstance(pool, str):
        yield Problem((*where, "pool"), f"must be the name of a pool, found {repr(pool)[:60]}")
    elif pool is not None and pool not in pools:
        yield Problem((*where, "pool"), f"there is no pool {pool!r}")
    versions = adapter.get("versions")
    if not isinstance(versions, list) or not versions:
        yield Problem((*where, "versions"), "must be a list of at least one")
        return
    numbers: set[int] = set()
    for i, version in enumerate(versions):
        place: Where = (*where, "versions", i)
        if not isinstance(version, dict) or not all(key in version for key in _WANTED):
            yield Problem(place, f"must have {', '.join(_WANTED)}")
            continue
        if not version.keys() <= _VERSION_KINDS.keys():
            yield from _unknown(place, version, VERSION_KEYS)
        yield from _kinds(place, version, _VERSION_KINDS)
        if _is_int(version["version"]):
            if version["version"] in numbers:
                yield Problem(place, f"version {version['version']} is there twice")
            numbers.add(version["version"])
    current = adapter.get("current")
    if _is_int(current) and current not in numbers:
        there = ", ".join(map(str, sorted(numbers)))
        yield Problem((*where, "current"), f"there is no version {current}; there are {there}")


def _reads_as_another(name: str, adapters: Mapping[Any, Any], base_model: Any) -> str:
    """Why a request for this name could be one for something else; "" if it could not."""
    if (parts := split_version(name)) and parts[0] in adapters:
        return f"{name!r} reads as version {parts[1]} of the adapter {parts[0]!r}: take one of the two away"
    base = base_model.partition("@")[0] if isinstance(base_model, str) else ""
    if base and name.partition(":")[0] in (base, base.rpartition("/")[2]):
        return f"{name!r} reads as the base model {base!r}, or as an adapter of it by 'base:adapter'"
    return ""


def _alias_problems(aliases: Any, adapters: Mapping[Any, Any], base_model: Any) -> Iterator[Problem]:
    if not isinstance(aliases, dict):
        yield Problem(("aliases",), "must be a mapping of names")
        return
    for name, alias in aliases.items():
        where = ("aliases", str(name))
        if not is_name(name):
            yield Problem(where, f"{str(name)[:60]!r} is no alias name: {NAME_RULE}")
        elif name in adapters:
            yield Problem(where, f"{name!r} is an adapter too: the two share one name space")
        elif taken := _reads_as_another(name, adapters, base_model):
            yield Problem(where, taken)
        targets = alias.get("targets") if isinstance(alias, dict) else None
        if not isinstance(targets, dict) or not targets or set(alias) != {"targets"}:
            yield Problem(where, "'targets' expected and nothing else: adapter or adapter@version -> percent")
            continue
        for target, weight in targets.items():
            if not _is_weight(weight):
                yield Problem(
                    (*where, "targets", str(target)), f"a percentage is a number from 0 to 100, found {weight!r}"
                )
            if wrong := _target_problem(target, adapters):
                yield Problem((*where, "targets", str(target)), wrong)
        total = math.fsum(weight for weight in targets.values() if _is_weight(weight))
        if all(map(_is_weight, targets.values())) and abs(total - 100) > 1e-6:
            yield Problem((*where, "targets"), f"the weights sum to {total:g}, not to 100")


def _target_problem(target: Any, adapters: Mapping[Any, Any]) -> str:
    if not isinstance(target, str):
        return f"{target!r} is no target: adapter or adapter@version"
    if target in adapters:
        return ""
    parts = split_version(target)
    if not parts or parts[0] not in adapters:
        near = difflib.get_close_matches(target[:128], [name for name in adapters if isinstance(name, str)][:200], n=1)
        return f"there is no adapter {target[:80]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    adapter = adapters[parts[0]]
    versions = adapter.get("versions") if isinstance(adapter, dict) else None
    numbers = [v.get("version") for v in versions if isinstance(v, dict)] if isinstance(versions, list) else []
    if parts[1] in numbers:
        return ""
    return f"adapter {parts[0]!r} has no version {parts[1]}; there are {', '.join(map(str, numbers))}"


def _unknown(where: Where, mapping: Mapping[Any, Any], known: tuple[str, ...]) -> Iterator[Problem]:
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            yield Problem((*where, str(key)), f"unknown key {str(key)[:60]!r}; {hint}")


Kinds = Mapping[str, tuple[str, Callable[[Any], bool]]]


def _kinds(where: Where, mapping: Mapping[Any, Any], kinds: Kinds) -> Iterator[Problem]:
    for key, value in mapping.items():
        kind = kinds.get(key) if isinstance(key, str) else None
        if kind is not None and not kind[1](value):
            yield Problem((*where, key), f"must be {kind[0]}, found {repr(value)[:60]}")


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_text(value: Any) -> bool:
    return type(value) is str and value != ""


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_texts(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


def _is_counts(value: Any) -> bool:
    return type(value) is dict and all(is_name(name) and _is_int(number) for name, number in value.items())


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 100


_TOP_KINDS: Kinds = {
    "base_model": ("text, name@revision", _is_text),
    "require_signatures": ("true or false", _is_flag),
    "trusted_keys": ("a list of public keys, base64 or paths of PEM files", _is_texts),
    "last_versions": ("a mapping of names to the highest number each ever gave", _is_counts),
}
_ADAPTER_KINDS: Kinds = {
    "pinned": ("true or false", _is_flag),
    "cold": ("one of " + ", ".join(COLD_POLICIES), lambda value: value in COLD_POLICIES),
    "tenants": ("a list of names", _is_texts),
    "current": ("the number of a version", _is_int),
}
_VERSION_KINDS: Kinds = {
    "version": ("a whole number", _is_int),
    "digest": ("text", _is_text),
    "path": ("text: a directory, or a URL", _is_text),
    "base_model": ("text, name@revision", _is_text),
    "rank": ("a whole number", lambda value: type(value) is int and value > 0),
    "target_modules": ("a list of names", _is_texts),
    "created": ("a time, ISO 8601", lambda value: _is_text(value) or isinstance(value, date)),
    "signature": ("text, as `lora-slots adapters sign` prints it", _is_text),
}
