"""`ci/environment`, which make runs: an interpreter that will not do is told in one line, before anything is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "ci/environment"
OLD = f"""#!/bin/sh
exec {sys.executable} -c "import platform, sys
sys.version_info = (3, 9, 2, 'final', 0)
platform.python_version = lambda: '3.9.2'
$2"
"""


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
    old = tmp_path / "bin/python3"
    old.parent.mkdir()
    old.write_text(OLD)
    old.chmod(0o755)
    named = f"setup: CPython 3.11 or 3.12 is needed; PYTHON={old} is CPython 3.9.2\n"
    assert environment(tmp_path, PYTHON=str(old)) == (1, named)
    shutil.rmtree(tmp_path / "ci")
    for program in ("dirname", "mktemp", "rm", "sh"):
        (old.parent / program).symlink_to(shutil.which(program) or "")
    code, said = environment(tmp_path, PYTHON="", PATH=str(old.parent))
    assert (code, said.count("\n")) == (1, 1)
    assert "python3 here is CPython 3.9.2" in said
