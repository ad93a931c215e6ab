"""Writing `adapters.yaml`: read, change, check, replace in one step, note it. No update is lost.

Every writer goes through `change`: it reads the registry as it is under the lock (or, in an object store, on the
condition that it is still that), so that any number of processes may publish at one time. The file and its history are
two files: the file is written first, so the history never tells of what did not happen; a writer that dies in between
leaves a gap that `history` shows.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from adapter_slots.errors import ChangeRefused, RegistryAbsent, RegistryError, RegistryMoved
from adapter_slots.registry_changes import EMPTY, Doc, add_version
from adapter_slots.registry_entries import NAME_RULE, Entry, is_name
from adapter_slots.registry_history import Record, record_of
from adapter_slots.registry_home import Home, home_of
from adapter_slots.registry_rules import content_of, current_of, problems_of
from adapter_slots.registry_text import Document, TextError, dump
from trtllm_lora import Bundle

FILE_NAME = "adapters.yaml"
_TRIED_S = 60.0
"""How long a change is tried again because others write to the same object store."""
_HEAD = "# Changed by `lora-slots adapters`; comments are not kept. The form: `lora-slots adapters schema`.\n"

Edit = Callable[[Doc], Doc]


@dataclass(frozen=True, slots=True)
class Changed:
    """What a change led to."""

    doc: Doc
    record: Record | None
    """None: the registry was so already."""
    warnings: tuple[str, ...] = ()


def change(home: Home, what: str, edit: Edit, *, undoes: Callable[[], str | None] = lambda: None) -> Changed:
    """Apply an edit to the registry; `what` is its line in the history.

    `edit` is called with the document as it is, and again if somebody else was quicker. `undoes` names, after `edit`,
    the record it took back.

    Raises:
        ChangeRefused: by `edit`, or because the result would be no good registry. RegistryError: the place.
    """
    tries = Retrying(
        retry=retry_if_exception_type(RegistryMoved),
        stop=stop_after_delay(_TRIED_S),
        wait=wait_random_exponential(multiplier=0.02, max=1.0),
        reraise=True,
    )
    return tries(_changed_once, home, what, edit, undoes)


def publish(file: Path, bundle: Bundle, name: str | None = None) -> Entry:
    """Make a bundle the current version of its adapter: one atomic write of `adapters.yaml`.

    Publishing the digest that is current already changes nothing.

    Raises:
        RegistryError: the file is broken or cannot be written.
    """
    return publish_at(file, name or bundle.adapter, bundle.digest, os.path.relpath(bundle.path, file.parent))


def publish_at(place: Path | str, name: str, digest: str, path: str) -> Entry:
    """Make what lies at `path` (a URL, or relative to the registry) the current version. Raises RegistryError."""
    if not is_name(name):
        raise RegistryError(f"{name[:60]!r} is no adapter name: {NAME_RULE}")
    home = home_of(place)

    def edit(doc: Doc) -> Doc:
        adapter = doc["adapters"].get(name)
        if adapter is not None:
            now = next(v for v in adapter["versions"] if v["version"] == current_of(adapter))
            if (now["digest"], now["path"]) == (digest, path):
                return doc
        return add_version(doc, name, {"digest": digest, "path": path})[0]

    changed = change(home, f"publish {name}", edit)
    return content_of(changed.doc, home.located).entries[name]


def who() -> str:
    """user@host of this process, for the history."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _changed_once(home: Home, what: str, edit: Edit, undoes: Callable[[], str | None]) -> Changed:
    with home.locked():
        try:
            reading = home.read()
        except RegistryAbsent:
            reading = None
        old = _checked(home, reading.text) if reading is not None else EMPTY
        new = edit(old)
        if new == old and reading is not None:
            return Changed(new, None)
        text = _HEAD + dump(new)
        problems = list(problems_of(new))
        if problems:
            raise ChangeRefused("; ".join(f"{'.'.join(map(str, p.where))}: {p.what}" for p in problems[:20]))
        try:
            warnings = [home.write(text, reading.stamp if reading is not None else None)]
        except RegistryMoved:
            again = home.read()
            if again is None or again.text != text:  # else it was our own write, whose answer got lost on the way
                raise
            warnings = []
        if reading is not None and _has_comments(reading.text):
            warnings.append(f"{home.name}: the comments that were in it are gone; its history has the values")
        at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        texts = (reading.text if reading is not None else "", text)
        record = record_of(old, new, texts, at=at, by=who(), what=what, undoes=undoes())
        try:
            home.note(record.line(), at)
        except RegistryError as error:
            warnings.append(f"the change is made, and not in the history: {error}")
        return Changed(new, record, tuple(filter(None, warnings)))


def _has_comments(text: str) -> bool:
    return any(line.lstrip().startswith("#") for line in text.removeprefix(_HEAD).splitlines())


def _checked(home: Home, text: str) -> Doc:
    try:
        document = Document(text)
    except TextError as error:
        raise RegistryError(f"{home.name}: {error}") from None
    problems = list(problems_of(document.data))
    if problems or document.has_duplicates:
        raise RegistryError(f"{home.name}: {document.tell(problems)}")
    doc: Doc = document.data
    return doc
