"""`lora-slots repo …`: render the model repository of a profile, and check anybody's."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lora_slots.stack import TritonServer

repo = typer.Typer(no_args_is_help=True, help="The Triton model repository: render it from a profile, check it.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    from lora_slots import repo_render

    repo_render.register(repo)
    app.add_typer(repo, name="repo")


@repo.command()
def check(
    folder: Annotated[Path, typer.Argument(help="Model repository, ours or anybody's.")],
    engine: Annotated[Path | None, typer.Option(help="Engine directory; default: what gpt_model_path names.")] = None,
    bundles: Annotated[Path | None, typer.Option(help="Folder of bundles that will be sent.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find what goes wrong with LoRA in a model repository, with file, line and remedy. Exit code 2 if anything is.

    Example: lora-slots repo check /models --engine /engines/llama
    """
    from lora_slots.errors import EXIT_REFUSED, UsageError
    from lora_slots.refusals import refusing
    from lora_slots.repo_check import check_repository
    from trtllm_lora.bundle import CONFIG_FILE

    if bundles is not None and not any(bundles.glob(f"*/{CONFIG_FILE}")):
        raise UsageError(f"--bundles {bundles}: no bundle here (a folder with {CONFIG_FILE} for each adapter)")
    with refusing():
        findings = check_repository(folder, engine, bundles)
        if as_json:
            typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        else:
            for finding in findings:
                typer.echo(str(finding))
            errors = sum(not finding.warning for finding in findings)
            typer.echo(f"{folder}: {errors} errors, {len(findings) - errors} warnings")
        if any(not finding.warning for finding in findings):
            raise typer.Exit(EXIT_REFUSED)


@repo.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="Model repository, rendered with --grpc 127.0.0.1:PORT.")],
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 0,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 0,
    log: Annotated[Path | None, typer.Option(help="Triton's log; default: gone after the stop.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON when it serves: URLs, adapters, pid.")
    ] = False,
) -> None:
    """Serve a repository with the Triton of this environment, on loopback, until Ctrl-C. For repositories on a CPU.

    gRPC is where lora_router looks for the engine. In the NGC image, tritonserver itself serves the repository.

    Example: lora-slots repo serve ./models
    """
    from lora_slots.refusals import refusing
    from lora_slots.stack import StackConfig, TritonServer, exit_on_signals
    from lora_slots.supervisor import supervise

    with refusing():
        port = _grpc_port(folder)
    config = StackConfig(
        folder, http_port=http_port, grpc_port=port, metrics_port=metrics_port, log_path=log, control_models=True
    )
    with exit_on_signals(), TritonServer(config) as server:
        if as_json:
            typer.echo(_ready_json(server, folder))  # which flushes
        else:
            typer.echo(f"ready: grpc {server.grpc_url}, http {server.http_url}, metrics {server.metrics_url}")
        supervise(server, lambda text: typer.echo(text, err=True))


def _ready_json(server: TritonServer, folder: Path) -> str:
    from lora_slots.client import Client

    with Client(server.grpc_url) as client:
        adapters = client.status()["known"]
    return json.dumps({**server.urls, "repository": str(folder), "adapters": adapters, "pid": os.getpid()})


def _grpc_port(folder: Path) -> int:
    from lora_slots.refusals import Refused
    from lora_slots.repo_files import read_repository

    router = read_repository(folder).models.get("lora_router")
    url = router.parameter("engine_url") if router else None
    host, _, port = (url or "").rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        found = f"lora_router looks for it at {url}" if url else "there is no lora_router with an engine_url"
        raise Refused(f"{folder}: serves its own engine on 127.0.0.1, but {found}; render with --grpc 127.0.0.1:PORT")
    return int(port)
