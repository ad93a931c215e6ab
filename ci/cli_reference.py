"""The command line as a document, made from the application: usage, words, examples and options of each command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from lora_slots.cli import application
from lora_slots.convert_command import parser as convert_parser

_EXAMPLE = re.compile(r"^\s*(?:Examples?:\s*)?((?:\S.* \| )?lora-slots .*)$")
_OWN = ("--help", "--install-completion", "--show-completion")


def reference() -> str:
    """All commands in the order of `lora-slots --help`, groups as sections."""
    root = typer.main.get_command(application())
    context = root.make_context("lora-slots", [], resilient_parsing=True)
    return "\n\n".join("\n".join(lines) for lines in _group(root, context, 2))


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words of its name, command) of each command."""
    yield from _commands(typer.main.get_command(application()), ())


def examples(text: str) -> list[str]:
    """The command lines among the words of a command's help."""
    return [found.group(1).strip() for line in (text or "").splitlines() if (found := _EXAMPLE.match(line))]


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, inner in command.commands.items():
        yield from _commands(inner, (*words, name))


def _group(command: Any, context: Any, level: int) -> Iterator[list[str]]:
    for name, inner in command.commands.items():
        below = inner.make_context(name, [], parent=context, resilient_parsing=True)
        if hasattr(inner, "commands"):
            yield [f"{'#' * level} {below.command_path}", "", _words(inner.help)]
            yield from _group(inner, below, level + 1)
        elif name == "convert":
            yield [f"{'#' * level} {below.command_path}", "", *_convert()]
        else:
            yield [f"{'#' * level} {below.command_path}", "", *_command(inner, below)]


def _command(command: Any, context: Any) -> Iterator[str]:
    shown = examples(command.help)
    yield _words(command.help)
    yield ""
    yield f"`{command.get_usage(context).removeprefix('Usage: ')}`"
    if shown:
        yield ""
        yield from ("```", *shown, "```")
    rows = [record for param in command.params if (record := param.get_help_record(context)) and param.name != "help"]
    rows = [row for row in rows if not row[0].startswith(_OWN)]
    if rows:
        yield ""
        yield from ("| argument or option | meaning |", "| --- | --- |")
        yield from (f"| `{names}` | {_cell(words)} |" for names, words in rows)


def _convert() -> Iterator[str]:
    """argparse's, which is quicker to import."""
    made = convert_parser()
    yield made.description or ""
    yield ""
    yield "`lora-slots convert [OPTIONS] ADAPTER`"
    yield ""
    yield from ("```", *re.findall(r"lora-slots convert .*", made.epilog or ""), "```", "")
    yield from ("| argument or option | meaning |", "| --- | --- |")
    for action in made._actions:  # argparse has no public list
        if action.dest == "help":
            continue
        value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 and action.option_strings else ""
        choices = f" ({', '.join(map(str, action.choices))})" if action.choices else ""
        yield f"| `{', '.join(action.option_strings) or action.metavar}{value}` | {_cell(action.help or '')}{choices} |"


def _words(text: str | None) -> str:
    """A help without its examples, a paragraph a line."""
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    kept = [" ".join(part.split()) for part in paragraphs if not examples(part) and part.strip() != "Examples:"]
    return "\n\n".join(kept).replace("\\[", "[")  # escaped from rich's markup, for the terminal


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
