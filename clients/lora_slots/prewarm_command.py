"""`lora-slots prewarm`: adapters into slots before traffic, for deploy pipelines and readiness gates."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_slots.errors import EXIT_ENVIRONMENT, EXIT_REFUSED, UsageError

if TYPE_CHECKING:
    from lora_slots.prewarm import Choice, Outcome


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prewarm")(prewarm)


def prewarm(
    names: Annotated[list[str] | None, typer.Argument(help="Adapters, `adapter@version` or aliases.")] = None,
    registry: Annotated[
        str | None, typer.Option("--from", help="All adapters of this adapters.yaml, a file or s3://bucket/key.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="The so many adapters most asked for in --log.")] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(
            help="Access log: of `lora-slots gateway`, of a proxy that writes adapter=NAME or JSON with `adapter`, or "
            "a trace file of Triton; .gz too, - is standard input; may be repeated."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Adapters at a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for each adapter.")] = 120.0,
    wait_ready: Annotated[float, typer.Option(min=0, help="Wait so many seconds for the server to be ready.")] = 0.0,
    every: Annotated[
        bool, typer.Option("--all", help="Also those that find no slot: they are next to it in host memory then.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="host:port of Triton's gRPC door; default: $LORA_SLOTS_URL or `up`.")
    ] = None,
    s3_endpoint_url: Annotated[str | None, typer.Option(help="S3 that is not AWS, for --from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a report as JSON.")] = False,
) -> None:
    """Bring adapters into slots before traffic: each is warmed and gives one token through the whole ensemble.

    Exit codes: 0 all are warm, 2 some were refused (each is named with why), 1 no server answers.

    With --from pinned adapters come first, then those that aliases need. There are never more than slots; what is left
    out is said.

    Examples:

        lora-slots prewarm pirate robot@2

        lora-slots prewarm --from adapters.yaml --wait-ready 120 --json

        lora-slots prewarm --top 16 --log access.log
    """
    import asyncio

    from lora_slots import address

    for option, seconds in (("--timeout", timeout), ("--wait-ready", wait_ready)):
        if not math.isfinite(seconds):
            raise UsageError(f"{option}: {seconds} is not a number of seconds")
    wanted, published = _wanted(names or [], registry, top, log or [], s3_endpoint_url)
    if not wanted:
        typer.echo(json.dumps(_report(None, [])) if as_json else "no adapter to warm")
        return
    choice, outcomes = asyncio.run(
        _run(url or address.find(), wanted, published, jobs, timeout, wait_ready, every=every, quiet=as_json)
    )
    if as_json:
        typer.echo(json.dumps(_report(choice, outcomes), indent=1))
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        typer.echo(f"lora-slots: {outcome.adapter}: {outcome.error} [{outcome.code}]", err=True)
    if failed:
        raise typer.Exit(EXIT_ENVIRONMENT if any(outcome.unreachable for outcome in failed) else EXIT_REFUSED)


def _wanted(
    names: Sequence[str], registry: str | None, top: int | None, log: Sequence[Path], endpoint: str | None
) -> tuple[list[str], frozenset[str]]:
    """The adapters, the most important first, and those of them that a registry has. Raises UsageError."""
    if (top is None) != (not log):
        raise UsageError("--top N and --log FILE go together")
    if sum((bool(names), registry is not None, top is not None)) != 1:
        raise UsageError("say what to warm: names, or --from FILE, or --top N --log FILE: one of them")
    if registry is not None:
        from adapter_slots.registry import Registry
        from lora_slots.prewarm import names_of

        content = Registry(registry, endpoint_url=endpoint).content
        found = names_of(content)
        return found, frozenset(found)
    if top is not None:
        from lora_slots.access_log import count_adapters

        counts = count_adapters(log)
        return sorted(counts, key=lambda name: (-counts[name], name))[:top], frozenset()
    return list(names), frozenset()


async def _run(
    url: str,
    wanted: Sequence[str],
    published: frozenset[str],
    jobs: int,
    timeout: float,
    wait_ready: float,
    *,
    every: bool,
    quiet: bool,
) -> tuple[Choice, list[Outcome]]:
    from rich.console import Console

    from lora_slots.async_client import AsyncClient
    from lora_slots.client_retry import Retry
    from lora_slots.prewarm import choose, prewarm, until_ready
    from lora_slots.progress import Bars

    console = Console(stderr=True)
    async with AsyncClient(url, retry=Retry(attempts=5, total_s=timeout), timeout_s=timeout) as client:
        if wait_ready:
            await until_ready(client, wait_ready)
        choice = choose(wanted, await client.status())
        if choice.left_out:
            _say_left_out(choice, every=every)
        order = [*choice.left_out, *choice.names] if every else list(choice.names)  # the important ones stay
        outcomes: list[Outcome] = []
        with Bars(console) as bars:

            def told(outcome: Outcome) -> None:
                outcomes.append(outcome)
                if console.is_terminal:
                    bars.report("prewarm", len(outcomes), len(order))
                elif not quiet:
                    _say_warm(outcome)

            first = order[: len(order) - len(choice.names)]
            for names in (first, choice.names):
                await prewarm(client, names, jobs=jobs, timeout_s=timeout, published=published, told=told)
        if console.is_terminal and not quiet:  # the bar has had the line until now
            for outcome in outcomes:
                _say_warm(outcome)
    place = {name: i for i, name in enumerate([*choice.names, *choice.left_out])}
    return choice, sorted(outcomes, key=lambda outcome: place[outcome.adapter])


def _say_warm(outcome: Outcome) -> None:
    if outcome.error is None:
        typer.echo(f"warm: {outcome.adapter} (found in {outcome.found_in}, {outcome.seconds:.2f} s)")


def _say_left_out(choice: Choice, *, every: bool) -> None:
    named = ", ".join(choice.left_out[:8]) + (" …" if len(choice.left_out) > 8 else "")
    fate = "will not stay in slots" if every else "are left out; --all warms them too"
    typer.echo(
        f"lora-slots: {len(choice.names) + len(choice.left_out)} adapters, room for {len(choice.names)} in "
        f"{choice.slots} slots: {len(choice.left_out)} {fate}: {named}",
        err=True,
    )


def _report(choice: Choice | None, outcomes: Sequence[Outcome]) -> dict[str, object]:
    adapters = [{key: value for key, value in asdict(outcome).items() if key != "unreachable"} for outcome in outcomes]
    return {
        "all_warm": all(outcome.error is None for outcome in outcomes),
        "slots": choice.slots if choice else None,
        "left_out": list(choice.left_out) if choice else [],
        "adapters": adapters,
    }
