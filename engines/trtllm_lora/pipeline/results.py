"""Results of steps in the cache: `<step>-<key>/`, and beside it `<step>-<key>.files.json`, which says what is in it.

The list is written first and the folder renamed last, so a folder with its list is whole. Files are read-only: engines
given out are hard links to them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def is_whole(folder: Path) -> bool:
    """Whether a result stands: its folder has exactly the files of its list, each of its size."""
    try:
        listed = json.loads(_list_of(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return folder.is_dir() and listed == _sizes(folder)


def put(made: Path, folder: Path, say: Callable[[str], object]) -> None:
    """Move a finished folder to its place in one step; what stood there and was not whole goes."""
    for place, _, names in os.walk(made):
        for name in names:
            if not (file := Path(place) / name).is_symlink():
                file.chmod(0o444)
    made.chmod(0o755)
    if folder.is_dir():
        if is_whole(folder):  # another build of the same inputs was first
            return
        say(f"{folder}: was not whole any more, and is replaced")
        broken = made.with_name("broken")
        folder.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    text = json.dumps(_sizes(made), indent=0, sort_keys=True)
    draft = made.with_name("files.json")
    draft.write_text(text, encoding="utf-8")
    draft.rename(_list_of(folder))
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else it came in this moment
            raise


def _list_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.files.json")


def _sizes(folder: Path) -> dict[str, int]:
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place) / name
            found[file.relative_to(folder).as_posix()] = file.lstat().st_size
    return found
