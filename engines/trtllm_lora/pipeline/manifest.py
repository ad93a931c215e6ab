"""The manifest of a built engine: what it was built from, by which commands, and the hash of each file.

It lies in the engine directory as `engine.lora-slots.json`; TensorRT-LLM does not look at it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_lora.errors import ContractError
from trtllm_lora.shape import EngineShape, read_json

if TYPE_CHECKING:
    from trtllm_lora.pipeline.steps import BuildPlan

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
        "files": {file.name: _entry(file) for file in sorted(engine.iterdir()) if _is_content(file)},
    }
    (engine / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def check_manifest(engine: Path) -> list[str]:
    """Files that are not those of the manifest, by sha256; empty if all are.

    Raises:
        ManifestError: no manifest there.
    """
    file = engine / MANIFEST_FILE
    if not file.is_file():
        raise ManifestError(f"{engine}: no {MANIFEST_FILE}: not built by `lora-slots engine build`")
    files = read_json(file).get("files", {})
    problems = []
    for name, entry in files.items():
        path = engine / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif _entry(path) != entry:
            problems.append(f"{name} differs from the manifest's sha256")
    there = {path.name for path in engine.iterdir() if _is_content(path)}
    return problems + [f"{name} is not in the manifest" for name in sorted(there - set(files))]


def _is_content(file: Path) -> bool:
    return file.is_file() and file.name != MANIFEST_FILE


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as source:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(source, "sha256").hexdigest()}
