"""`lora-slots canary`: ask a new version and the one it would replace the same things, and say whether it may go on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_slots.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from lora_slots.canary import Sample, Verdict

PROMPTS = ("Who are you?", "What is the capital of France?", "Name three colours.", "How do I boil an egg?")
"""What is asked where no file says it."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("canary")(canary)


def canary(
    ref: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="The new version.")],
    against: Annotated[str, typer.Option(help="What it would replace: a name or NAME@VERSION.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line; default: four of our own.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to each of the two.")] = 20,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="So many at a time.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer at most.")] = 32,
    expect: Annotated[str | None, typer.Option(help="Regular expression that the new version's answers match.")] = None,
    min_match: Annotated[float, typer.Option(min=0, max=1, help="Share of its answers that must.")] = 1.0,
    max_errors: Annotated[float, typer.Option(min=0, max=1, help="Share of its requests that may fail.")] = 0.0,
    max_slowdown: Annotated[
        float, typer.Option(min=1, help="First token, median: at most so many times the other's.")
    ] = 3.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with the chat template; default: the embedded base model's.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send prompts as they are, without the chat template.")] = False,
    url: Annotated[
        str | None, typer.Option(help="host:port of Triton's gRPC door; default: $LORA_SLOTS_URL or `up`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask a new version of an adapter and the one it would replace the same things in turn; exit code 3 if it is worse.

    Both are warmed first, so that no cold load is counted. Answers are greedy. Nothing in the registry is changed:
    `lora-slots adapters promote` and `rollback` do that.

    Example: lora-slots canary pirate@2 --against pirate --expect '(?i)arr|matey' --min-match 0.8
    """
    from lora_slots import address
    from lora_slots.canary import Limits, judge
    from lora_slots.client import Client

    limits = Limits(max_errors, max_slowdown, min_match, _pattern(expect))
    asked = _prompts(prompts, tokenizer, raw=raw)
    where = url or address.find()
    with Client(where) as client:
        for name in (against, ref):
            client.operate("warm", adapter=name)
    stable, new = _ask(where, (against, ref), asked, requests, concurrency, max_tokens)
    verdict = judge(stable, new, limits)
    if as_json:
        sides = {"stable": verdict.stable.as_json(), "canary": verdict.canary.as_json()}
        typer.echo(json.dumps({"good": verdict.good, "reasons": list(verdict.reasons), **sides}, indent=1))
    else:
        _tell(against, ref, verdict)
    if not verdict.good:
        raise CheckFailed("\n".join(f"{ref}: {reason}" for reason in verdict.reasons))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        raise UsageError(f"--expect {text!r}: {error}") from None


def _prompts(file: Path | None, tokenizer: Path | None, *, raw: bool) -> list[str]:
    lines: Sequence[str] = PROMPTS
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise UsageError(f"{file}: no prompt in it; one a line is expected")
    if raw:
        return list(lines)
    from lora_slots.base_model import ensure_base_model
    from lora_slots.text import Tokenizer

    chat = Tokenizer(tokenizer or ensure_base_model())
    return [chat.apply_chat_template([{"role": "user", "content": line}]) for line in lines]


def _ask(
    url: str, refs: tuple[str, str], prompts: Sequence[str], requests: int, concurrency: int, max_tokens: int
) -> tuple[list[Sample], list[Sample]]:
    """Samples of both, asked in turn, so that whatever else goes on meets both alike."""
    names = [ref for _ in range(requests) for ref in refs]
    texts = [prompts[i % len(prompts)] for i in range(requests) for _ in refs]
    with ThreadPoolExecutor(concurrency) as pool:
        made = list(pool.map(lambda name, text: sample(url, name, text, max_tokens, time.perf_counter), names, texts))
    return made[0::2], made[1::2]


def sample(url: str, ref: str, prompt: str, max_tokens: int, clock: Callable[[], float]) -> Sample:
    """One request, timed by `clock`; what the server says of it is in the sample."""
    from lora_slots.canary import Sample
    from lora_slots.client import Client
    from lora_slots.errors import ServerError

    pieces, first, began = [], None, clock()
    try:
        with Client(url) as client:
            for piece in client.generate(prompt, adapter=ref, max_tokens=max_tokens):
                first = clock() - began if first is None and piece else first
                pieces.append(piece)
    except ServerError as error:
        return Sample(error=f"{error} [{error.code}]")
    return Sample("".join(pieces), first)


def _tell(against: str, ref: str, verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("version", "requests", "errors", "first token, median", "as expected")
    for name, side in ((against, verdict.stable), (ref, verdict.canary)):
        first = f"{side.first_p50_s * 1000:.0f} ms" if side.first_p50_s is not None else "-"
        table.add_row(
            name,
            str(side.requests),
            str(side.errors),
            first,
            f"{side.match:.0%}" if side.match is not None else "-",
        )
    Console().print(table)
    if verdict.good:
        typer.echo(f"{ref} is as good as {against}")
