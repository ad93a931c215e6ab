"""`lora-slots repo …`: render the model repository of a profile, and check anybody's."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from lora_slots.repository import RepositoryConfig
    from lora_slots.stack import TritonServer
    from trtllm_lora.profile import EngineProfile

repo = typer.Typer(no_args_is_help=True, help="The Triton model repository: render it from a profile, check it.")


def register(app: typer.Typer) -> None:
    """Add the group."""
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
def render(
    profile: Annotated[Path, typer.Argument(help="Engine profile (YAML).")],
    engine: Annotated[Path, typer.Option(help="Directory of the built engine, as Triton sees it.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Model repository to write.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory; default: the engine's own.")] = None,
    registry: Annotated[str, typer.Option(help="adapters.yaml of the slot manager, or s3://…")] = "adapters.yaml",
    grpc: Annotated[str, typer.Option(help="host:port of this Triton's gRPC door.")] = "127.0.0.1:8001",
    backend: Annotated[
        str | None, typer.Option(help="python (reference engine) or tensorrtllm (C++); default: by the runtime.")
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="Adapters to plan for: COUNTxRANK,…; default as in `plan`.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE of tensorrt_llm, or lora_router.KEY=VALUE; may be repeated."),
    ] = None,
    check_engine: Annotated[bool, typer.Option(help="Refuse an engine that is not what the profile says.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the path, and what `repo check` finds.")] = False,
) -> None:
    """Write the whole model repository: preprocessing, lora_router, tensorrt_llm, postprocessing, ensemble.

    Cache sizes come from the capacity plan. An existing repository is replaced in one step; else nothing is.

    Adapters in an object store need a folder for what is fetched: `--set lora_router.disk_dir=/var/lib/lora-slots`.

    Example: lora-slots repo render engines/profiles/llama-3.1-8b.yaml --engine /engines/llama -o /models
    """
    from lora_slots.refusals import Gathered, Refused, refusing
    from lora_slots.repo_check import check_repository
    from trtllm_lora.profile import load_profile
    from trtllm_lora.verify import tell, verify_engine

    with refusing():
        loaded = load_profile(profile)
        differences = verify_engine(engine, loaded) if check_engine else []
        if differences:
            raise Refused("\n".join(tell(differences, engine, profile)))
        gathered = Gathered()
        gathered.of(lambda: _door(grpc))
        text = gathered.of(lambda: _tokenizer(loaded, profile, engine, tokenizer))
        own = gathered.of(lambda: _parameters(set_ or []))
        gathered.tell()
        if text is None or own is None:
            return  # told above
        config = _config(loaded, engine, text, registry, grpc, backend, fleet, own)
        _write(config, out)
        findings = check_repository(out)
        if as_json:
            rows = [asdict(finding) for finding in findings]
            typer.echo(json.dumps({"path": str(out), "findings": rows}, indent=1))
            return
        for finding in findings:
            typer.echo(str(finding), err=True)
        typer.echo(str(out))


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


def _config(
    profile: EngineProfile,
    engine: Path,
    tokenizer: Path,
    registry: str,
    grpc: str,
    backend: str | None,
    fleet: str | None,
    own: Mapping[str, Mapping[str, str]],
) -> RepositoryConfig:
    from lora_slots.plan_report import router_parameters
    from lora_slots.refusals import Refused
    from lora_slots.repository import RepositoryConfig
    from trtllm_lora.fleet import parse_fleet, usual_fleet
    from trtllm_lora.plan import Wish, make_plan

    form = _backend(profile, backend)
    gpu = profile.serving.gpu_memory
    if gpu is None:
        raise Refused("the profile has no serving.gpu_memory, which the plan of the caches starts from")
    slots, shape = profile.serving.slots, profile.shape()
    words = fleet or usual_fleet(shape, slots)
    wish = Wish(profile, parse_fleet(words, shape), gpu, slots)
    plan = make_plan(wish)
    parameters, router = plan.parameters, router_parameters(wish, plan)
    for line in _planned_otherwise(profile, parameters, words, own["tensorrt_llm"]):
        typer.echo(line, err=True)
    if form == "python":
        # its caches are in the machine's memory: shares of a GPU mean nothing there
        parameters = {key: value for key, value in parameters.items() if "fraction" not in key}
        del router["lora_cache_device_pages"]
    return RepositoryConfig(
        engine_dir=engine.absolute(),
        tokenizer_dir=tokenizer.absolute(),
        registry=registry if "://" in registry else Path(registry).absolute(),
        engine_url=grpc,
        max_batch_size=profile.engine.max_batch_size,
        router={**router, "base_model": _base_model(profile), **own["lora_router"]},
        engine={"exclude_input_in_output": "true", **parameters, **own["tensorrt_llm"]},
        text={key: str(value).lower() for key, value in profile.text.model_dump().items()},
        backend=form,
        dora=profile.lora.dora,
    )


def _planned_otherwise(
    profile: EngineProfile, planned: Mapping[str, str], fleet: str, own: Mapping[str, str]
) -> Iterator[str]:
    """Where the plan of the caches writes another value than the profile has."""
    serving = profile.serving
    for key, name in (
        ("lora_cache_host_memory_bytes", "lora_host_memory"),
        ("lora_cache_optimal_adapter_size", "lora_optimal_rank"),
    ):
        says = str(getattr(serving, name))
        if name in serving.model_fields_set and key not in own and planned[key] != says:
            yield (
                f"{key}: {planned[key]}, as {fleet} in {serving.slots} slots needs; the profile's {name} is {says} "
                f"(--set {key}={says} keeps it, --fleet says what is served)"
            )


def _parameters(words: list[str]) -> dict[str, dict[str, str]]:
    """Model -> its parameters that were set by hand."""
    from lora_slots.refusals import Refused

    found: dict[str, dict[str, str]] = {"tensorrt_llm": {}, "lora_router": {}}
    wrong = []
    for word in words:
        key, equals, value = word.partition("=")
        model, _, name = key.strip().rpartition(".")
        if equals and name and (model or "tensorrt_llm") in found:
            found[model or "tensorrt_llm"][name] = value
        else:
            wrong.append(f"--set {word}: write KEY=VALUE, or lora_router.KEY=VALUE")
    if wrong:
        raise Refused("\n".join(wrong))
    return found


def _base_model(profile: EngineProfile) -> str:
    """What adapters are held to; the reference engine's base has a revision that no trainer knows."""
    model = profile.model
    return f"{model.id}@{model.revision}" if profile.runtime == "tensorrt_llm" else model.id


def _tokenizer(profile: EngineProfile, file: Path, engine: Path, given: Path | None) -> Path:
    """The tokenizer's directory: what was given, the profile's, or where an engine has its own.

    A compiled engine has it in a folder, the reference engine behind a link to its base.
    """
    from lora_slots.refusals import Refused

    named = given or (file.parent / profile.model.tokenizer if profile.model.tokenizer else None)
    folder = named or (engine / "base" if (engine / "base").exists() else engine / "tokenizer")
    if (folder / "tokenizer.json").is_file():
        return folder
    if named is None:
        typer.echo(f"warning: {folder}: no tokenizer.json: the text steps will not start; give --tokenizer", err=True)
        return folder
    place = "--tokenizer" if given else f"{file}: model.tokenizer"
    raise Refused(f"{place} {named}: no tokenizer.json there; write a directory that has it")


def _door(grpc: str) -> None:
    from lora_slots.refusals import Refused

    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})", grpc)
    if not found or not 0 < int(found[1]) < 1 << 16:
        raise Refused(f"--grpc {grpc[:200]}: write HOST:PORT, such as 127.0.0.1:8001")


def _backend(profile: EngineProfile, asked: str | None) -> Literal["python", "tensorrtllm"]:
    from lora_slots.refusals import Refused

    if asked not in (None, "python", "tensorrtllm"):
        raise Refused(f"--backend {asked}: write python or tensorrtllm")
    if asked == "python" and profile.runtime != "reference":
        raise Refused("--backend python is the reference engine; a compiled engine is served by tensorrtllm")
    if asked == "python" or (asked is None and profile.runtime == "reference"):
        return "python"
    return "tensorrtllm"


def _write(config: RepositoryConfig, out: Path) -> None:
    """Render beside `out`, then swap: a server that watches it never sees half a repository."""
    from lora_slots.refusals import Refused
    from lora_slots.repository import MODELS
    from lora_slots.repository import render as write_repository

    strange = sorted(path.name for path in out.iterdir() if path.name not in MODELS) if out.is_dir() else []
    if strange or (out.exists() and not out.is_dir()):
        raise Refused(
            f"{out}: has {', '.join(strange[:5]) or 'a file of this name'}, which no repository has; left alone"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = write_repository(config, Path(scratch) / "new")
        if out.exists():
            out.rename(Path(scratch) / "old")
        made.chmod(0o755)
        made.rename(out)
