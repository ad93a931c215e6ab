"""`lora-slots up` as a person runs it: the check passes, trouble is one clear message, and nothing is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.processes import parent_of

pytestmark = pytest.mark.triton
COMMAND = str(Path(sys.executable).with_name("lora-slots"))
ROOT = Path(__file__).parents[2]


def up(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `lora-slots up` to its end."""
    return subprocess.run(
        [COMMAND, "up", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=240,
    )


class Running:
    """`lora-slots up` in the background, its output line by line."""

    def __init__(self, *arguments: str) -> None:
        # a group of its own: a signal to it must not reach pytest
        self.process = subprocess.Popen(
            [COMMAND, "up", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []

    def until(self, pattern: str) -> str:
        """Read on until a line matches; the line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError("".join(self.lines))

    def end(self) -> tuple[int, str]:
        """Exit code and everything it said."""
        rest, _ = self.process.communicate(timeout=60)
        return self.process.returncode, "".join(self.lines) + rest


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test here: no orphaned process of a stack, no shared memory of a server that is gone."""
    before = leftovers()
    yield
    clock = threading.Event()
    for _ in range(100):
        left = leftovers() - before
        if not left:
            return
        clock.wait(0.1)
    raise AssertionError(left)


def leftovers() -> set[str]:
    """What stacks left behind on this machine; those that still run, ours or anybody's, are left alone."""
    commands = dict(processes())
    servers = {pid for pid, words in commands.items() if words[0].endswith("/tritonserver")}
    ids = {word.removeprefix("--id=") for pid in servers for word in commands[pid] if word.startswith("--id=")}
    found = set()
    for pid, words in commands.items():
        parent = commands.get(parent_of(pid), [""])
        if pid in servers and not any(word.endswith("keeper.py") for word in parent):
            found.add(f"server {pid}")
        if words[0].endswith("triton_python_backend_stub") and parent_of(pid) not in servers:
            found.add(f"stub {pid}")
    for path in Path("/dev/shm").glob("lora-slots-*"):  # noqa: S108
        owner = path.name.removeprefix("lora-slots-").split("-")[0]
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


def test_the_check_passes() -> None:
    """`up --check` answers in every style, says so, and ends with 0."""
    done = up("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout
    for name in ("base", "json", "pirate", "robot"):
        assert f"[{name} · " in done.stdout


def test_a_missing_adapter_folder_is_named() -> None:
    """Exit code 1, one line, before anything is started."""
    done = up("--check", "--adapter", "mine=/no/such/folder")
    assert (done.returncode, done.stderr) == (1, "lora-slots: no such adapter folder: mine: /no/such/folder\n")


def test_a_corrupt_adapter_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Exit code 2 and the converter's report, no traceback, nothing published."""
    bad = tmp_path / "bad"
    shutil.copytree(ROOT / "examples" / "adapters" / "json", bad)
    file = bad / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    done = up("--check", "--adapter", f"bad={bad}")
    assert done.returncode == 2, done.stderr
    assert "adapter_model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused_clearly() -> None:
    """The port that was asked for, and what to do; the usual ports fall back to free ones by themselves."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = up("--check", "--grpc-port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_told_with_numbers(tmp_path: Path) -> None:
    """A cache on a file system of 20 MB: needed and free bytes, and where."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(small)],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        done = up("--check", LORA_SLOTS_CACHE=str(small))
    finally:
        subprocess.run(["umount", str(small)], check=True)  # noqa: S607
    assert done.returncode == 1
    assert str(small) in done.stderr
    assert re.search(r"\d+.*(free|needed)", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_killed_triton_is_noticed_and_its_log_shown() -> None:
    """The server dies while serving: exit code 1 and the log's tail."""
    running = Running()
    running.until("serving until Ctrl-C")
    servers = [pid for pid, words in processes() if words[0].endswith("/tritonserver") and descends(pid, running)]
    assert len(servers) == 1
    os.kill(servers[0], signal.SIGKILL)
    code, said = running.end()
    assert code == 1
    assert "the embedded Triton ended by itself" in said
    assert "last lines of its log" in said
    assert "Traceback" not in said


def descends(pid: int, running: Running) -> bool:
    """Whether a process was started by this `up`."""
    while pid > 1:
        pid = parent_of(pid)
        if pid == running.process.pid:
            return True
    return False


@pytest.mark.parametrize(
    "moment", ["converting adapters", "starting Triton", "warm: json", "prompt:", "serving until Ctrl-C"]
)
def test_ctrl_c_at_any_moment_leaves_nothing(moment: str) -> None:
    """SIGINT to the whole group, as a terminal sends it: code 130, no traceback, nothing left (see the fixture)."""
    running = Running()
    running.until(moment)
    os.killpg(running.process.pid, signal.SIGINT)
    code, said = running.end()
    assert code == 130, said
    assert "Traceback" not in said


def test_sigterm_ends_it_in_order() -> None:
    """What `kill` sends: code 143."""
    running = Running()
    running.until("serving until Ctrl-C")
    running.process.send_signal(signal.SIGTERM)
    code, said = running.end()
    assert code == 143, said
    assert "Traceback" not in said
