"""`lora-slots engine …`: from a profile to a built and verified engine directory."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trtllm_lora.pipeline import BuildPlan, RemoteStore
    from trtllm_lora.profile import EngineProfile

engine = typer.Typer(no_args_is_help=True, help="Engines as code: check a profile, build, verify, compare.")
Profile = Annotated[Path, typer.Argument(help="Engine profile (YAML).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    from lora_slots import engine_release

    engine_release.register(engine)
    app.add_typer(engine, name="engine")


@engine.command()
def check(
    profiles: Annotated[list[Path], typer.Argument(help="Engine profiles (YAML).")], as_json: Json = False
) -> None:
    """Check profiles: every problem with file, line and what to write instead. Exit code 2 if there is one.

    Example: lora-slots engine check engines/profiles/*.yaml
    """
    from lora_slots.errors import EXIT_REFUSED
    from trtllm_lora.profile import check_profile

    problems = [problem for path in profiles for problem in check_profile(path)[1]]
    if as_json:
        typer.echo(json.dumps([asdict(problem) for problem in problems], indent=1, default=str))
    else:
        for problem in problems:
            typer.echo(str(problem))
    if any(not problem.warning for problem in problems):
        raise typer.Exit(EXIT_REFUSED)
    if not as_json:
        typer.echo(f"{len(profiles)} profiles are good")


@engine.command()
def schema() -> None:
    """Print the JSON schema of a profile (engines/profiles/profile.schema.json).

    Example: lora-slots engine schema > profile.schema.json
    """
    from trtllm_lora.profile import schema as profile_schema

    typer.echo(json.dumps(profile_schema(), indent=2))


@engine.command()
def build(
    profile: Profile,
    base: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the base; default: it is fetched.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Copy the engine here, in one step.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Results of steps; default: builds/ in the user's cache.")] = None,
    remote: Annotated[str | None, typer.Option(help="s3://bucket/prefix that shares results.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact commands and stop; runs anywhere.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build an engine: checkpoint conversion, trtllm-build, verification, manifest.

    A step whose inputs are unchanged is not run. Compiled engines are built inside the profile's NGC image.

    Examples:

        lora-slots engine build engines/profiles/smollm2-135m.yaml -o /engines/smollm2

        lora-slots engine build engines/profiles/llama-3.1-8b.yaml --dry-run
    """
    from lora_slots.base_model.store import cache_folder
    from lora_slots.refusals import refusing
    from lora_slots.stack.signals import exit_on_signals
    from trtllm_lora.profile import load_profile

    results = cache or cache_folder() / "builds"
    with refusing():
        plan = _plan(load_profile(profile), profile, results, base, dry_run=dry_run)
        store = _remote(plan, remote)
    if dry_run:
        _show(plan, as_json)
        return
    with exit_on_signals():
        _build(plan, results, store, out, as_json)


@engine.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Engine directory.")],
    profile: Annotated[
        Path | None, typer.Argument(help="Engine profile (YAML); default: the one in the directory's manifest.")
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Also hash every file against the manifest.")] = False,
    as_json: Json = False,
) -> None:
    """Compare a built engine with its profile, by its config.json alone. Exit code 2 if they differ.

    Examples:

        lora-slots engine verify /engines/llama engines/profiles/llama-3.1-8b.yaml

        lora-slots engine verify /engines/llama
    """
    from lora_slots.refusals import Gathered, Refused, refusing
    from trtllm_lora import EngineShape
    from trtllm_lora.pipeline.manifest import MANIFEST_FILE, check_manifest, manifest_profile
    from trtllm_lora.profile import load_profile
    from trtllm_lora.verify import tell, verify_engine

    with refusing():
        gathered = Gathered()
        gathered.of(lambda: EngineShape.from_engine_config(folder))
        loaded = gathered.of(lambda: load_profile(profile) if profile else manifest_profile(folder))
        gathered.tell()
        if loaded is None:
            return  # told above
        source, under = (profile, "") if profile else (folder / MANIFEST_FILE, "profile")
        problems = tell(verify_engine(folder, loaded), folder, source, under=under)
        problems += [f"{folder}: {problem}; build it anew" for problem in (check_manifest(folder) if files else [])]
        if as_json:
            typer.echo(json.dumps({"engine": str(folder), "profile": str(source), "problems": problems}, indent=1))
        if problems:
            raise Refused("\n".join(problems))
        if not as_json:
            typer.echo(f"{folder} is what {source} says")


@engine.command()
def diff(
    first: Annotated[Path, typer.Argument(help="Engine directory.")],
    second: Annotated[Path, typer.Argument(help="Engine directory.")],
    as_json: Json = False,
) -> None:
    """Compare two engines key by key, and say which adapters of the first do not serve on the second, and why.

    Example: lora-slots engine diff /engines/old /engines/new
    """
    from lora_slots.refusals import Gathered, refusing
    from trtllm_lora import EngineShape
    from trtllm_lora.carry_over import adapters_carry_over
    from trtllm_lora.verify import diff_engines

    with refusing():
        gathered = Gathered()
        for folder in (first, second):
            gathered.of(lambda folder=folder: EngineShape.from_engine_config(folder))  # type: ignore[misc]
        gathered.tell()
        differences, reasons = diff_engines(first, second), adapters_carry_over(first, second)
        if as_json:
            rows = [{"key": each.key, "first": each.wanted, "second": each.found} for each in differences]
            typer.echo(json.dumps({"differences": rows, "adapters_do_not_carry_over": reasons}, indent=1))
            return
        for each in differences:
            typer.echo(f"{each.key}: {json.dumps(each.wanted)} -> {json.dumps(each.found)}")
        for reason in reasons:
            typer.echo(f"adapters that do not carry over, {reason}")
        if not reasons:
            typer.echo("adapters converted for the first serve on the second")


def _plan(profile: EngineProfile, file: Path, cache: Path, base: Path | None, *, dry_run: bool) -> BuildPlan:
    from trtllm_lora.pipeline import plan_tensorrt_llm

    if profile.runtime == "tensorrt_llm":
        # what is printed is for the image, where this interpreter is not
        return plan_tensorrt_llm(profile, cache, base, python="python3" if dry_run else sys.executable)
    from lora_slots.base_model import BASE_MODEL, base_model_folder, ensure_base_model
    from lora_slots.base_model.store import looks_whole
    from lora_slots.reference_build import plan_reference, plan_unmade
    from lora_slots.refusals import Refused

    if base is None and profile.model.id != BASE_MODEL:
        raise Refused(f"{file}: the embedded stack brings {BASE_MODEL}; for {profile.model.id} give --base DIR")
    made = base_model_folder()
    if base is None and dry_run and not looks_whole(made):
        typer.echo(f"the base model is not there yet: the build makes it first, in {made}", err=True)
        return plan_unmade(profile, file, cache, made)
    return plan_reference(profile, file, cache, base or ensure_base_model())


def _show(plan: BuildPlan, as_json: bool) -> None:
    import shlex

    from trtllm_lora.pipeline import is_whole

    if as_json:
        rows = [
            {"name": step.name, "key": step.key, "command": step.command(step.folder), "cached": is_whole(step.folder)}
            for step in plan.steps
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    if plan.profile.engine.container and plan.profile.runtime == "tensorrt_llm":
        typer.echo(f"# inside {plan.profile.engine.container} (NGC), with a GPU")
    for step in plan.steps:
        typer.echo(f"# {step.name}{' (cached)' if is_whole(step.folder) else ''}")
        typer.echo(shlex.join(step.command(step.folder)))
    typer.echo("# then: verify config.json against the profile, copy the tokenizer, write the manifest")


def _remote(plan: BuildPlan, url: str | None) -> RemoteStore | None:
    from lora_slots.artifact_store import S3Artifacts
    from lora_slots.refusals import Refused

    if url is None:
        return None
    if plan.profile.runtime == "reference":
        raise Refused("--remote: a reference engine links to the base on this machine, so it is not shared")
    return S3Artifacts(url)


def _build(plan: BuildPlan, cache: Path, remote: RemoteStore | None, out: Path | None, as_json: bool) -> None:
    from trtllm_lora.pipeline import Runner

    done = Runner(cache, time.monotonic, lambda text: typer.echo(text, err=True), remote=remote).run(plan)
    folder = _copy(plan.engine.folder, out) if out else plan.engine.folder
    if as_json:
        steps = [
            {"name": each.step.name, "key": each.step.key, "how": each.how, "seconds": each.seconds} for each in done
        ]
        typer.echo(json.dumps({"engine": str(folder), "steps": steps}, indent=1))
    else:
        typer.echo(str(folder))


def _copy(folder: Path, out: Path) -> Path:
    """The engine under a name of its own: hard links where that goes, in place in one step."""
    from lora_slots.refusals import Refused

    if out.exists() and not (out / "config.json").is_file():
        raise Refused(f"{out}: is there and is no engine; left alone")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "new"
        shutil.copytree(folder, made, symlinks=True, copy_function=_link)
        if out.exists():
            out.rename(Path(scratch) / "old")
        made.rename(out)
    return out


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return str(shutil.copy2(source, target))
    return target
