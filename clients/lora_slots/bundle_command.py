"""`lora-slots bundle …`: check bundles, and put them where servers fetch them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trtllm_lora import Bundle

bundle = typer.Typer(no_args_is_help=True, help="Bundles on disk: check them, publish them.")
Folders = Annotated[list[Path], typer.Argument(help="Bundles, or folders of bundles.")]
Engine = Annotated[Path | None, typer.Option(help="Engine directory: does each bundle fit it?")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(bundle, name="bundle")


@bundle.command()
def verify(folders: Folders, engine: Engine = None, as_json: Json = False) -> None:
    """Check every byte of bundles against their manifests, and with --engine their fit. Exit code 2 if one is wrong.

    Example: lora-slots bundle verify ./bundles --engine /engines/llama
    """
    from lora_slots.refusals import refusing

    with refusing():
        found = _checked(folders, engine)
    if as_json:
        typer.echo(json.dumps([_facts(each) for each in found], indent=1))
    for each in [] if as_json else found:
        typer.echo(f"{each.adapter}: {each.digest} is whole" + (" and fits the engine" if engine else ""))


@bundle.command()
def publish(
    folders: Folders,
    to: Annotated[str, typer.Option("--to", help="s3://bucket/prefix.")],
    engine: Engine = None,
    as_json: Json = False,
) -> None:
    """Put bundles into a store, each under its digest; what is there is not sent. All are checked before any goes.

    Prints one URL for each, in order, which `lora-slots adapters add NAME URL` takes.

    Example: lora-slots bundle publish ./bundles --to s3://models/bundles
    """
    from lora_slots.publication import Publisher
    from lora_slots.refusals import refusing
    from trtllm_lora.bundle import MANIFEST_FILE

    with refusing():
        publisher, rows = Publisher(to), []
        for each in _checked(folders, engine):
            files = {name: str(entry["sha256"]) for name, entry in each.manifest["files"].items()}
            done = publisher.publish(each.digest, each.path, MANIFEST_FILE, files)
            rows.append({**_facts(each), "url": done.url, "sent": done.sent})
            if not as_json:
                typer.echo(done.url)
        if as_json:
            typer.echo(json.dumps(rows, indent=1))


def _checked(folders: list[Path], engine: Path | None) -> list[Bundle]:
    """Every bundle below the folders, whole and fit; else every reason, as Refused."""
    from lora_slots.refusals import Refused
    from trtllm_lora import BundleError, EngineShape, open_bundle
    from trtllm_lora.fit import fit_problems

    shape = EngineShape.from_engine_config(engine) if engine else None
    found, problems = [], []
    for folder in folders:
        for path in _below(folder):
            try:
                each = open_bundle(path)
                each.verify()
            except BundleError as error:
                problems.append(str(error))
                continue
            found.append(each)
            problems += [f"{path}: {reason}" for reason in (fit_problems(each, shape) if shape else ())]
    if problems:
        raise Refused("\n".join(problems))
    return found


def _below(folder: Path) -> Iterator[Path]:
    """The folder if it is a bundle, else those in it; a folder without one is opened, which says why it is none."""
    from trtllm_lora.bundle import MANIFEST_FILE

    inside = sorted(file.parent for file in folder.glob(f"*/{MANIFEST_FILE}"))
    yield from inside if inside and not (folder / MANIFEST_FILE).is_file() else [folder]


def _facts(each: Bundle) -> dict[str, object]:
    return {"adapter": each.adapter, "digest": each.digest, "task_id": each.task_id, "path": str(each.path)}
