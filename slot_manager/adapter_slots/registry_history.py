"""The history of a registry: one JSON line for each change, and what undoes a change. Pure.

    {"id": "8c1f…", "at": "2026-12-01T08:00:00.000000Z", "by": "ann@build-7", "what": "promote ant@2",
     "before": "…", "after": "…", "changes": [{"where": ["adapters", "ant"], "from": {…}, "to": {…}}], "undoes": null}

`before` and `after` are the beginnings of the texts' sha256. Where one line's `before` is not the last one's `after`,
somebody edited the file by hand, or a writer died between the file and its history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adapter_slots.errors import ChangeRefused
from adapter_slots.registry_changes import Doc, with_name

_NAMED = ("adapters", "aliases")
_HASH = 16


@dataclass(frozen=True, slots=True)
class Change:
    """One value that became another; None: there was, or is, none."""

    where: tuple[str, ...]
    before: Any
    after: Any

    @property
    def name(self) -> str:
        """The adapter's or alias' name, else the key."""
        return self.where[-1]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the history."""

    id: str
    at: str
    by: str
    what: str
    before: str
    after: str
    changes: tuple[Change, ...]
    undoes: str | None = None
    follows: bool = True
    """Whether the registry was as the line before it had left it (not written; found when the history is read)."""

    def line(self) -> str:
        """As it stands in the history."""
        values = asdict(self)
        del values["follows"]
        values["changes"] = [{"where": list(c.where), "from": c.before, "to": c.after} for c in self.changes]
        return json.dumps(values, ensure_ascii=False, default=str)


def differences(old: Doc, new: Doc) -> tuple[Change, ...]:
    """What changed, by adapter, by alias, and by key otherwise."""
    found = []
    for key in sorted({*old, *new}):
        if old.get(key) == new.get(key):
            continue
        if key not in _NAMED:
            found.append(Change((key,), old.get(key), new.get(key)))
            continue
        one, other = old.get(key, {}), new.get(key, {})
        names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
        found += [Change((key, name), one.get(name), other.get(name)) for name in names]
    return tuple(found)


def record_of(
    old: Doc, new: Doc, texts: tuple[str, str], *, at: str, by: str, what: str, undoes: str | None = None
) -> Record:
    """The record of a change; `texts` are those of the two documents."""
    before, after = (hashlib.sha256(text.encode()).hexdigest()[:_HASH] for text in texts)
    number = hashlib.sha256(f"{at}{by}{before}{after}".encode()).hexdigest()[:12]
    return Record(number, at, by, what, before, after, differences(old, new), undoes)


def read_history(lines: Iterable[str]) -> list[Record]:
    """Records, oldest first. Lines that are none (half a line of a writer that died) are left out."""
    records: list[Record] = []
    for line in lines:
        try:
            values = json.loads(line)
            changes = tuple(Change(tuple(map(str, c["where"])), c["from"], c["to"]) for c in values.pop("changes"))
            follows = not records or records[-1].after == values["before"]
            records.append(Record(**values, changes=changes, follows=follows))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return records


def undo(doc: Doc, records: Sequence[Record], name: str | None = None) -> tuple[Doc, Record]:
    """The document without its last change (or the last one of `name`), and the record that is undone.

    What was undone before is passed over, so that a second call goes one change further back. Numbers of versions that
    go away with it are not given again.

    Raises:
        ChangeRefused: nothing to undo, or what the change left was changed since by something that has no record.
    """
    undone = {record.undoes for record in records if record.undoes}
    about = [
        record
        for record in records
        if record.id not in undone
        and not record.undoes
        and any(c.where[0] in _NAMED and name in (None, c.name) for c in record.changes)
    ]
    if not about:
        raise ChangeRefused(f"the history has no change {f'of {name!r} ' if name else ''}that could be undone")
    record = about[-1]
    new = doc
    for change in record.changes:
        if change.where[0] not in _NAMED:
            continue  # marks of numbers stay
        section, key = change.where
        if doc.get(section, {}).get(key) != change.after:
            raise ChangeRefused(
                f"{key!r} is not as {record.what!r} of {record.at} ({record.id}) left it: "
                "another change has to be undone first, or it was edited by hand"
            )
        new = _marked(with_name(new, section, key, change.before), change)
    return new, record


def _marked(doc: Doc, change: Change) -> Doc:
    if change.where[0] != "adapters" or not change.after:
        return doc
    numbers = [v["version"] for v in change.after["versions"]]
    kept = [v["version"] for v in (change.before or {"versions": []})["versions"]]
    if set(numbers) <= set(kept):
        return doc
    marks: Mapping[str, int] = doc.get("last_versions", {})
    return {**doc, "last_versions": {**marks, change.name: max(*numbers, marks.get(change.name, 0))}}
