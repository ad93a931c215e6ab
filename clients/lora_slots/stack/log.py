"""Reading Triton's log for a person: without what it always says on a machine without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_LINES = 40
_READ_BYTES = 256 * 1024
_LINE_CHARS = 600
_NOISE = (
    "Unable to allocate pinned system memory",
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Collecting CPU metrics",
    "unable to create stream for",
    "Waiting for in-flight requests to complete",
    "All models are stopped, unloading models",
    'server.cc:345] "Timeout',
    'server.cc:321] "Timeout',
)
_USAGE = "Usage: tritonserver"
_UNWANTED_TABLES = ("| Option", "| Backend", "| Repository Agent")
_EMPTY_HEADINGS = re.compile(r"I\d{4} \S+ \d+ (server|tritonserver)\.cc:\d+\] $")
_FAILED = re.compile(r"failed to load '([^']+)'|Poll failed for model directory '([^']+)'")
_PORT = re.compile(r"Socket '[^']*:(\d+)' already in use|unavailable: .*:(\d+)\b.*already in use")


def read(path: Path) -> str:
    """The end of the log; "" where there is none (yet)."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _READ_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""


def tail(text: str, lines: int = TAIL_LINES) -> str:
    """The last lines that tell something, Python tracebacks written out."""
    kept: list[str] = []
    table = wanted = False
    for line in text.partition(_USAGE)[0].splitlines():  # all options follow a wrong one
        if line.startswith("+--") and not table:
            table, rule = True, line
            continue
        if table:
            if line.startswith("| ") and not wanted and rule:
                wanted = not line.startswith(_UNWANTED_TABLES)
                kept += [rule, line] if wanted else []
                rule = ""
                continue
            if line.startswith(("|", "+")):
                kept += [line] if wanted else []
                continue
            table = wanted = False
        if line and not any(noise in line for noise in _NOISE) and not _EMPTY_HEADINGS.match(line):
            kept += line.replace("\\n", "\n").rstrip("\n").splitlines()
    return "\n".join(line[:_LINE_CHARS] for line in kept[-lines:])


def failed_models(text: str) -> list[str]:
    """The models that the log says did not load, each once, in the log's order."""
    return list(dict.fromkeys(first or second for first, second in _FAILED.findall(text)))


def port_in_use(text: str) -> int | None:
    """The port that Triton says somebody else has."""
    match = _PORT.search(text)
    return int(match[1] or match[2]) if match else None
