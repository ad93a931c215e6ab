"""`lora-slots repo …`: render the model repository of a profile, and check anybody's."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from lora_slots.repository import RepositoryConfig
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
    from lora_slots.errors import EXIT_REFUSED
    from lora_slots.refusals import refusing
    from lora_slots.repo_check import check_repository

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
    fleet: Annotated[str | None, typer.Option(help="Adapters to plan for: COUNTxRANK,…")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE: a parameter of tensorrt_llm; may be repeated.")
    ] = None,
    check_engine: Annotated[bool, typer.Option(help="Refuse an engine that is not what the profile says.")] = True,
) -> None:
    """Write the whole model repository: preprocessing, lora_router, tensorrt_llm, postprocessing, ensemble.

    Cache sizes come from the capacity plan. An existing repository is replaced in one step; else nothing is.

    Example: lora-slots repo render engines/profiles/llama-3.1-8b.yaml --engine /engines/llama -o /models
    """
    from lora_slots.refusals import Refused, refusing
    from lora_slots.repo_check import check_repository
    from trtllm_lora.profile import load_profile
    from trtllm_lora.verify import verify_engine

    with refusing():
        loaded = load_profile(profile)
        differences = verify_engine(engine, loaded) if check_engine else []
        if differences:
            lines = "\n".join(f"{engine}: {difference}" for difference in differences)
            raise Refused(f"{lines}\nthe engine is not what {profile} says: build it anew (`lora-slots engine build`)")
        config = _config(loaded, engine, tokenizer, registry, grpc, backend, fleet, _parameters(set_ or []))
        _write(config, out)
        for finding in check_repository(out):
            typer.echo(str(finding), err=True)
        typer.echo(str(out))


def _config(
    profile: EngineProfile,
    engine: Path,
    tokenizer: Path | None,
    registry: str,
    grpc: str,
    backend: str | None,
    fleet: str | None,
    own: Mapping[str, str],
) -> RepositoryConfig:
    from lora_slots.plan_report import router_parameters
    from lora_slots.refusals import Refused
    from lora_slots.repository import RepositoryConfig
    from trtllm_lora.fleet import parse_fleet
    from trtllm_lora.plan import Wish, make_plan

    gpu = profile.serving.gpu_memory
    if gpu is None:
        raise Refused("the profile has no serving.gpu_memory, which the plan of the caches starts from")
    slots, shape = profile.serving.slots, profile.shape()
    wish = Wish(profile, parse_fleet(fleet or f"{slots}x{profile.lora.max_rank}", shape), gpu, slots)
    plan = make_plan(wish)
    parameters, router = plan.parameters, router_parameters(wish, plan)
    if profile.runtime == "reference":
        # its caches are in the machine's memory: shares of a GPU mean nothing there
        parameters = {key: value for key, value in parameters.items() if "fraction" not in key}
        del router["lora_cache_device_pages"]
    return RepositoryConfig(
        engine_dir=engine.absolute(),
        tokenizer_dir=(tokenizer or _own_tokenizer(engine)).absolute(),
        registry=registry if "://" in registry else Path(registry).absolute(),
        engine_url=grpc,
        max_batch_size=profile.engine.max_batch_size,
        router=router,
        engine={"exclude_input_in_output": "true", **parameters, **own},
        text={key: str(value).lower() for key, value in profile.text.model_dump().items()},
        backend=_backend(profile, backend),
        dora=profile.lora.dora,
    )


def _parameters(words: list[str]) -> dict[str, str]:
    from lora_slots.refusals import Refused

    wrong = [word for word in words if not word.partition("=")[0].strip() or "=" not in word]
    if wrong:
        raise Refused("\n".join(f"--set {word}: write KEY=VALUE" for word in wrong))
    return {key.strip(): value for key, _, value in (word.partition("=") for word in words)}


def _own_tokenizer(engine: Path) -> Path:
    """Where an engine has its tokenizer: a compiled one in a folder, the reference engine behind a link."""
    return engine / "base" if (engine / "base").exists() else engine / "tokenizer"


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
