"""`lora-slots tenants …`: who may use the gateway, and their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lora_slots.errors import UsageError

File = Annotated[Path, typer.Option("--file", help="The file that `lora-slots gateway --tenants` reads.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT = Path("tenants.yaml")

tenants = typer.Typer(no_args_is_help=True, help="Tenants of the gateway, their adapters, limits and keys.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(tenants, name="tenants")


@tenants.command()
def add(
    name: Annotated[str, typer.Argument(help="The tenant's name.")],
    adapter: Annotated[
        list[str] | None, typer.Option(help="Adapter or alias it may use, or a pattern such as 'acme-*'; repeatable.")
    ] = None,
    base: Annotated[bool, typer.Option(help="Whether it may ask the base model.")] = True,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests it may begin in a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers in a minute.")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    cold_loads: Annotated[int | None, typer.Option(min=0, help="Cold adapters being loaded for it at once.")] = None,
    file: File = DEFAULT,
    as_json: Json = False,
) -> None:
    """Add a tenant and print its key, which is never shown again.

    Example: lora-slots tenants add acme --adapter 'acme-*' --requests-per-minute 600 --concurrent 8
    """
    from lora_slots.gateway.keys import add_tenant, key_id

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
        "cold_loads": cold_loads,
    }
    made = add_tenant(file, name, adapter or [], base, limits)
    _tell(made, as_json, tenant=name, key=made, key_id=key_id(made), file=str(file))


@tenants.command("list")
def list_tenants(as_json: Json = False, file: File = DEFAULT) -> None:
    """Tenants, what they may use, and the ids of their keys (the keys themselves are nowhere).

    Example: lora-slots tenants list --json
    """
    from lora_slots.gateway.tenants import read_tenants

    parsed = read_tenants(file)
    if as_json:
        typer.echo(json.dumps(parsed.model_dump(by_alias=True), indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("tenant", "adapters", "base", "limits", "key ids")
    for name, one in parsed.tenants.items():
        limits = one.limits.model_dump(exclude_none=True)
        table.add_row(
            name,
            ", ".join(one.adapters),
            "yes" if one.base else "no",
            ", ".join(f"{limit} {number}" for limit, number in limits.items()),
            ", ".join(key.id for key in one.keys),
        )
    table.add_row("(admin port)", "", "", "", ", ".join(key.id for key in parsed.admin.keys))
    Console().print(table)


@tenants.command()
def key(
    name: Annotated[str | None, typer.Argument(help="Tenant; not with --admin or --revoke.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="A key of the admin port.")] = False,
    revoke: Annotated[str | None, typer.Option(help="Take the key with this id out instead.")] = None,
    file: File = DEFAULT,
    as_json: Json = False,
) -> None:
    """Print a further key, so that one can be replaced without a gap; or take one out.

    Examples:

        lora-slots tenants key acme

        lora-slots tenants key --admin

        lora-slots tenants key --revoke x7ab29cd
    """
    from lora_slots.gateway.keys import add_key, key_id, revoke_key

    if sum((name is not None, admin, revoke is not None)) != 1:
        raise UsageError("give a tenant's name, or --admin, or --revoke ID: one of them")
    if revoke is not None:
        revoke_key(file, revoke)
        _tell(f"revoked: {revoke}", as_json, revoked=revoke, file=str(file))
    else:
        made = add_key(file, name)
        _tell(made, as_json, tenant=name, admin=admin, key=made, key_id=key_id(made), file=str(file))


@tenants.command()
def remove(
    name: Annotated[str, typer.Argument(help="The tenant's name.")], file: File = DEFAULT, as_json: Json = False
) -> None:
    """Take a tenant out, with all its keys.

    Example: lora-slots tenants remove acme
    """
    from lora_slots.gateway.keys import remove_tenant

    remove_tenant(file, name)
    _tell(f"removed: {name}", as_json, removed=name, file=str(file))


def _tell(words: str, as_json: bool, **facts: object) -> None:
    typer.echo(json.dumps(facts, indent=1) if as_json else words)
