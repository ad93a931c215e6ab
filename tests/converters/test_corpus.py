"""The adapter corpus: 30 of 30 in each type, by the judge that comes with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "adapter-corpus"
JUDGE = CORPUS / "check_conversion.py"


@pytest.mark.skipif(not JUDGE.is_file(), reason="no adapter corpus beside the repository (../shared/adapter-corpus)")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_case_of_the_corpus(dtype: str) -> None:
    """Each adapter is converted right, or refused for its reason."""
    command = str(Path(sys.executable).parent / "lora-slots")
    converter = [command, "convert", "{adapter}", "--base", "{base}", "--out", "{out}", "--dtype", "{dtype}"]
    done = subprocess.run(
        [sys.executable, str(JUDGE), "run", "--dtype", dtype, "--", *converter],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "30 right of 30" in done.stdout
