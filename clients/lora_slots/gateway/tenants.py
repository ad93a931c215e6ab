"""`tenants.yaml`: who may use what, how much, and the hashes of their keys.

schema: 1
admin:                            # keys of the admin port
  keys: [{id: k3v9qd2m, sha256: 9f86…, created: "2026-12-01T10:00:00+00:00"}]
tenants:
  acme:
    keys: [{id: x7ab29cd, sha256: 60303a…, created: …}]
    adapters: ["pirate", "acme-*"]      # names or patterns (* and ?) of adapters and aliases
    base: true                          # whether it may ask the base model; default true
    limits:                             # each optional; absent: none
      requests_per_minute: 60
      tokens_per_minute: 20000
      concurrent: 8
      cold_loads: 2

A key is `ls-<id>-<secret>`, the secret 256 random bits; the file has its SHA-256 only. A random secret of that length
cannot be found by trying, so a slow hash would protect nothing and cost every request.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adapter_slots.registry_text import Document, TextError
from lora_slots.errors import UsageError

SCHEMA = 1
_KEY = re.compile(r"ls-([a-z0-9]{8})-([A-Za-z0-9_-]{43})")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME_RULE = "a letter or digit, then up to 63 letters, digits or any of . _ -"


class TenantsError(UsageError):
    """tenants.yaml cannot be used; the message has every reason."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Key(_Strict):
    """A key, as the file has it."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]{8}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: str | None = None


class Limits(_Strict):
    """What a tenant may use up; None: no limit."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    concurrent: Annotated[int, Field(ge=1)] | None = None
    cold_loads: Annotated[int, Field(ge=0)] | None = None


class _Admin(_Strict):
    keys: list[Key] = []


class _TenantFields(_Strict):
    keys: list[Key] = []
    adapters: list[Annotated[str, Field(min_length=1, max_length=128)]] = []
    base: bool = True
    limits: Limits = Limits()


class TenantsFile(_Strict):
    """The file."""

    schema_: Annotated[int, Field(alias="schema", ge=SCHEMA, le=SCHEMA)]
    admin: _Admin = _Admin()
    tenants: dict[Annotated[str, Field(pattern=f"^{_NAME}$")], _TenantFields] = {}


@dataclass(frozen=True)
class Tenant:
    """One tenant."""

    name: str
    adapters: tuple[str, ...] = ()
    """Names and patterns."""
    base: bool = True
    limits: Limits = field(default_factory=Limits)

    def may_use(self, name: str) -> bool:
        """Whether the list has the name of an adapter or alias."""
        return name in self._plain or any(pattern.fullmatch(name) for pattern in self._patterns)

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(self.adapters)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(fnmatch.translate(one)) for one in self.adapters if "*" in one or "?" in one)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    tenant: Tenant | None
    """None: there are no tenants, everybody may use everything."""
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tenants:
    """A whole file, checked."""

    by_name: Mapping[str, Tenant]
    keys: Mapping[str, tuple[str, str]]
    """Key id -> SHA-256, tenant."""
    admin_keys: Mapping[str, str]
    """Key id -> SHA-256."""

    def caller(self, key: str) -> Caller | None:
        """Who has this key; None: nobody."""
        key_id = key_id_of(key)
        found = self.keys.get(key_id or "")
        if found is None or not _same(key, found[0]):
            return None
        return Caller(self.by_name[found[1]], key_id)

    def is_admin(self, key: str) -> bool:
        """Whether this is a key of the admin port."""
        found = self.admin_keys.get(key_id_of(key) or "")
        return found is not None and _same(key, found)


def key_id_of(key: str) -> str | None:
    """The public part of a key; None if it is not formed as one."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def hash_of(key: str) -> str:
    """What the file has of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _same(key: str, sha256: str) -> bool:
    return hmac.compare_digest(hash_of(key), sha256)


def read_tenants(file: Path) -> TenantsFile:
    """The file as it stands. Raises TenantsError."""
    try:
        document = Document(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TenantsError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TenantsError(f"{file}: not UTF-8 text") from None
    except TextError as error:
        raise TenantsError(f"{file}: {error}") from None
    if document.has_duplicates:  # YAML would take the last one, and drop the other's limits and keys
        raise TenantsError(f"{file}: {document.tell(())}")
    return check(document.data, file)


def check(document: Any, file: Path) -> TenantsFile:
    """A document of `file` as the file's model. Raises TenantsError with every breach."""
    try:
        parsed = TenantsFile.model_validate(document)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in error.errors()]
        raise TenantsError(f"{file}: " + "; ".join(lines)) from None
    twice = _twice(parsed)
    if twice:
        raise TenantsError(f"{file}: key ids are given twice: {', '.join(twice)}")
    return parsed


def _twice(parsed: TenantsFile) -> list[str]:
    ids = [key.id for keys in (parsed.admin.keys, *(one.keys for one in parsed.tenants.values())) for key in keys]
    return sorted({one for one in ids if ids.count(one) > 1})


def tenants_of(parsed: TenantsFile) -> Tenants:
    """The file as requests need it."""
    by_name = {name: Tenant(name, tuple(one.adapters), one.base, one.limits) for name, one in parsed.tenants.items()}
    keys = {key.id: (key.sha256, name) for name, one in parsed.tenants.items() for key in one.keys}
    return Tenants(by_name, keys, {key.id: key.sha256 for key in parsed.admin.keys})


class TenantsSource:
    """The file, looked at on every request: read again when it changed; the last good one stays when it breaks."""

    def __init__(self, file: Path) -> None:
        """Raises TenantsError: there is no good file yet."""
        self.file = file
        self.problem: str | None = None
        self._stamp = self._look()
        self._tenants = tenants_of(read_tenants(file))

    def current(self) -> Tenants:
        """The tenants now. Never raises: see `problem`."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._tenants, self.problem = tenants_of(read_tenants(self.file)), None
            except TenantsError as error:
                self.problem = str(error)
        return self._tenants

    def _look(self) -> Any:
        try:
            stat = self.file.stat()
        except OSError:
            return None
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
