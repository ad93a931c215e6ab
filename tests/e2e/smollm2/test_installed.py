"""The wheel, installed in an environment of its own and used far from any checkout."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.up import Running, nothing_left

pytestmark = pytest.mark.triton
ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder with the commands of an environment that has the built wheel, and this one's packages behind it."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    home = tmp_path / "environment"
    venv.create(home)
    (packages,) = home.glob("lib/python*/site-packages")
    # a folder named in a .pth file is searched, but its own .pth files (our editable install) are not read
    behind = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(behind))
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return home / "bin"


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """A temporary folder, empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    with nothing_left(folder):
        yield folder


def test_an_installed_wheel_serves_and_its_lines_can_be_pasted(
    installed: Path, temporary: Path, tmp_path: Path
) -> None:
    """`up` answers with the examples of the wheel, and each command it prints runs as it stands."""
    running = Running(command=str(installed / "lora-slots"), cwd=tmp_path, TMPDIR=str(temporary))
    said: list[str] = []
    while "serving until Ctrl-C" not in (said or [""])[-1]:
        said.append(running.until("."))
    lines = [
        line.strip()
        for line in said
        if line.startswith("  ") and re.match(r"curl|.*(client\.py|lora-slots) ", line.strip())
    ]
    assert [Path(shlex.split(line)[0]).name for line in lines] == ["curl", "python", "lora-slots", "lora-slots"]
    for line in lines[1:]:
        done = subprocess.run(shlex.split(line), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), line + done.stderr
        assert str(ROOT) not in line
    running.interrupt()
    assert running.end()[0] == 130
