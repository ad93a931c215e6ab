"""`lora-slots up` as a person runs it: the check passes, trouble is one clear message, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.disks import tmpfs
from fakes.gateways import ask
from fakes.up import Running, lora_slots, nothing_left

from lora_slots import examples

pytestmark = pytest.mark.triton
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of the test's own; and each test here ends with nothing left, there or elsewhere."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with nothing_left(folder):
        yield folder


def test_the_check_passes() -> None:
    """`up --check` answers in every style, says so, and ends with 0."""
    done = lora_slots("up", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout
    for name in ("base", "json", "pirate", "robot"):
        assert f"[{name} · " in done.stdout


def test_the_check_as_json() -> None:
    """One document on stdout with every answer, and nothing beside it."""
    done = lora_slots("up", "--check", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert [answer["name"] for answer in said["answers"]] == ["base", *examples.adapters()]
    assert all(answer["text"] and answer["error"] is None for answer in said["answers"])
    assert said["problems"] == []
    assert "check passed" in done.stderr


def test_json_is_one_line_once_it_serves(tmp_path: Path) -> None:
    """A program that reads a pipe gets the line while the stack serves, can use what it says, and gets nothing more."""
    with (tmp_path / "err").open("w+") as errors:
        running = Running("--json", errors=errors, PYTHONUNBUFFERED="")  # Python would flush by itself
        said = json.loads(running.until(""))
        assert said["pid"] == running.process.pid
        assert said["adapters"] == said["warm"] == list(examples.adapters())
        asked = ("generate", "--json", "--adapter", "pirate", "--max-tokens", "8", "Who are you?")
        answer = json.loads(lora_slots(*asked, "--url", said["grpc"]).stdout)
        assert answer["adapter"] == "pirate"
        assert answer["text"]
        assert ask(said["http"], "/v2/health/ready").status == 200
        assert b"lora_slots_" in ask(said["metrics"].removesuffix("/metrics"), "/metrics").body
        os.kill(said["pid"], signal.SIGTERM)
        code, whole = running.end()
        errors.seek(0)
        assert "starting Triton" in errors.read()
    assert code == 143
    assert whole.count("\n") == 1


def test_a_missing_adapter_folder_is_named() -> None:
    """Exit code 1, one line, before anything is started."""
    done = lora_slots("up", "--check", "--adapter", "mine=/no/such/folder")
    assert (done.returncode, done.stderr) == (1, "lora-slots: no such adapter folder: mine: /no/such/folder\n")


def test_a_corrupt_adapter_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Exit code 2 and the converter's report, no traceback, nothing published."""
    bad = tmp_path / "bad"
    shutil.copytree(ROOT / "examples" / "adapters" / "json", bad)
    file = bad / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    done = lora_slots("up", "--check", "--adapter", f"bad={bad}")
    assert done.returncode == 2, done.stderr
    assert "adapter_model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused_clearly() -> None:
    """The port that was asked for, and what to do; the usual ports fall back to free ones by themselves."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = lora_slots("up", "--check", "--grpc-port", str(port))
    assert done.returncode == 1
    assert re.search(rf"grpc port {port} .* process {os.getpid()} .* --grpc-port", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_told_with_numbers(tmp_path: Path) -> None:
    """A cache on a file system of 20 MB: needed and free bytes, and where."""
    with tmpfs(tmp_path / "small", "size=20m") as small:
        done = lora_slots("up", "--check", LORA_SLOTS_CACHE=str(small))
    assert done.returncode == 1
    assert str(small) in done.stderr
    assert re.search(r"\d+.*(free|needed)", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_read_only_cache_is_named_with_its_variable(tmp_path: Path) -> None:
    """One line that says which folder cannot be written, and which variable sets another."""
    with tmpfs(tmp_path / "cache", "ro") as cache:
        done = lora_slots("up", "--check", LORA_SLOTS_CACHE=str(cache))
    assert done.returncode == 1
    said = f"lora-slots: cannot write the cache {cache}/stacks: Read-only file system. Set LORA_SLOTS_CACHE "
    assert done.stderr.startswith(said)


def test_a_full_temporary_folder_is_named_with_its_variable(tmp_path: Path) -> None:
    """One line that says which folder is full, and which variable sets another."""
    with tmpfs(tmp_path / "small", "size=1m") as small:
        done = lora_slots("up", "--check", TMPDIR=str(small))
        assert list(small.iterdir()) == []
    assert done.returncode == 1
    assert f"lora-slots: cannot write the temporary folder {small}: No space left on device" in done.stderr
    assert "TMPDIR" in done.stderr


@pytest.mark.parametrize("moment", ["warm: json", "serving until Ctrl-C"])
def test_a_killed_triton_is_noticed_and_its_log_shown(moment: str) -> None:
    """The server dies while adapters are warmed or while it serves: exit code 1 and the log's tail."""
    running = Running()
    running.until(moment)
    os.kill(running.own("/tritonserver"), signal.SIGKILL)
    code, said = running.end()
    assert code == 1
    assert "the embedded Triton ended by itself" in said
    assert "last lines of its log" in said
    assert "Traceback" not in said


def test_a_killed_keeper_ends_everything() -> None:
    """Without the process that keeps Triton, nothing of it lives on, not even a model that waits for its server."""
    running = Running()
    running.until("serving until Ctrl-C")
    os.kill(running.own("keeper.py"), signal.SIGKILL)
    code, said = running.end()
    assert code == 1
    assert "its keeper was killed" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "moment", ["converting adapters", "starting Triton", "warm: json", "prompt:", "serving until Ctrl-C"]
)
def test_ctrl_c_at_any_moment_leaves_nothing(moment: str) -> None:
    """SIGINT to the whole group, as a terminal sends it: code 130, no traceback, nothing left (see the fixture)."""
    running = Running()
    running.until(moment)
    running.interrupt()
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
