"""Print the locked requirements of lora-slots that this Python lacks, with their hashes: `missing.py [TOOL...]`.

The NGC image brings most libraries in versions of its own, which TensorRT-LLM was built against: they stay. TOOLs are
further distributions, out of requirements/dev.txt. Run it again after installing: what came may need more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = "lora-slots"


def canonical(name: str) -> str:
    """A distribution's name in its one spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(*files: str) -> dict[str, str]:
    """Distribution -> its lines in the locked files."""
    found: dict[str, str] = {}
    for file in files:
        text = (ROOT / "requirements" / f"{file}.txt").read_text(encoding="utf-8")
        for block in re.findall(r"^[A-Za-z0-9].*(?:\n[ \t]+.*)*", text, re.MULTILINE):
            found.setdefault(canonical(re.split(r"[=\[ ;]", block, maxsplit=1)[0]), block)
    return found


def needs(distribution: str, extras: str) -> Iterator[tuple[str, str]]:
    """(distribution, its extras) that an installed one requires here with some extras of its own."""
    for line in metadata.requires(distribution) or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        if extra is None or extra[1] in extras.split(","):
            name, *more = re.split(r"[^A-Za-z0-9._,\[-]", requirement.strip(), maxsplit=1)[0].split("[")
            yield canonical(name), "".join(more)


def missing(wanted: list[str]) -> Iterator[str]:
    """Requirements, direct and further, that are not installed and stand in the locked files."""
    lock, queue = locked("runtime", "dev"), [(name, "") for name in wanted]
    seen, told = set(queue), set[str]()
    while queue:
        name, extras = queue.pop()
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in lock and name not in told:  # what is not locked is another platform's
                told.add(name)
                yield lock[name]
            continue
        for each in needs(name, extras):
            if each not in seen:
                seen.add(each)
                queue.append(each)


if __name__ == "__main__":
    print("\n".join(sorted(missing([PRODUCT, *map(canonical, sys.argv[1:])]))), end="")  # noqa: T201 - its output
