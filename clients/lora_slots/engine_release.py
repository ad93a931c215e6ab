"""`lora-slots engine publish|fetch|changed`: built engines in a store, and which profiles need a build at all."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_slots.refusals import Refused

if TYPE_CHECKING:
    from trtllm_lora.profile import EngineProfile

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(engine: typer.Typer) -> None:
    """Add the commands to the group."""
    for command in (publish, fetch, changed):
        engine.command()(command)


def publish(
    folder: Annotated[Path, typer.Argument(help="Engine directory, built by `engine build`.")],
    to: Annotated[str, typer.Option("--to", help="s3://bucket/prefix.")],
    as_json: Json = False,
) -> None:
    """Put a built engine and its manifest where servers fetch it: <prefix>/<profile>/<key>. Never changed in place.

    Every file is checked against the manifest first; the manifest goes last. Prints the URL.

    Example: lora-slots engine publish /engines/llama-3.1-8b --to s3://models/engines
    """
    from lora_slots.publication import Publisher
    from lora_slots.refusals import refusing
    from trtllm_lora.pipeline.manifest import MANIFEST_FILE, check_manifest, read_manifest

    with refusing():
        publisher, manifest = Publisher(to), read_manifest(folder)
        problems = check_manifest(folder)
        if manifest["profile"].get("runtime") == "reference":
            problems.append("a reference engine links to the base on this machine; build it where it is served")
        if problems:
            raise Refused("\n".join(f"{folder}: {problem}" for problem in problems))
        name = f"{manifest['profile']['name']}/{manifest['key']}"
        files = {file: str(entry["sha256"]) for file, entry in manifest["files"].items()}
        done = publisher.publish(name, folder, MANIFEST_FILE, files)
    typer.echo(json.dumps({"url": done.url, "sent": done.sent}) if as_json else done.url)


def fetch(
    url: Annotated[str, typer.Argument(help="What `engine publish` printed.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Engine directory to make.")],
    profile: Annotated[Path | None, typer.Option(help="Refuse an engine that is not what this profile says.")] = None,
    as_json: Json = False,
) -> None:
    """Bring a published engine here; the directory appears when every byte is checked.

    Example: lora-slots engine fetch s3://models/engines/llama-3.1-8b/0f3a… -o /engines/llama
    """
    from lora_slots.publication import fetch as bring
    from lora_slots.refusals import refusing
    from trtllm_lora.pipeline.manifest import MANIFEST_FILE, read_manifest
    from trtllm_lora.profile import load_profile
    from trtllm_lora.verify import verify_engine

    def files(manifest: Path) -> dict[str, str]:
        return {file: str(entry["sha256"]) for file, entry in read_manifest(manifest.parent)["files"].items()}

    def judge(made: Path) -> None:
        differences = verify_engine(made, load_profile(profile)) if profile else []
        if differences:
            lines = "\n".join(f"{url}: {difference}" for difference in differences)
            raise Refused(f"{lines}\nthe engine is not what {profile} says: fetch one that was built from it")

    with refusing():
        made = bring(url, out, MANIFEST_FILE, files, judge)
    typer.echo(json.dumps({"url": url, "path": str(made)}) if as_json else str(made))


def changed(
    profiles: Annotated[list[Path], typer.Argument(help="Engine profiles (YAML).")],
    since: Annotated[str, typer.Option(help="Commit to compare with; an empty one means all profiles.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of profile, name and container: a job matrix.")
    ] = False,
) -> None:
    """Which compiled profiles build another engine than they did at a commit. `serving:` and comments change none.

    A change of the pipeline's own code counts where it raised PIPELINE in pipeline/steps.py; of others it is told.

    Example: lora-slots engine changed engines/profiles/*.yaml --since origin/main~1 --json
    """
    from lora_slots.refusals import refusing
    from trtllm_lora.profile import load_profile

    with refusing():
        loaded = [(path, load_profile(path)) for path in profiles]
        raised = any(_pipeline_changed(path.resolve().parent, since) for path in profiles[:1])
        compiled = [(path, profile) for path, profile in loaded if profile.runtime == "tensorrt_llm"]
        found = [(path, profile) for path, profile in compiled if raised or _differs(path, profile, since)]
    if as_json:
        rows = [{"profile": str(path), "name": p.name, "container": p.engine.container} for path, p in found]
        typer.echo(json.dumps(rows))
    else:
        typer.echo("\n".join(str(path) for path, _ in found) if found else "no engine has to be built")


def _differs(path: Path, profile: EngineProfile, since: str) -> bool:
    from trtllm_lora.pipeline import plan_tensorrt_llm

    if not since.strip("0"):  # a new branch's push has only zeros
        return True
    before = _key(_text_at(path, since))
    return before != plan_tensorrt_llm(profile, Path("cache"), None).engine.key


def _pipeline_changed(where: Path, since: str) -> bool:
    """Whether PIPELINE was raised since; tells where the pipeline's code changed and it was not."""
    from trtllm_lora.pipeline import steps

    if not since.strip("0"):
        return False
    _commit(where, since)
    names = [f":(top)engines/trtllm_lora/pipeline/{name}.py" for name in ("steps", "checkpoint")]
    if not _git(where, "diff", "--name-only", since, "--", *names).strip():
        return False
    before = re.search(
        rb"^PIPELINE = (\d+)", _shown(where, since, "engines/trtllm_lora/pipeline/steps.py"), re.MULTILINE
    )
    if before and int(before[1]) == steps.PIPELINE:
        text = f"warning: the pipeline's code changed since {since}, and PIPELINE in pipeline/steps.py did not"
        typer.echo(f"{text}: raise it if engines become others by it, else the old ones are kept", err=True)
    return before is not None and int(before[1]) != steps.PIPELINE


def _key(text: bytes | None) -> str | None:
    """The key that a profile's engine had; None if there was no good profile."""
    from trtllm_lora.pipeline import plan_tensorrt_llm
    from trtllm_lora.profile import check_profile

    if text is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.yaml"
        file.write_bytes(text)
        profile, _ = check_profile(file)
    return plan_tensorrt_llm(profile, Path("cache"), None).engine.key if profile else None


def _text_at(path: Path, since: str) -> bytes | None:
    """A file as it was at a commit; None if it was not there. Raises Refused: no such commit, no git."""
    where = path.resolve().parent
    _commit(where, since)
    return _shown(where, since, f"./{path.name}") or None


def _commit(where: Path, since: str) -> None:
    try:
        _git(where, "rev-parse", "--verify", "--quiet", f"{since}^{{commit}}")
    except subprocess.CalledProcessError:
        raise Refused(f"--since {since}: no such commit in {where} (fetch the whole history)") from None
    except OSError as error:
        raise Refused(f"--since needs git: {error.strerror}") from None


def _shown(where: Path, since: str, name: str) -> bytes:
    """A file as it was at a commit; empty if it was not there."""
    try:
        return _git(where, "show", f"{since}:{name}")
    except subprocess.CalledProcessError:
        return b""


def _git(where: Path, *words: str) -> bytes:
    return subprocess.run(("git", *words), cwd=where, check=True, capture_output=True).stdout  # noqa: S607 - on PATH
