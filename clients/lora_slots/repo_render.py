"""`lora-slots repo render`: the model repository of a profile. Everything wrong is told at once, before a file is made.

Rule: what stands at `out` is what `repo check` finds no error in, or what stood there before.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from lora_slots.repo_files import Finding
    from lora_slots.repository import RepositoryConfig
    from trtllm_lora.fleet import Fleet
    from trtllm_lora.profile import EngineProfile


def register(repo: typer.Typer) -> None:
    """Add the command."""
    repo.command()(render)


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
    from lora_slots.refusals import Gathered, refusing
    from lora_slots.repo_parameters import own_parameters
    from trtllm_lora.profile import load_profile

    with refusing():
        gathered = Gathered()
        loaded = gathered.of(lambda: load_profile(profile))
        if loaded is not None and check_engine:
            gathered.of(lambda: _verified(loaded, profile, engine))
        gathered.of(lambda: _door(grpc))
        text = gathered.of(lambda: _tokenizer(loaded, profile, engine, tokenizer)) if loaded else None
        form = gathered.of(lambda: _backend(loaded, backend))
        own = gathered.of(lambda: own_parameters(set_ or []))
        adapters = gathered.of(lambda: _fleet(loaded, profile, fleet)) if loaded else None
        gathered.of(lambda: _place(out))
        gathered.tell()
        if loaded is None or text is None or form is None or own is None or adapters is None:
            return  # told above
        config = _config(loaded, engine, text, registry, grpc, form, adapters, own)
        findings = _write(config, out)
        if as_json:
            rows = [asdict(finding) for finding in findings]
            typer.echo(json.dumps({"path": str(out), "findings": rows}, indent=1))
            return
        for finding in findings:
            typer.echo(str(finding), err=True)
        typer.echo(str(out))


def _verified(profile: EngineProfile, file: Path, engine: Path) -> None:
    from lora_slots.refusals import Refused
    from trtllm_lora.verify import tell, verify_engine

    differences = verify_engine(engine, profile)
    if differences:
        raise Refused("\n".join(tell(differences, engine, file)))


def _fleet(profile: EngineProfile, file: Path, words: str | None) -> tuple[str, Fleet, int]:
    """The adapters to plan for, in words and as they are, and the GPU's memory that the plan starts from."""
    from lora_slots.refusals import Gathered, Refused
    from trtllm_lora.fleet import parse_fleet, usual_fleet
    from trtllm_lora.yaml_lines import read_yaml

    def memory() -> int:
        if profile.serving.gpu_memory is None:
            document = read_yaml(file)
            what = "serving.gpu_memory is missing, which the plan of the caches starts from"
            raise Refused(f"{file}:{document.line(('serving',))}: {what}; write gpu_memory: 80GiB, or what the GPU has")
        return profile.serving.gpu_memory

    gathered, shape = Gathered(), profile.shape()
    gpu = gathered.of(memory)
    spoken = words or usual_fleet(shape, profile.serving.slots)
    fleet = gathered.of(lambda: parse_fleet(spoken, shape))
    gathered.tell()
    assert gpu is not None and fleet is not None  # noqa: S101 - told otherwise
    return spoken, fleet, gpu


def _config(
    profile: EngineProfile,
    engine: Path,
    tokenizer: Path,
    registry: str,
    grpc: str,
    form: Literal["python", "tensorrtllm"],
    adapters: tuple[str, Fleet, int],
    own: Mapping[str, Mapping[str, str]],
) -> RepositoryConfig:
    from lora_slots.plan_report import router_parameters
    from lora_slots.repository import RepositoryConfig
    from trtllm_lora.plan import Wish, make_plan

    words, fleet, gpu = adapters
    wish = Wish(profile, fleet, gpu, profile.serving.slots)
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


def _backend(profile: EngineProfile | None, asked: str | None) -> Literal["python", "tensorrtllm"]:
    from lora_slots.refusals import Refused

    if asked not in (None, "python", "tensorrtllm"):
        raise Refused(f"--backend {asked}: write python or tensorrtllm")
    if profile is None:
        return "tensorrtllm"  # it is told, and nothing is made
    if asked == "python" and profile.runtime != "reference":
        raise Refused("--backend python is the reference engine; a compiled engine is served by tensorrtllm")
    if asked == "python" or (asked is None and profile.runtime == "reference"):
        return "python"
    return "tensorrtllm"


def _place(out: Path) -> None:
    from lora_slots.refusals import Refused
    from lora_slots.repository import MODELS

    strange = sorted(path.name for path in out.iterdir() if path.name not in MODELS) if out.is_dir() else []
    if strange or (out.exists() and not out.is_dir()):
        raise Refused(
            f"{out}: has {', '.join(strange[:5]) or 'a file of this name'}, which no repository has; left alone"
        )


def _write(config: RepositoryConfig, out: Path) -> list[Finding]:
    """Render beside `out`, look, then swap: a server that watches it never sees half a repository, nor a wrong one."""
    from lora_slots.refusals import Refused
    from lora_slots.repo_check import check_repository
    from lora_slots.repository import render as write_repository

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = write_repository(config, Path(scratch) / "new")
        findings = [
            replace(finding, file=finding.file.replace(str(made), str(out), 1)) for finding in check_repository(made)
        ]
        errors = [str(finding) for finding in findings if not finding.warning]
        if errors:
            raise Refused("\n".join(errors))
        if out.exists():
            out.rename(Path(scratch) / "old")
        made.chmod(0o755)
        made.rename(out)
    return findings
