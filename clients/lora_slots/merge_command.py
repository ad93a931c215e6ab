"""`lora-slots merge` and `lora-slots merge-advice`: adapters that deserve an engine of their own."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("merge")(merge)
    app.command("merge-advice")(merge_advice)


def merge(
    adapter: Annotated[Path, typer.Argument(help="PEFT adapter directory.")],
    base: Annotated[Path, typer.Option(help="Hugging Face directory of the base model.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Hugging Face directory to write.")],
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None, typer.Option(help="Type of the weights; default: the base's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Merge an adapter into its base with PEFT: a new base, to be built into an engine of its own.

    Worth it for one adapter with more than 80 % of the traffic, for good, whose users wait for the first token
    (`lora-slots merge-advice`). Needs `pip install 'lora-slots\\[merge]'`.

    Example: lora-slots merge ./my_adapter --base ./llama -o ./llama-mine
    """
    from lora_slots.merge import merge_adapter
    from lora_slots.refusals import refusing

    with refusing():
        made = merge_adapter(base, adapter, out, dtype=dtype, say=lambda text: typer.echo(text, err=True))
    about = {"path": str(made), "base": str(base), "adapter": str(adapter)}
    typer.echo(json.dumps(about, indent=1) if as_json else str(made))


def merge_advice(
    log: Annotated[Path, typer.Argument(help="Request log (JSON lines or CSV: time, adapter, ttft_ms).")],
    latency_goal_ms: Annotated[float | None, typer.Option(help="What the first token may take, p95.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say from traffic whether an adapter should be merged: its share, whether it lasts, whether latency binds it.

    Example: lora-slots merge-advice requests.jsonl --latency-goal-ms 200
    """
    from lora_slots.advice import advise
    from lora_slots.refusals import Refused, refusing
    from lora_slots.traffic import read_log

    with refusing():
        if latency_goal_ms is not None and not math.isfinite(latency_goal_ms):
            raise Refused(f"--latency-goal-ms {latency_goal_ms}: write a number of milliseconds")
        advice = advise(read_log(log, 1.0), latency_goal_ms)
    typer.echo(
        json.dumps([asdict(each) for each in advice], indent=1) if as_json else "\n".join(a.text() for a in advice)
    )
