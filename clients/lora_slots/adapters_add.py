"""`lora-slots adapters add`: a new version of an adapter, and perhaps a share of an alias."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_slots.adapters_place import Cold, Endpoint, Json, Name, Place, Pool, Tenants, changed, home_at, refusals
from lora_slots.errors import UsageError

if TYPE_CHECKING:
    from adapter_slots.registry_changes import Doc
    from adapter_slots.registry_home import Home
    from lora_slots.adapters_source import Found

WARNED = 7
"""Lines of a report that are shown of an adapter that is published all the same."""


def add(
    name: Name,
    source: Annotated[str, typer.Argument(help="Directory or URL of a bundle, or of a PEFT adapter.")],
    canary: Annotated[float | None, typer.Option(help="Give it so many percent of --alias, and nothing else.")] = None,
    alias_name: Annotated[str | None, typer.Option("--alias", help="The alias of --canary.")] = None,
    keep_current: Annotated[bool, typer.Option("--keep-current", help="Add it without making it current.")] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="Keep the adapter in a slot.")] = False,
    pool: Pool = None,
    cold: Cold = None,
    tenants: Tenants = None,
    base_model: Annotated[
        str | None, typer.Option(help="name@revision it was trained on; default: as it says.")
    ] = None,
    sign: Annotated[Path | None, typer.Option(help="Private key: sign this version in the registry.")] = None,
    signature: Annotated[str | None, typer.Option(help="A signature made elsewhere (`adapters sign`).")] = None,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Add a version of an adapter, and make it current; with --canary it only gets a share of an alias.

    A local bundle's bytes are checked first; a raw PEFT adapter is converted by the servers, and what seems to stand in
    the way of that is told as a warning. Base, rank, modules and signature are taken from the adapter.

    Examples:

        lora-slots adapters add pirate ./bundles/0a4c…

        lora-slots adapters add pirate s3://models/pirate-v2 --canary 5 --alias support
    """
    from adapter_slots.registry_changes import set_rules as with_rules
    from lora_slots.adapters_source import examined, path_for
    from trtllm_lora.signing import read_private_key

    home = home_at(place, endpoint)
    if sign and signature:
        raise UsageError("--sign makes a signature, --signature brings one: give one of the two")
    if alias_name and canary is None:
        raise UsageError("--alias goes with --canary PERCENT; `adapters promote … --alias` moves more")
    key = read_private_key(sign) if sign else None
    with refusals(), examined(source, endpoint) as found:
        version = {"digest": found.digest, "path": path_for(found.place, home)}
        version |= found.facts
        version |= {"base_model": base_model} if base_model else {}
        given = key.sign(found.digest) if key else signature
        version |= {"signature": given} if given else {}
        _warn_of(found)
        version["created"] = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    rules: dict[str, Any] = {"pool": pool, "cold": cold, "tenants": tenants, "pinned": pinned or None}
    added: list[int] = []

    def edit(doc: Doc) -> Doc:
        doc, number = _with_version(doc, home, name, version, current=canary is None and not keep_current)
        added[:] = [number]
        doc = with_rules(doc, name, {key: rule for key, rule in rules.items() if rule is not None})
        return doc if canary is None else _canary(doc, name, number, canary, alias_name)

    share = f" --canary {canary:g}" + (f" --alias {alias_name}" if alias_name else "") if canary is not None else ""
    made = changed(home, f"add {name}{share}", edit, as_json)
    if made.record and not as_json:
        facts = [found.kind, f"digest {found.digest[:12]}"]
        facts += [f"base {version['base_model']}"] if "base_model" in version else []
        facts += [f"signed by {str(version['signature']).split(':')[1]}"] if "signature" in version else ["not signed"]
        typer.echo(f"{name}@{added[0]}: {', '.join(facts)}")


def _warn_of(found: Found) -> None:
    """Tell what seems to stand in the way of a raw adapter: servers convert it, with a base that is not known here."""
    if found.kind != "peft" or found.folder is None:
        return
    from peft_to_trtllm import inspect

    report = inspect(found.folder, dtype="float32")  # what a narrower type would lose is for the server to say
    if not report.ok:
        lines = report.text().splitlines()
        more = [f"  … and {len(lines) - WARNED} lines more: lora-slots convert --check"] if len(lines) > WARNED else []
        sys.stderr.write("\n".join(["warning: without its base it would not convert:", *lines[:WARNED], *more]) + "\n")


def _with_version(doc: Doc, home: Home, name: str, version: Mapping[str, Any], *, current: bool) -> tuple[Doc, int]:
    """The version with this content: a new one, or the one that is there already."""
    from adapter_slots.registry_changes import add_version, make_current, set_signature

    versions = doc["adapters"].get(name, {}).get("versions", ())
    known = next((v for v in reversed(versions) if v["digest"] == version["digest"]), None)
    if known is None:
        doc, number = add_version(doc, name, version, makes_current=current)
    else:
        number = known["version"]
        if current:
            doc = make_current(doc, name, number)
        if version.get("signature", known.get("signature")) != known.get("signature"):
            doc = set_signature(doc, name, number, version["signature"])
    _admitted(doc, home, name, number)
    return doc, number


def _admitted(doc: Doc, home: Home, name: str, number: int) -> None:
    """Refuse now what every server of this registry would refuse. Raises NotAdmitted."""
    from adapter_slots.admission import Claims, admit
    from adapter_slots.registry import terms_of
    from adapter_slots.registry_rules import content_of, problems_of

    if any(problems_of(doc)):
        return  # told before it is written
    content = content_of(doc, home.located)
    admit(content.versions[name][number], Claims(), terms_of(content, home.folder))


def _canary(doc: Doc, name: str, number: int, percent: float, alias_name: str | None) -> Doc:
    """Give a version a share of the alias that is meant."""
    from adapter_slots.errors import ChangeRefused
    from adapter_slots.registry_changes import give_share
    from adapter_slots.registry_entries import adapter_of
    from adapter_slots.registry_rules import current_of

    adapter = doc["adapters"][name]
    beside = name if current_of(adapter) != number else None
    aliases = doc.get("aliases", {})
    if alias_name is None:
        own = [key for key, value in aliases.items() if any(adapter_of(target) == name for target in value["targets"])]
        if len(own) != 1:
            raise ChangeRefused(f"--canary: which --alias? {name} is in {', '.join(sorted(own)) or 'none'}")
        alias_name = own[0]
    if alias_name not in aliases and beside is None:
        raise ChangeRefused(f"{name}@{number} is the only version of {name}: add it without --canary first")
    return give_share(doc, alias_name, f"{name}@{number}", percent, beside=beside)
