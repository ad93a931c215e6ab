"""What all `lora-slots adapters` commands share: which registry, how it is refused, how it is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_slots.errors import EXIT_REFUSED, UsageError

if TYPE_CHECKING:
    from adapter_slots.registry_home import Home
    from adapter_slots.registry_writing import Changed, Edit

VARIABLE = "LORA_SLOTS_REGISTRY"
Place = Annotated[
    str | None,
    typer.Option("--registry", help=f"adapters.yaml, or s3://bucket/key; default: ${VARIABLE}, else ./adapters.yaml."),
]
Endpoint = Annotated[
    str | None, typer.Option("--s3-endpoint-url", help="S3 that is not AWS; default: $AWS_ENDPOINT_URL.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(help="Adapter.")]
Pool = Annotated[str | None, typer.Option(help="Pool of the adapter.")]
Cold = Annotated[str | None, typer.Option(help="What its requests do while it is cold: wait, fail or base.")]
Tenants = Annotated[list[str] | None, typer.Option("--tenant", help="Who may use it; may be repeated.")]


def home_at(place: str | None, endpoint: str | None) -> Home:
    """The registry a command means. Raises RegistryError."""
    from adapter_slots.registry_home import home_of

    text = place or os.environ.get(VARIABLE) or "adapters.yaml"
    return home_of(text, endpoint_url=endpoint)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what is refused into its lines on stderr and exit code 2; what cannot be reached stays an error (1)."""
    from adapter_slots.errors import ChangeRefused, NotAdmitted, UnknownAdapter
    from lora_slots.refusals import Refused
    from trtllm_lora import BundleError

    try:
        yield
    except (ChangeRefused, NotAdmitted, UnknownAdapter, Refused, BundleError) as error:
        sys.stderr.write(f"lora-slots: {error}\n")
        raise typer.Exit(EXIT_REFUSED) from None


def changed(
    home: Home, what: str, edit: Edit, as_json: bool, *, undoes: Callable[[], str | None] = lambda: None
) -> Changed:
    """Make a change and tell what it was: a line of words, or the history's record."""
    from adapter_slots.registry_writing import change

    with refusals():
        made = change(home, what, edit, undoes=undoes)
    for warning in made.warnings:
        sys.stderr.write(f"lora-slots: warning: {warning}\n")
    if as_json:
        typer.echo(made.record.line() if made.record else json.dumps({"id": None, "what": what, "changes": []}))
    elif made.record is None:
        typer.echo(f"{what}: nothing to do, {home.name} is so already")
    return made


def echo_json(value: Mapping[str, Any] | list[Any]) -> None:
    """Print JSON for programs."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def split_ref(text: str) -> tuple[str, int | None]:
    """`NAME@3` -> ("NAME", 3); `NAME` -> ("NAME", None)."""
    from adapter_slots.registry_entries import split_version

    return split_version(text) or (text, None)


def versioned(text: str) -> tuple[str, int]:
    """`NAME@3`, where the version must be said. Raises UsageError."""
    name, number = split_ref(text)
    if number is None:
        raise UsageError(f"{text}: say which version, NAME@N; `lora-slots adapters show {text}` lists them")
    return name, number
