"""`lora-slots adapters …`: which adapters exist, in which versions, under which names. Works on the registry alone.

Exit codes: 0 done, 1 usage or I/O, 2 refused or (`verify`) not as it should be. Changes are in adapters_change.py,
keys and signatures in adapters_keys.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_slots import adapters_change, adapters_keys
from lora_slots.adapters_place import Endpoint, Json, Place, echo_json, home_at, refusals, split_ref
from lora_slots.errors import EXIT_REFUSED

if TYPE_CHECKING:
    from adapter_slots.registry import Entry, Registry

adapters = typer.Typer(no_args_is_help=True, help="The registry: adapters, versions, aliases, signatures.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    adapters_change.register(adapters)
    adapters_keys.register(adapters)
    app.add_typer(adapters, name="adapters")


@adapters.command("list")
def list_adapters(place: Place = None, endpoint: Endpoint = None, as_json: Json = False) -> None:
    """Every adapter with its current version, its rules, and the aliases that lead to it.

    Example: lora-slots adapters list --registry ./adapters.yaml
    """
    from lora_slots.adapters_view import adapters_of, aliases_of, list_table

    registry = _registry(place, endpoint)
    content = registry.content
    found = adapters_of(content)
    if as_json:
        head = {"base_model": content.base_model, "require_signatures": content.require_signatures}
        echo_json({**head, "adapters": found, "aliases": aliases_of(content)})
        return
    from rich.console import Console

    console = Console()
    console.print(list_table(found))
    if content.base_model or content.require_signatures:
        signed = "; signatures are required" if content.require_signatures else ""
        console.print(f"base {content.base_model or 'not said'}{signed}", highlight=False)


@adapters.command()
def show(
    name: Annotated[str, typer.Argument(help="Adapter or alias.")],
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Everything the registry says of an adapter or an alias.

    Example: lora-slots adapters show pirate
    """
    from lora_slots.adapters_view import adapter_as_data, rules_text, shares_text

    registry = _registry(place, endpoint)
    content = registry.content
    alias = content.aliases.get(name)
    if alias is not None:
        if as_json:
            echo_json({"alias": name, "targets": dict(alias.targets)})
        else:
            typer.echo(f"alias {name}: {shares_text(alias.targets)}")
        return
    with refusals():
        adapter = adapter_as_data(content, registry.resolve(name).name)
    if as_json:
        echo_json(adapter)
        return
    typer.echo(
        f"{adapter['name']}: current {adapter['current']}" + (f", {text}" if (text := rules_text(adapter)) else "")
    )
    for version in adapter["versions"]:
        typer.echo(f"  version {version.pop('version')}")
        for key, value in version.items():
            if value:
                typer.echo(f"    {key:<15} {', '.join(value) if isinstance(value, list) else value}")
    for alias_name, targets in adapter["aliases"].items():
        typer.echo(f"  alias {alias_name}: {shares_text(targets)}")


@adapters.command()
def history(
    name: Annotated[str | None, typer.Argument(help="Only changes of this adapter or alias.")] = None,
    last: Annotated[int, typer.Option(min=1, help="So many of the latest changes.")] = 20,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Who changed what, when, from what to what.

    Example: lora-slots adapters history support --last 5
    """
    import json

    from adapter_slots.registry_history import read_history
    from lora_slots.adapters_view import record_lines

    records = read_history(home_at(place, endpoint).notes())
    found = [record for record in records if name is None or any(c.name == name for c in record.changes)][-last:]
    if as_json:
        echo_json([{**json.loads(record.line()), "follows": record.follows} for record in found])
        return
    for record in found:
        typer.echo("\n".join(record_lines(record)))
    if not found:
        typer.echo("no changes" + (f" of {name!r}" if name else ""))


@adapters.command()
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="NAME, NAME@VERSION or alias; default: all that names lead to.")
    ] = None,
    engine: Annotated[Path | None, typer.Option(help="Engine directory: does each adapter fit it?")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="name@revision that is served; default: the registry's.")
    ] = None,
    every: Annotated[bool, typer.Option("--all-versions", help="Old versions too.")] = False,
    place: Place = None,
    endpoint: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Check every byte, signature, base model and (with --engine) the fit; exit 2 if anything is not as it should be.

    Example: lora-slots adapters verify --engine /engines/llama --json
    """
    from adapter_slots.registry_history import read_history
    from lora_slots.adapters_verify import verify as verify_entries

    registry = _registry(place, endpoint, base_model)
    with refusals():
        entries = _entries(registry, names or [], every)
    verdicts = []
    for verdict in verify_entries(
        entries, registry.terms, read_history(registry.home.notes()), engine=engine, endpoint_url=endpoint
    ):
        verdicts.append(verdict)
        if not as_json:
            unjudged = " (bytes; --engine judges the conversion)" if verdict.kind == "peft" and engine is None else ""
            good = f"good {verdict.kind}{unjudged}" + (f", signed by {verdict.signed_by}" if verdict.signed_by else "")
            typer.echo(
                f"{verdict.entry.ref}: {good if not verdict.problems else ''}".rstrip(": ")
                + (":" if verdict.problems else "")
            )
            for problem in verdict.problems:
                typer.echo(f"  {problem}")
    if as_json:
        echo_json(
            [
                {"name": v.entry.name, "version": v.entry.version, "digest": v.entry.digest, "kind": v.kind,
                 "signed_by": v.signed_by, "problems": list(v.problems)}
                for v in verdicts
            ]
        )  # fmt: skip
    bad = sum(bool(verdict.problems) for verdict in verdicts)
    if bad:
        sys.stderr.write(f"lora-slots: {bad} of {len(verdicts)} versions are not as they should be\n")
        raise typer.Exit(EXIT_REFUSED)


@adapters.command()
def schema() -> None:
    """Print the JSON schema of adapters.yaml.

    Example: lora-slots adapters schema > adapters.schema.json
    """
    from adapter_slots.registry_schema import schema as registry_schema

    echo_json(dict(registry_schema()))


def _registry(place: str | None, endpoint: str | None, base_model: str | None = None) -> Registry:
    from adapter_slots.registry import Registry

    home = home_at(place, endpoint)
    where = Path(home.name) if home.folder is not None else home.name
    return Registry(where, base_model=base_model, endpoint_url=endpoint)


def _entries(registry: Registry, names: list[str], every: bool) -> list[Entry]:
    content = registry.content
    if not names:
        return list(content.all_entries() if every else content.serving.values())
    found: dict[str, Entry] = {}
    for name in names:
        alias = content.aliases.get(name)
        for target in alias.targets if alias is not None else (name,):
            entry = content.resolve(target)
            whole = every and split_ref(target)[1] is None
            for one in content.versions[entry.name].values() if whole else (entry,):
                found[one.ref] = one
    return list(found.values())
