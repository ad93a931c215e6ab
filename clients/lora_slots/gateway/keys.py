"""Changes of `tenants.yaml`: each one is read, change, check, one atomic write, under a lock."""

from __future__ import annotations

import fcntl
import os
import secrets
import string
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from lora_slots.gateway.tenants import SCHEMA, TenantsError, TenantsFile, check, hash_of, read_tenants

_ALPHABET = string.ascii_lowercase + string.digits


def new_key(now: datetime) -> tuple[str, dict[str, str]]:
    """A key, which is shown once, and what the file has of it."""
    made = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    key = f"ls-{made}-{secrets.token_urlsafe(32)}"
    return key, {"id": made, "sha256": hash_of(key), "created": now.isoformat(timespec="seconds")}


def key_id(key: str) -> str:
    """The id of a key: the part that the file, `tenants list` and `tenants key --revoke` have of it."""
    return key.split("-", 2)[1]


def add_tenant(file: Path, name: str, adapters: Sequence[str], base: bool, limits: Mapping[str, int | None]) -> str:
    """A new tenant with a first key, which is returned. Makes the file if there is none. Raises TenantsError."""
    key, entry = new_key(datetime.now(UTC))

    def change(document: dict[str, Any]) -> None:
        if name in document["tenants"]:
            raise TenantsError(f"there is a tenant {name!r} already; `tenants key {name}` makes another key")
        given = {limit: number for limit, number in limits.items() if number is not None}
        document["tenants"][name] = {"keys": [entry], "adapters": list(adapters), "base": base, "limits": given}

    _edit(file, change)
    return key


def add_key(file: Path, name: str | None) -> str:
    """A further key of a tenant, or (None) of the admin port. Raises TenantsError."""
    key, entry = new_key(datetime.now(UTC))
    _edit(file, lambda document: _holder(document, name).setdefault("keys", []).append(entry))
    return key


def revoke_key(file: Path, key_id: str) -> None:
    """Take a key out. Raises TenantsError."""

    def change(document: dict[str, Any]) -> None:
        holders = [document["admin"], *document["tenants"].values()]
        for holder in holders:
            keys = holder.get("keys", [])
            if any(key["id"] == key_id for key in keys):
                holder["keys"] = [key for key in keys if key["id"] != key_id]
                return
        raise TenantsError(f"there is no key {key_id!r}")

    _edit(file, change)


def remove_tenant(file: Path, name: str) -> None:
    """Take a tenant out, with its keys. Raises TenantsError."""

    def change(document: dict[str, Any]) -> None:
        _holder(document, name)
        del document["tenants"][name]

    _edit(file, change)


def _holder(document: dict[str, Any], name: str | None) -> dict[str, Any]:
    if name is None:
        found: dict[str, Any] = document["admin"]
        return found
    if name not in document["tenants"]:
        there = ", ".join(sorted(document["tenants"])) or "none"
        raise TenantsError(f"there is no tenant {name!r}; there are: {there}")
    tenant: dict[str, Any] = document["tenants"][name]
    return tenant


def _edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with _locked(file):
        parsed = read_tenants(file) if file.exists() else TenantsFile.model_validate({"schema": SCHEMA})
        document = parsed.model_dump(by_alias=True, exclude_unset=True)
        document.setdefault("tenants", {})
        document.setdefault("admin", {})
        change(document)
        if not document["admin"]:
            del document["admin"]
        check(document, file)
        _write(file, document)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep other writers out; the lock is a file beside, since the file itself is replaced."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_name(f".{file.name}.lock").open("w")
    except OSError as error:
        raise TenantsError(f"{file}: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(file: Path, document: Mapping[str, Any]) -> None:
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".tenants-", delete=False) as out:
            yaml.safe_dump(dict(document), out, sort_keys=False)
            out.flush()
            os.fsync(out.fileno())
        Path(out.name).replace(file)  # readable by its owner only, as temporary files are
    except OSError as error:
        raise TenantsError(f"{file}: cannot be written: {error.strerror}") from None
