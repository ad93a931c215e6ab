"""`lora-slots gateway`: the OpenAI-compatible door."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lora_slots.gateway.server import Serving


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gateway")(gateway)


def gateway(
    url: Annotated[
        str | None, typer.Option(help="host:port of Triton's gRPC door; default: $LORA_SLOTS_URL or `up`.")
    ] = None,
    registry: Annotated[
        str | None, typer.Option(help="adapters.yaml, a file or s3://bucket/key; default: the server's.")
    ] = None,
    tenants: Annotated[Path | None, typer.Option(help="tenants.yaml; needed to listen on more than loopback.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer's directory; default: the server's base.")] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Engine's directory (its config.json); default: as above.")
    ] = None,
    base_name: Annotated[str | None, typer.Option(help="Name of the base model; default: its directory's.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 8080,
    admin_host: Annotated[str, typer.Option(help="Address of the admin port.")] = "127.0.0.1",
    admin_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any.")] = 8081,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may read answers; may be repeated. Default: none.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest body of a request.")] = 4 * 2**20,
    body_timeout_s: Annotated[
        float,
        typer.Option(
            "--body-timeout", min=0.1, help="Seconds in which a request's headers, then its body, must have arrived."
        ),
    ] = 60.0,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections that each port may have; more are refused with 503.")
    ] = 900,
    s3_endpoint_url: Annotated[str | None, typer.Option(help="S3 that is not AWS.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON when it serves: URLs, base, adapters, pid.")
    ] = False,
) -> None:
    """Serve OpenAI's API: adapters are models.

    Examples:

        lora-slots gateway --url 127.0.0.1:8001

        lora-slots gateway --host 0.0.0.0 --tenants tenants.yaml
    """
    from lora_slots import address
    from lora_slots.errors import UsageError

    try:
        import structlog
        import uvloop

        from lora_slots.gateway.server import Settings, serve
    except ModuleNotFoundError as error:
        raise UsageError(f"the gateway needs {error.name}: pip install 'lora-slots[gateway]'") from None

    _log_json(structlog)
    settings = Settings(
        url or address.find(),
        host=host,
        port=port,
        registry=registry,
        tenants=tenants,
        tokenizer=tokenizer,
        engine=engine,
        base_name=base_name,
        admin_host=admin_host,
        admin_port=admin_port,
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=max_body_bytes,
        body_timeout_s=body_timeout_s,
        max_connections=max_connections,
        s3_endpoint_url=s3_endpoint_url,
    )
    number = uvloop.run(serve(settings, _tell_json if as_json else _tell))
    raise typer.Exit(128 + number if number else 0)


def _tell(serving: Serving) -> None:
    typer.echo(f"serving {serving.base} and {len(serving.adapters)} adapters on {serving.url}")
    typer.echo(f"administration on {serving.admin_url}")


def _tell_json(serving: Serving) -> None:
    typer.echo(json.dumps({**asdict(serving), "pid": os.getpid()}))  # which flushes


def _log_json(structlog: Any) -> None:
    """Every line of the log is a JSON object on stderr, those of libraries too."""
    renderer = structlog.processors.JSONRenderer()
    shared = [structlog.processors.add_log_level, structlog.processors.format_exc_info]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
