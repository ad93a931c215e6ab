"""What lies in a folder of adapters, or below a prefix in S3: names, and a stamp that changes if the bytes may have."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_slots.errors import UsageError

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CONFIG, MANIFEST = "adapter_config.json", "bundle.json"


@dataclass(frozen=True, slots=True)
class Listing:
    """One folder of the source."""

    name: str
    place: str
    stamp: list[list[Any]]
    """For each file its name, size, and time and number or ETag: plain JSON."""
    problem: str | None = None
    """Why it is no adapter that can be served, as far as the files' names and ends tell."""


def list_source(place: str, endpoint_url: str | None = None) -> dict[str, Listing]:
    """Name -> folder of a directory or of s3://bucket/prefix; hidden ones are left alone. Raises UsageError."""
    return _in_bucket(place, endpoint_url) if place.startswith("s3://") else _in_directory(Path(place))


def _in_directory(root: Path) -> dict[str, Listing]:
    found = {}
    try:
        for folder in root.iterdir():
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            files = sorted(path for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_file())
            names = [str(file.relative_to(folder)) for file in files]
            stats = [file.stat() for file in files]
            stamp = [[n, s.st_size, s.st_mtime_ns, s.st_ino] for n, s in zip(names, stats, strict=True)]
            problem = problem_of(names) or next(filter(None, map(_cut_off, files)), None)
            found[folder.name] = Listing(folder.name, str(folder), stamp, problem)
    except OSError as error:
        raise UsageError(f"{error.filename or root}: {error.strerror}") from None
    return found


def _in_bucket(url: str, endpoint_url: str | None) -> dict[str, Listing]:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    below = f"{prefix.strip('/')}/".lstrip("/")
    style = {"addressing_style": "path"} if endpoint_url else None
    config = Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 3}, s3=style)
    folders: dict[str, list[list[Any]]] = {}
    try:
        client = boto3.client("s3", endpoint_url=endpoint_url, config=config)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=below):
            for entry in page.get("Contents", ()):
                name, _, file = entry["Key"][len(below) :].partition("/")
                if file and not name.startswith("."):
                    folders.setdefault(name, []).append([file, entry["Size"], entry["ETag"]])
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        raise UsageError(f"{url}: the store answered {code or 'with an error'}") from None
    except (BotoCoreError, ValueError) as error:
        raise UsageError(f"{url}: {type(error).__name__}") from None  # its own text may have a credential
    return {
        name: Listing(name, f"s3://{bucket}/{below}{name}", sorted(stamp), problem_of([file for file, *_ in stamp]))
        for name, stamp in folders.items()
    }


def problem_of(names: Sequence[str]) -> str | None:
    """Why files of these names are no adapter; None if they may be one."""
    if any(name.rpartition("/")[2] == MANIFEST for name in names):
        return None
    if CONFIG in names and any(name in names for name in WEIGHTS):
        return None
    if any(name.endswith(".nemo") for name in names):
        return (
            "a NeMo file: export it to the Hugging Face PEFT form (adapter_config.json and adapter_model.safetensors)"
        )
    if any(name.endswith("lora_weights.npy") for name in names):
        return (
            f"weights for an engine without {MANIFEST}: put the PEFT adapter here, or what `lora-slots convert` makes"
        )
    missing = f"{CONFIG} with {' or '.join(WEIGHTS)}" if CONFIG not in names else " or ".join(WEIGHTS)
    return f"no {missing} in it (yet)"


def _cut_off(file: Path) -> str | None:
    """Why a file of weights is not whole: somebody may be copying it just now."""
    if file.name not in WEIGHTS:
        return None
    if file.suffix == ".bin":
        return None if zipfile.is_zipfile(file) or not _is_zip_begun(file) else f"{file.name} is not whole (yet)"
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size
        try:
            header: Mapping[str, Any] = json.loads(opened.read(length)) if 0 < length < size else {}
            ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
        except (ValueError, KeyError, IndexError, TypeError):
            ends = []
    if not ends or size < 8 + length + max(ends):
        return f"{file.name} is not whole (yet)"
    return None


def _is_zip_begun(file: Path) -> bool:
    """torch's files are zip archives, whose directory comes last; older ones are none."""
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"
