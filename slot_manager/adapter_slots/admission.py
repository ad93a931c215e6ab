"""Which adapters may be served at all: those trained on the base that is served, released by a key that is trusted.

Pure. Checked before a bundle is taken from DISK (or a directory of the registry's), and before one byte of a remote
adapter's weights is fetched. What the registry says of a version goes before what its bundle says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapter_slots.errors import NotAdmitted
from adapter_slots.registry_entries import Entry
from trtllm_lora.errors import SignatureError
from trtllm_lora.signing import PublicKey, check_signature


@dataclass(frozen=True, slots=True)
class Terms:
    """What is asked of every adapter."""

    base_model: str | None = None
    """`name@revision` of the base that is served; None: not asked."""
    require_signatures: bool = False
    keys: Mapping[str, PublicKey] = field(default_factory=dict)
    """Trusted keys by their ids."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a bundle says of itself, believed as far as the registry says nothing else."""

    base_model: str | None = None
    signature: object = None
    """A signature of the digest that the registry names, if the bundle carries one."""


def claims_of(manifest: Mapping[str, Any] | None, digest: str) -> Claims:
    """What a manifest claims about the adapter that the registry names by `digest`; None: a raw adapter has none.

    A raw adapter's bundle has a digest of its own, so that no signature in it can speak for the raw adapter.
    """
    if manifest is None:
        return Claims()
    base = base_of(manifest.get("base_model"), manifest.get("base_revision"))
    return Claims(base, manifest.get("signature") if manifest.get("digest") == digest else None)


def base_of(name: object, revision: object) -> str | None:
    """`name@revision` as far as it is known; somebody's folder says nothing of what was in it."""
    if not isinstance(name, str) or not name or name.startswith(("/", ".", "~")):
        return None
    return f"{name}@{revision}" if revision else name


def admit(entry: Entry, claims: Claims | None, terms: Terms) -> None:
    """Let an adapter in, or say why not.

    Args:
        claims: None while nothing of it but its entry was seen: what only they can tell is not asked yet.

    Raises:
        NotAdmitted: another base, or no good signature by a trusted key: every reason.
    """
    problems = []
    base = entry.base_model or (claims.base_model if claims else None)
    if base and terms.base_model and not same_base(base, terms.base_model):
        problems.append(f"it was trained on {base}, this server's base is {terms.base_model}")
    signature = entry.signature or (claims.signature if claims else None)
    if terms.require_signatures and (signature is not None or claims is not None):
        try:
            check_signature(entry.digest, signature, terms.keys)
        except SignatureError as error:
            problems.append(str(error))
    if problems:
        raise NotAdmitted(f"adapter {entry.ref!r}: {'; '.join(problems)}", adapter=entry.name)


def same_base(one: str, other: str) -> bool:
    """Whether two `name@revision` can be one base: what one of them leaves out is not held against the other."""
    name, _, revision = one.partition("@")
    other_name, _, other_revision = other.partition("@")
    return name == other_name and (not revision or not other_revision or revision == other_revision)
