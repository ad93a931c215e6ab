"""`lora-slots adapters add|promote|rollback|remove|alias|pin|set`: each one atomic write of the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_slots.adapters_add import add
from lora_slots.adapters_place import (
    Cold,
    Endpoint,
    Json,
    Name,
    Place,
    Pool,
    Tenants,
    changed,
    home_at,
    split_ref,
    versioned,
)
from lora_slots.errors import UsageError

if TYPE_CHECKING:
    from adapter_slots.registry_changes import Doc

Ref = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="A version of an adapter.")]

alias = typer.Typer(no_args_is_help=True, help="Names that share their requests out.")


def register(adapters: typer.Typer) -> None:
    """Add the commands to the group."""
    for command in (add, promote, rollback, remove, pin, set_rules):
        name = "set" if command is set_rules else command.__name__
        adapters.command(name)(command)
    adapters.add_typer(alias, name="alias")


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
    words = ", ".join(f"{key} {_text(value)}" if value else f"no {key}" for key, value in rules.items())
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


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " and ".join(value)
