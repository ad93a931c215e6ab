"""`lora-slots adapters add|promote|rollback|remove|alias|pin|set`: each one atomic write of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_slots.adapters_place import (
    Endpoint,
    Json,
    Place,
    changed,
    home_at,
    refusals,
    split_ref,
    versioned,
)
from lora_slots.errors import UsageError

if TYPE_CHECKING:
    from adapter_slots.registry_changes import Doc
    from adapter_slots.registry_home import Home

Name = Annotated[str, typer.Argument(help="Adapter.")]
Ref = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="A version of an adapter.")]
Pool = Annotated[str | None, typer.Option(help="Pool of the adapter.")]
Cold = Annotated[str | None, typer.Option(help="What its requests do while it is cold: wait, fail or base.")]
Tenants = Annotated[list[str] | None, typer.Option("--tenant", help="Who may use it; may be repeated.")]

alias = typer.Typer(no_args_is_help=True, help="Names that share their requests out.")


def register(adapters: typer.Typer) -> None:
    """Add the commands to the group."""
    for command in (add, promote, rollback, remove, pin, set_rules):
        name = "set" if command is set_rules else command.__name__
        adapters.command(name)(command)
    adapters.add_typer(alias, name="alias")


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

    Every byte of a local adapter is checked first. Base, rank, modules and signature are taken from the adapter.

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
        version = {
            "digest": found.digest,
            "path": path_for(source if found.folder is None else str(found.folder), home),
        }
        version |= found.facts
        version |= {"base_model": base_model} if base_model else {}
        given = key.sign(found.digest) if key else signature
        version |= {"signature": given} if given else {}
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


def promote(
    ref: Ref,
    alias_name: Annotated[
        str | None, typer.Option("--alias", help="Give it the adapter's share of this alias; default: make it current.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Percent of --alias; default: all that the adapter has.")] = None,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Make a version the current one, or move an alias' requests to it.

    Examples:

        lora-slots adapters promote pirate@2 --alias support --weight 20

        lora-slots adapters promote pirate@2 --alias support

        lora-slots adapters promote pirate@2
    """
    from adapter_slots.registry_changes import check_version, give_share, make_current

    name, number = versioned(ref)
    if weight is not None and not alias_name:
        raise UsageError("--weight goes with --alias")

    def edit(doc: Doc) -> Doc:
        if not alias_name:
            return make_current(doc, name, number)
        check_version(doc, name, number)
        return give_share(doc, alias_name, ref, weight)

    share = f" --alias {alias_name}" + (f" --weight {weight:g}" if weight is not None else "") if alias_name else ""
    made = changed(home_at(place, endpoint), f"promote {ref}{share}", edit, as_json)
    if made.record and not as_json:
        from lora_slots.adapters_view import shares_text

        targets = made.doc.get("aliases", {}).get(alias_name, {}).get("targets", {})
        typer.echo(f"alias {alias_name}: {shares_text(targets)}" if alias_name else f"{ref} is current")


def rollback(
    name: Annotated[str | None, typer.Argument(help="Adapter or alias; default: whatever was changed last.")] = None,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Take the last change back; again takes the one before it back.

    Example: lora-slots adapters rollback support
    """
    from adapter_slots.registry_history import Record, read_history, undo

    home = home_at(place, endpoint)
    taken: list[Record] = []

    def edit(doc: Doc) -> Doc:
        new, record = undo(doc, read_history(home.notes()), name)
        taken[:] = [record]
        return new

    what = "rollback" + (f" {name}" if name else "")
    made = changed(home, what, edit, as_json, undoes=lambda: taken[0].id if taken else None)
    if made.record and not as_json:
        typer.echo(f"taken back: {taken[0].what} of {taken[0].at[:19]}Z by {taken[0].by}")


def remove(
    ref: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Adapter, or one of its versions.")],
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Take an adapter, or one version, out of the registry; its files stay. Refused while an alias leads to it.

    Example: lora-slots adapters remove pirate@1
    """
    from adapter_slots.registry_changes import remove as removed

    def edit(doc: Doc) -> Doc:
        name, number = (ref, None) if ref in doc["adapters"] else split_ref(ref)
        return removed(doc, name, number)

    made = changed(home_at(place, endpoint), f"remove {ref}", edit, as_json)
    if made.record and not as_json:
        typer.echo(f"removed {ref}")


def pin(
    name: Name,
    off: Annotated[bool, typer.Option("--off", help="End the pin.")] = False,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Keep an adapter's current version in a slot of every server that reads this registry.

    Example: lora-slots adapters pin pirate
    """
    from adapter_slots.registry_changes import set_rules as with_rules

    made = changed(
        home_at(place, endpoint),
        f"pin {name}" + (" --off" if off else ""),
        lambda doc: with_rules(doc, name, {"pinned": not off}),
        as_json,
    )
    if made.record and not as_json:
        typer.echo(f"{name}: {'not pinned any more' if off else 'pinned'}")


def set_rules(
    name: Name,
    pool: Pool = None,
    cold: Cold = None,
    tenants: Tenants = None,
    no_pool: Annotated[bool, typer.Option("--no-pool", help="No pool.")] = False,
    no_cold: Annotated[bool, typer.Option("--no-cold", help="The server's own cold policy.")] = False,
    everybody: Annotated[bool, typer.Option("--everybody", help="Every tenant may use it.")] = False,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Set an adapter's pool, cold policy and tenants.

    Example: lora-slots adapters set pirate --cold fail --tenant acme --tenant globex
    """
    from adapter_slots.registry_changes import set_rules as with_rules

    rules: dict[str, Any] = {}
    for key, value, away in (("pool", pool, no_pool), ("cold", cold, no_cold), ("tenants", tenants, everybody)):
        if value and away:
            raise UsageError(f"{key}: a value and its absence contradict each other")
        if value or away:
            rules[key] = value or None
    if not rules:
        raise UsageError("nothing to set; see --help")
    words = ", ".join(f"{key} {value}" for key, value in rules.items())
    made = changed(home_at(place, endpoint), f"set {name}: {words}", lambda doc: with_rules(doc, name, rules), as_json)
    if made.record and not as_json:
        typer.echo(f"{name}: {words}")


@alias.command("set")
def alias_set(
    name: Annotated[str, typer.Argument(help="Alias.")],
    targets: Annotated[list[str], typer.Argument(metavar="TARGET[=PERCENT]…", help="Adapter or NAME@VERSION.")],
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Make an alias, or change its targets; the percentages sum to 100.

    Example: lora-slots adapters alias set support pirate=95 pirate@2=5
    """
    from adapter_slots.registry_changes import set_alias

    shares: dict[str, float] = {}
    for text in targets:
        target, given, percent = text.rpartition("=") if "=" in text else (text, "", "")
        if target in shares:
            raise UsageError(f"{target} is there twice")
        if not given and len(targets) > 1:
            raise UsageError(f"{text}: of several targets each needs its share, {text}=PERCENT")
        try:
            shares[target] = float(percent) if given else 100.0
        except ValueError:
            raise UsageError(f"{text}: a percentage is a number, found {percent!r}") from None
    made = changed(
        home_at(place, endpoint),
        f"alias set {name} {' '.join(targets)}",
        lambda doc: set_alias(doc, name, shares),
        as_json,
    )
    if made.record and not as_json:
        from lora_slots.adapters_view import shares_text

        typer.echo(f"alias {name}: {shares_text(shares)}")


@alias.command("remove")
def alias_remove(
    name: Annotated[str, typer.Argument(help="Alias.")],
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Take an alias away; its targets stay.

    Example: lora-slots adapters alias remove support
    """
    from adapter_slots.registry_changes import remove_alias

    made = changed(home_at(place, endpoint), f"alias remove {name}", lambda doc: remove_alias(doc, name), as_json)
    if made.record and not as_json:
        typer.echo(f"removed alias {name}")


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
