"""`lora-slots generate`: one streamed answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from lora_slots.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads standard input.")],
    adapter: Annotated[str | None, typer.Option(help="Adapter name; without it the base model answers.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer at most.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with the chat template; default: the embedded base model's.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; default: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among so many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest tokens of this share.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed gives the same answer.")] = None,
    url: Annotated[
        str | None, typer.Option(help="host:port of Triton's gRPC door; default: $LORA_SLOTS_URL or `up`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON, with its times.")] = False,
) -> None:
    """Ask the base or an adapter, and print the answer as it streams.

    Examples:

        lora-slots generate --adapter pirate 'Who are you?'

        echo 'Who are you?' | lora-slots generate -

        lora-slots generate --adapter pirate --json 'Who are you?'
    """
    from lora_slots import address
    from lora_slots.client import Client

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("the prompt is empty")
    if not raw:
        text = _chat(text, tokenizer)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    sampling = {name: value for name, value in options.items() if value is not None}
    pieces, first_piece_s, started = [], None, time.monotonic()
    with Client(url or address.find()) as client:
        for piece in client.stream(text, adapter=adapter, max_tokens=max_tokens, sampling=sampling):
            if first_piece_s is None:
                first_piece_s = time.monotonic() - started
            pieces.append(piece)
            if not as_json:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    if as_json:
        answer = {"adapter": adapter, "text": "".join(pieces), "prompt": text, "pieces": len(pieces)}
        times = {"first_piece_s": first_piece_s, "total_s": time.monotonic() - started}
        typer.echo(json.dumps({**answer, **times}, indent=1, ensure_ascii=False))
    else:
        typer.echo()


def _chat(text: str, tokenizer: Path | None) -> str:
    from rich.console import Console

    from lora_slots.base_model import ensure_base_model
    from lora_slots.progress import Bars
    from lora_slots.text import Tokenizer

    if tokenizer is None:
        with Bars(Console(stderr=True)) as bars:  # it may have to be fetched
            tokenizer = ensure_base_model(progress=bars.report)
    return Tokenizer(tokenizer).apply_chat_template([{"role": "user", "content": text}])
