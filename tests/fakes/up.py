"""`lora-slots up` as a person runs it, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fakes.processes import parent_of, tmpdir_of

COMMAND = str(Path(sys.executable).with_name("lora-slots"))
_STARTED: list[Running] = []


def lora_slots(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [COMMAND, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=240,
    )


class Running:
    """`lora-slots up` in the background, its output line by line; what goes to stderr is in it, or in a file.

    Its first answers are short: most tests wait for what comes after them.
    """

    def __init__(
        self,
        *arguments: str,
        command: str = COMMAND,
        cwd: Path | None = None,
        errors: IO[str] | None = None,
        **environment: str,
    ) -> None:
        short = [] if {"--check", "--json", "--max-tokens"} & set(arguments) else ["--max-tokens", "4"]
        # a group of its own: a signal to it must not reach pytest
        self.process = subprocess.Popen(
            [command, "up", *arguments, *short],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=errors or subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
        self.lines: list[str] = []
        _STARTED.append(self)

    def until(self, pattern: str) -> str:
        """Read on until a line matches; the line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError("".join(self.lines))

    def interrupt(self) -> None:
        """Ctrl-C, which a terminal sends to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code and everything it said."""
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, "".join(self.lines) + rest

    def own(self, program: str) -> int:
        """The one process of this `up` that has the program in its first two words."""
        (pid,) = (
            pid for pid, words in processes() if any(word.endswith(program) for word in words[:5]) and self._has(pid)
        )
        return pid

    def _has(self, pid: int) -> bool:
        while pid > 1:
            pid = parent_of(pid)
            if pid == self.process.pid:
                return True
        return False


@contextmanager
def nothing_left(temporary: Path) -> Iterator[None]:
    """After the block: no orphaned process of a stack, no shared memory of a server that is gone, and nothing in the
    temporary folder (which what runs in the block must have been given as TMPDIR).

    Tests that run beside it may kill servers too; what those leave goes away within a minute.
    """
    before = leftovers(temporary)
    try:
        yield
    finally:
        for running in _STARTED:
            if running.process.poll() is None:  # of a test that failed
                running.process.kill()
            if running.process.stdout and not running.process.stdout.closed:
                running.process.communicate()
        _STARTED.clear()
    clock = threading.Event()
    for _ in range(600):
        left = leftovers(temporary) - before | {str(path) for path in temporary.iterdir()}
        if not left:
            return
        clock.wait(0.1)
    raise AssertionError(left)


def leftovers(temporary: Path) -> set[str]:
    """What stacks left behind: processes of this TMPDIR, shared memory of any; what still runs is left alone."""
    commands = dict(processes())
    servers = {pid for pid, words in commands.items() if words[0].endswith("/tritonserver")}
    ids = {word.removeprefix("--id=") for pid in servers for word in commands[pid] if word.startswith("--id=")}
    found = set()
    for pid, words in commands.items():
        parent = commands.get(parent_of(pid), [""])
        if temporary != tmpdir_of(pid):
            continue
        if pid in servers and not any(word.endswith("keeper.py") for word in parent):
            found.add(f"server {pid}")
        if words[0].endswith("triton_python_backend_stub") and parent_of(pid) not in servers:
            found.add(f"stub {pid}")
    for path in [*Path("/dev/shm").glob("lora-slots-*"), *Path("/dev/shm").glob("lora-host-*")]:  # noqa: S108
        owner = path.name.split("-")[2]
        if f"lora-slots-{owner}" not in ids and not (owner.isdigit() and int(owner) in commands):
            found.add(f"shm {path.name}")
    return found


def processes() -> Iterator[tuple[int, list[str]]]:
    """(process id, command line) of everything that runs."""
    for folder in Path("/proc").iterdir():
        try:
            words = (
                (folder / "cmdline").read_bytes().decode(errors="replace").split("\0") if folder.name.isdigit() else []
            )
        except OSError:
            continue
        if words and words[0]:
            yield int(folder.name), words
