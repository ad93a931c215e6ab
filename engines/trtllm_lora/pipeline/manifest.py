"""The manifest of a built engine: what it was built from, by which commands, and the hash of each file.

It lies in the engine directory as `engine.lora-slots.json`; TensorRT-LLM does not look at it. Files below are named
relative to the directory, with `/`; links to folders, such as the reference engine's to its base, are not followed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_lora.errors import ContractError
from trtllm_lora.files import sha256_of
from trtllm_lora.shape import EngineShape, read_json

if TYPE_CHECKING:
    from trtllm_lora.pipeline.steps import BuildPlan
    from trtllm_lora.profile import EngineProfile

MANIFEST_FILE = "engine.lora-slots.json"
FORMAT = 1


class ManifestError(ContractError):
    """An engine directory without a manifest, or one whose files are not those of its manifest."""


def write_manifest(engine: Path, plan: BuildPlan, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Write the manifest of a verified engine; returns it."""
    profile = plan.profile
    shape = EngineShape.from_engine_config(engine)
    manifest = {
        "format": FORMAT,
        "profile": profile.model_dump(mode="json", by_alias=True),
        "key": plan.engine.key,
        "tensorrt_llm": shape.version,
        "container": profile.engine.container,
        "steps": [
            {"name": step.name, "key": step.key, "command": list(step.argv), "facts": dict(step.facts)}
            | ({"seconds": round(seconds[step.name], 1)} if step.name in seconds else {})
            for step in plan.steps
        ],
        "files": {name: _entry(engine / name) for name in content_of(engine)},
    }
    (engine / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def check_manifest(engine: Path) -> list[str]:
    """Files that are not those of the manifest, by sha256; empty if all are.

    Raises:
        ManifestError: no manifest there.
    """
    files = read_manifest(engine)["files"]
    problems = []
    for name, entry in files.items():
        path = engine / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif _entry(path) != entry:
            problems.append(f"{name} differs from the manifest's sha256")
    return problems + [f"{name} is not in the manifest" for name in content_of(engine) if name not in files]


def read_manifest(engine: Path) -> dict[str, Any]:
    """The manifest of an engine directory, with its `files` (name -> bytes, sha256), `key` and `profile`.

    Raises:
        ManifestError: none there, or one that this program cannot read.
    """
    file = engine / MANIFEST_FILE
    if not file.is_file():
        raise ManifestError(f"{engine}: no {MANIFEST_FILE}: not built by `lora-slots engine build`")
    manifest: dict[str, Any] = read_json(file)
    if manifest.get("format") != FORMAT:
        raise ManifestError(f"{file}: format {manifest.get('format')!r}, this program reads {FORMAT}")
    files, key, profile = (manifest.get(name) for name in ("files", "key", "profile"))
    whole = isinstance(files, dict) and all(_is_entry(entry) for entry in files.values())
    if not whole or not isinstance(key, str) or not isinstance(profile, dict):
        raise ManifestError(f"{file}: is no manifest: files, key and profile are expected")
    return manifest


def manifest_profile(engine: Path) -> EngineProfile:
    """The profile that an engine directory was built from, as its manifest has it.

    Raises:
        ManifestError: no manifest there, or no profile in it that this program can read.
    """
    from pydantic import ValidationError

    from trtllm_lora.profile import EngineProfile

    file = engine / MANIFEST_FILE
    if not file.is_file():
        raise ManifestError(f"{engine}: no {MANIFEST_FILE} that names a profile: write the profile after the directory")
    try:
        return EngineProfile.model_validate(read_manifest(engine)["profile"])
    except ValidationError as error:
        count = error.error_count()
        raise ManifestError(
            f"{file}: its profile is none of this program ({count} problems): write the profile after the directory"
        ) from None


def content_of(engine: Path) -> list[str]:
    """Names of all files of an engine directory but the manifest, in order."""
    return sorted(name for name in _walk(engine) if name != MANIFEST_FILE)


def _walk(folder: Path) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        yield from ((Path(place) / name).relative_to(folder).as_posix() for name in names)


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("bytes"), int)


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
