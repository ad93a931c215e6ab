"""`lora-slots convert` as typer sees it: argparse's options, so that a shell completes them; argparse parses them.

Made only where the application is made; a conversion itself never imports typer.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class HandedOver(TyperCommand):
    """A command that gets its words as they are; only a shell that completes has them parsed here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words for argparse."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        ctx.args = list(args)
        return list(args)


def handed_over(parser: argparse.ArgumentParser, run: Callable[[Sequence[str]], int]) -> Callable[..., None]:
    """A function for `app.command(cls=HandedOver)`: it has the parser's options, and gives `run` the words."""

    def convert(context: typer.Context, **_: object) -> None:
        """Convert a PEFT LoRA adapter to a bundle, or say every reason why not."""
        raise typer.Exit(run(context.args))

    words = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    actions = [action for action in parser._actions if action.dest != "help"]  # argparse has no public list
    words += [
        inspect.Parameter(
            action.dest, inspect.Parameter.KEYWORD_ONLY, default=_nothing(action), annotation=_annotation(action)
        )
        for action in actions
    ]
    convert.__signature__ = inspect.Signature(words)  # type: ignore[attr-defined]
    convert.__annotations__ = {word.name: word.annotation for word in words}
    return convert


def _nothing(action: argparse.Action) -> object:
    return False if action.nargs == 0 else None


def _annotation(action: argparse.Action) -> Any:
    kind: Any = Path if action.type is Path else str
    if action.choices:
        enum: Any = Enum  # typer takes lists of these, and not of a Literal
        kind = enum(action.dest, {str(choice): str(choice) for choice in action.choices})
    if isinstance(action, argparse._AppendAction):
        kind = list[kind]
    if not action.option_strings:
        return Annotated[kind | None, typer.Argument(help=action.help)]
    if action.nargs == 0:
        return Annotated[bool, typer.Option(*action.option_strings, help=action.help)]
    return Annotated[kind | None, typer.Option(*action.option_strings, help=action.help)]
