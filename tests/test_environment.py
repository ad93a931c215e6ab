"""`ci/environment`, which make runs: an interpreter that will not do is told in one line, before anything is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "ci/environment"


def python_of(file: Path, minor: int) -> Path:
    """A program that takes `-c CODE` and is Python 3.MINOR.2 by its own words."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"""#!/bin/sh
exec {sys.executable} -c "import platform, sys
sys.version_info = (3, {minor}, 2, 'final', 0)
platform.python_version = lambda: '3.{minor}.2'
$2"
""")
    file.chmod(0o755)
    return file


def environment(folder: Path, **variables: str) -> tuple[int, str]:
    """Exit code and words of `ci/environment runtime` in an empty checkout."""
    (folder / "ci").mkdir()
    shutil.copy(SCRIPT, folder / "ci")
    done = subprocess.run(
        ["/bin/sh", str(folder / "ci/environment"), "runtime"],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not (folder / ".venv").exists()
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("python", "what"),
    [
        ("/bin/false", "nothing that runs as Python"),
        ("/bin/true", "nothing that runs as Python"),
        ("/bin/echo", "nothing that runs as Python"),
        ("/no/such/python", "not there"),
    ],
)
def test_no_python_is_told_in_one_line(python: str, what: str, tmp_path: Path) -> None:
    """What was named, what it is, and what is needed; nothing of what that program itself says."""
    needed = f"setup: CPython 3.11 or 3.12 is needed; PYTHON={python} is {what}\n"
    assert environment(tmp_path, PYTHON=python) == (1, needed)


def test_an_old_python_is_told_with_its_version(tmp_path: Path) -> None:
    """The version found and those that would do, named by the user or found on PATH."""
    old = python_of(tmp_path / "bin/python3", 9)
    named = f"setup: CPython 3.11 or 3.12 is needed; PYTHON={old} is CPython 3.9.2\n"
    assert environment(tmp_path, PYTHON=str(old)) == (1, named)
    shutil.rmtree(tmp_path / "ci")
    for program in ("dirname", "mktemp", "rm", "sh"):
        (old.parent / program).symlink_to(shutil.which(program) or "")
    code, said = environment(tmp_path, PYTHON="", PATH=str(old.parent))
    assert (code, said.count("\n")) == (1, 1)
    assert "python3 here is CPython 3.9.2" in said


def test_make_takes_another_python_when_told_to(tmp_path: Path) -> None:
    """A finished .venv stands as it is for its own version, and is made anew for another."""
    for name in (
        "Makefile",
        "pyproject.toml",
        "ci/environment",
        *(f"requirements/{f.name}" for f in (ROOT / "requirements").glob("*.txt")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python_of(tmp_path / ".venv/bin/python", 11)

    def plan(*variables: str) -> str:
        make = ["make", "--dry-run", *variables, "setup"]
        return subprocess.run(
            make, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
        ).stdout

    for line in plan().splitlines():
        if line.startswith("touch "):
            (tmp_path / line.removeprefix("touch ")).touch()
    assert "ci/environment" not in plan()
    for minor, again in ((11, False), (12, True)):
        other = python_of(tmp_path / f"python3.{minor}", minor)
        assert ("ci/environment runtime" in plan(f"PYTHON={other}")) == again
