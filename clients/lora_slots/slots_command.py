"""`lora-slots slots …`: what is in the engine's slots, and an operator's hand on it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Url = Annotated[str | None, typer.Option(help="host:port of Triton's gRPC door; default: $LORA_SLOTS_URL or `up`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Names = Annotated[list[str], typer.Argument(help="Adapter names.")]

slots = typer.Typer(no_args_is_help=True, help="The adapters in the engine's slots.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(slots, name="slots")


@slots.command()
def status(url: Url = None, as_json: Json = False) -> None:
    """Which adapter is in which tier, who holds it, and how long it has been idle.

    Example: lora-slots slots status --json
    """
    answer = _operate(url, "status")
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("adapter", "tier", "held by", "idle s", "pages", "task id", "digest")
    for a in answer["adapters"]:
        table.add_row(
            a["name"],
            a["tier"],
            _holders(a),
            f"{a['idle_s']:.1f}",
            str(a["pages"]),
            str(a["task_id"]),
            a["digest"][:12],
        )
    console = Console()
    console.print(table)
    seen = {a["name"] for a in answer["adapters"]}
    unused = [name for name in answer["known"] if name not in seen]
    console.print(
        f"slots {answer['slots_used']}/{answer['num_slots']}, "
        f"free cache pages {answer['cache_pages_free']}/{answer['cache_pages']}"
        + (f" and {retired} of adapters without a slot" if (retired := answer["cache_pages_retired"]) else "")
        + (f", on disk and never asked for: {', '.join(unused)}" if unused else ""),
        highlight=False,
    )
    if answer["draining"]:
        console.print("draining: nothing new is granted; `slots drain --off` takes it back", highlight=False)
    for name, why in answer["pins_refused"].items():
        console.print(f"{name} should be pinned and is not: {why}", highlight=False)
    if answer["registry_problem"]:
        console.print(f"registry broken, the last good one is in use: {answer['registry_problem']}", highlight=False)


@slots.command()
def explain(name: Annotated[str, typer.Argument(help="Adapter name.")], url: Url = None, as_json: Json = False) -> None:
    """Everything known of one adapter: source, verdict, tier, story, last loads, and whom the engine drops next.

    Example: lora-slots slots explain pirate
    """
    answer = _operate(url, "explain", adapter=name)
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
        return
    story = answer.pop("story")
    for key, value in answer.items():
        typer.echo(f"{key:<14} {_words(value)}")
    for line in story:
        typer.echo(f"{line['ago_s']:>10.1f} s ago  {line['what']}")


@slots.command()
def pools(url: Url = None, as_json: Json = False) -> None:
    """Slots reserved for groups of adapters, and how many each group has now.

    Example: lora-slots slots pools
    """
    answer = _operate(url, "status")["pools"]
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
        return
    for name, pool in answer.items():
        typer.echo(f"{name}: {pool['used']} used, {pool['reserved']} reserved, cap {pool['cap'] or 'none'}")
    if not answer:
        typer.echo("no pools; adapters.yaml can define some")


@slots.command()
def drain(
    off: Annotated[bool, typer.Option("--off", help="Grant leases again.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Grant nothing new, and let running leases end; --off takes it back.

    Examples:

        lora-slots slots drain

        lora-slots slots drain --off
    """
    answer = _operate(url, "drain", on=not off)
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        typer.echo("granting again" if off else "draining: running leases end, new ones are refused")


@slots.command()
def warm(names: Names, url: Url = None, as_json: Json = False) -> None:
    """Bring adapters into slots before their first request.

    Example: lora-slots slots warm pirate robot
    """
    _each("warm", names, url, as_json)


@slots.command()
def pin(names: Names, url: Url = None, as_json: Json = False) -> None:
    """Keep adapters in slots until they are unpinned.

    Example: lora-slots slots pin pirate
    """
    _each("pin", names, url, as_json)


@slots.command()
def unpin(names: Names, url: Url = None, as_json: Json = False) -> None:
    """End a pin.

    Example: lora-slots slots unpin pirate
    """
    _each("unpin", names, url, as_json)


@slots.command()
def evict(names: Names, url: Url = None, as_json: Json = False) -> None:
    """Take idle adapters out of their slots. Refused while one is leased or pinned.

    Example: lora-slots slots evict pirate robot
    """
    _each("evict", names, url, as_json)


def _each(op: str, names: list[str], url: str | None, as_json: bool) -> None:
    for name in names:
        answer = _operate(url, op, adapter=name)
        extra = f" (found in {answer['found_in']}, {answer['waited_s']:.2f} s)" if "found_in" in answer else ""
        typer.echo(json.dumps(answer) if as_json else f"{op}: {name}{extra}")


def _operate(url: str | None, op: str, **arguments: Any) -> dict[str, Any]:
    from lora_slots import address
    from lora_slots.client import Client

    with Client(url or address.find()) as client:
        return client.operate(op, **arguments)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _holders(a: dict[str, Any]) -> str:
    words = [f"{a['leases']} leases"] if a["leases"] else []
    words += [f"{a['waiting']} waiting"] if a["waiting"] else []
    words += ["pin"] if a["pinned"] else []
    words += [f"moving to {a['moving_to']}"] if a["moving_to"] else []
    words += ["failed: see `slots explain`"] if a["failure"] else []
    return ", ".join(words)
