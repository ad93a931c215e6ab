"""bench/aiperf.py with a stand-in for aiperf: it takes the same options, loads the gateway, writes the file of 0.13.

The stand-in writes what aiperf's page "JSON Export Schema" says of version 0.13; aiperf itself is 1.2 GB and not here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "aiperf.py"
STAND_IN = """#!{python}
import argparse, json, pathlib, urllib.error, urllib.request
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("command", choices=["profile"])
parser.add_argument("-m", required=True)
parser.add_argument("--model-selection-strategy", choices=["round_robin"])
parser.add_argument("--endpoint-type", choices=["chat"])
parser.add_argument("--streaming", action="store_true")
parser.add_argument("--ui", choices=["none"])
parser.add_argument("--tokenizer", type=pathlib.Path)
parser.add_argument("--artifact-dir", type=pathlib.Path)
for name in ("--concurrency", "--request-count", "--isl", "--osl"):
    parser.add_argument(name, type=int)
parser.add_argument("--url")
given = parser.parse_args()
assert (given.tokenizer / "tokenizer.json").is_file()
models, good, bad = given.m.split(","), 0, 0
if {broken}:
    models[0] = "nobody"
for number in range(given.request_count):
    body = {{"model": models[number % len(models)], "stream": given.streaming, "max_tokens": 2,
            "messages": [{{"role": "user", "content": "hi"}}]}}
    request = urllib.request.Request(given.url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {{"content-type": "application/json"}})
    try:
        good += b"[DONE]" in urllib.request.urlopen(request).read()
    except urllib.error.HTTPError:
        bad += 1
spread = {{"unit": "ms", "avg": 21.0, "min": 10.0, "max": 40.0, "p50": 20.0, "p99": 39.5, "std": 3.0, "count": good}}
told = {{"schema_version": "1.1", "aiperf_version": "0.13.0", "was_cancelled": False, "error_summary": [],
        "request_count": {{"unit": "requests", "avg": float(good)}},
        "request_throughput": {{"unit": "requests/sec", "avg": 1.5}},
        "output_token_throughput": {{"unit": "tokens/sec", "avg": 16.0}},
        "time_to_first_token": spread, "inter_token_latency": spread, "request_latency": spread}}
if bad:
    told["error_request_count"] = {{"unit": "requests", "avg": float(bad)}}
given.artifact_dir.mkdir(parents=True)
(given.artifact_dir / "profile_export_aiperf.json").write_text(json.dumps(told))
print("aiperf's own table")
"""


def stand_in(folder: Path, *, broken: bool = False) -> Path:
    """An `aiperf`; a broken one asks for an adapter that is not there."""
    program = folder / "aiperf"
    program.write_text(STAND_IN.format(python=sys.executable, broken=broken))
    program.chmod(0o755)
    return program


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end."""
    command = [sys.executable, str(SCRIPT), "--requests", "6", "--concurrency", "2", *arguments]
    given = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=given, check=False, timeout=300)


@pytest.mark.triton
def test_the_figures_are_printed(tmp_path: Path) -> None:
    """Each adapter answered its third, the figures are the file's, and the program's own words are not on stdout."""
    done = bench(PATH=f"{stand_in(tmp_path).parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines()[1:])
    assert done.stdout.startswith("aiperf 0.13.0, load ")
    assert lines["requests answered"] == "6.0 requests"
    assert lines["first token"] == "20.0 (p50), 39.5 (p99) ms"
    assert lines["tokens, all streams"] == "16.0 tokens/sec"
    assert lines["answers of each"] == "json 2, pirate 2, robot 2"
    assert lines["requests failed"] == "0"
    assert "aiperf's own table" in done.stderr


@pytest.mark.triton
def test_requests_that_failed_are_exit_code_3(tmp_path: Path) -> None:
    """They are counted, and the other adapters' answers too."""
    done = bench("--aiperf", str(stand_in(tmp_path, broken=True)))
    assert done.returncode == 3, done.stderr
    assert re.search(r"^requests failed +2$", done.stdout, re.MULTILINE)
    assert re.search(r"^answers of each +json 0, pirate 2, robot 2$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("code", "wrote", "says"),
    [
        (7, '{"request_count": {"avg": 6}}', "aiperf ended with 7"),
        (0, None, "0 profile_export_aiperf.json are under"),
        (0, "[]", "no request_count in it"),
    ],
)
def test_an_aiperf_that_fails_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, wrote: str | None, says: str
) -> None:
    """Exit code 1, no figures."""
    if wrote is not None:
        (tmp_path / "profile_export_aiperf.json").write_text(wrote)
    assert script().told(code, tmp_path, {}) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err


def script() -> Any:
    """bench/aiperf.py as a module."""
    spec = importlib.util.spec_from_file_location("bench_aiperf", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_aiperf_it_says_how_to_get_it(tmp_path: Path) -> None:
    """One line, exit code 0, nothing started; a program that was named and is not there is an error."""
    done = bench(PATH=str(tmp_path))
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "pip install aiperf" in done.stdout
    missing = bench("--aiperf", str(tmp_path / "none"))
    assert missing.returncode != 0
    assert "no such program" in missing.stderr
