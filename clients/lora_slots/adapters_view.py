"""A registry as plain data, and as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapter_slots.registry_entries import Content, Entry, adapter_of
from adapter_slots.registry_history import Record

if TYPE_CHECKING:
    from rich.table import Table


def adapters_of(content: Content) -> list[dict[str, Any]]:
    """One mapping for each adapter, by name."""
    return [adapter_as_data(content, name) for name in sorted(content.entries)]


def adapter_as_data(content: Content, name: str) -> dict[str, Any]:
    """Everything the registry says of an adapter."""
    current, versions = content.entries[name], content.versions[name]
    return {
        "name": name,
        "current": current.version,
        "pool": current.pool,
        "pinned": current.pinned,
        "cold": current.cold,
        "tenants": None if current.tenants is None else sorted(current.tenants),
        "aliases": shares_of(content, name),
        "versions": [version_as_data(entry) for entry in versions.values()],
    }


def version_as_data(entry: Entry) -> dict[str, Any]:
    """Everything the registry says of a version."""
    return {
        "version": entry.version,
        "digest": entry.digest,
        "path": entry.path,
        "base_model": entry.base_model,
        "rank": entry.rank,
        "target_modules": list(entry.target_modules),
        "created": entry.created,
        "signature": entry.signature,
    }


def shares_of(content: Content, name: str) -> dict[str, dict[str, float]]:
    """Alias -> target -> percent, of the targets that are versions of an adapter."""
    found = {
        alias.name: {target: weight for target, weight in alias.targets.items() if adapter_of(target) == name}
        for alias in content.aliases.values()
    }
    return {alias: targets for alias, targets in found.items() if targets}


def aliases_of(content: Content) -> dict[str, dict[str, float]]:
    """Alias -> target -> percent."""
    return {name: dict(alias.targets) for name, alias in sorted(content.aliases.items())}


def list_table(adapters: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each adapter."""
    from rich.table import Table

    table = Table("adapter", "current", "versions", "rank")
    for title in ("base", "signed", "rules", "aliases"):
        table.add_column(title, overflow="fold")
    for adapter in adapters:
        now = next(v for v in adapter["versions"] if v["version"] == adapter["current"])
        table.add_row(
            adapter["name"],
            str(adapter["current"]),
            str(len(adapter["versions"])),
            str(now["rank"] or "-"),
            now["base_model"] or "-",
            str(now["signature"]).split(":")[1] if now["signature"] else "-",
            rules_text(adapter) or "-",
            "; ".join(f"{alias}: {shares_text(targets)}" for alias, targets in adapter["aliases"].items()) or "-",
        )
    return table


def rules_text(adapter: Mapping[str, Any]) -> str:
    """Pool, pin, cold policy and tenants, in words."""
    words = ["pinned"] if adapter["pinned"] else []
    words += [f"pool {adapter['pool']}"] if adapter["pool"] else []
    words += [f"cold {adapter['cold']}"] if adapter["cold"] else []
    words += [f"tenants {', '.join(adapter['tenants']) or 'none'}"] if adapter["tenants"] is not None else []
    return ", ".join(words)


def shares_text(targets: Mapping[str, float]) -> str:
    """`ant 95 %, ant@2 5 %`."""
    return ", ".join(f"{target} {weight:g} %" for target, weight in targets.items())


def record_lines(record: Record) -> list[str]:
    """A line of the history, in words."""
    lines = [f"{record.at[:19]}Z  {record.id}  {record.by}  {record.what}"]
    if not record.follows:
        lines.insert(0, "  (the registry was changed here by something that has no record)")
    changes = [f"    {'.'.join(c.where)}: {_brief(c.before)} -> {_brief(c.after)}" for c in record.changes]
    return lines + changes


def _brief(value: Any) -> str:
    """What of a value matters to a reader."""
    if not isinstance(value, Mapping):
        return "-" if value is None else str(value)
    if "targets" in value:
        return shares_text(value["targets"])
    if "versions" in value:
        rules = [f"{key} {rule}" for key, rule in value.items() if key != "versions"]
        return ", ".join([f"versions {', '.join(str(v['version']) for v in value['versions'])}", *rules])
    return str(dict(value))
