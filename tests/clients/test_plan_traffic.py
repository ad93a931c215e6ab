"""Forecasts and what-ifs of `lora-slots plan`: each adapter of a log is itself, and a change is simulated as asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from lora_slots import plan_command
from lora_slots.fleet_source import from_registry
from lora_slots.plan_traffic import logged
from lora_slots.refusals import Refused
from lora_slots.simulation import Kind, forecast
from lora_slots.traffic import Request, ZipfGuess, read_log, with_new_tenants
from trtllm_lora.profile import load_profile

LLAMA = str(Path(__file__).parents[2] / "engines" / "profiles" / "llama-3.1-8b.yaml")


def run(*words: str, code: int = 0, columns: int = 200) -> Any:
    """Run `plan` in this process; the result must have the exit code."""
    app = typer.Typer()
    plan_command.register(app)
    result = CliRunner().invoke(app, [LLAMA, *words], env={"COLUMNS": str(columns)})
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def answer(*words: str) -> Any:
    """The JSON of a plan."""
    return json.loads(run(*words, "--json").stdout)


def registry(folder: Path, ranks: Mapping[str, int], **more: Any) -> str:
    """A registry of adapters in a store, each with its rank."""
    file = folder / f"{'-'.join(map(str, sorted(set(ranks.values()))))}.yaml"
    adapters = {
        name: {"versions": [{"version": 1, "digest": f"d{i}", "path": f"s3://models/{i}", "rank": rank}]}
        for i, (name, rank) in enumerate(ranks.items())
    }
    file.write_text(yaml.safe_dump({"schema": 1, "adapters": adapters, **more}))
    return str(file)


def log(folder: Path, names: str, every: float = 2.0) -> str:
    """A log with a request for each letter."""
    file = folder / "log.jsonl"
    lines = [json.dumps({"time": i * every, "adapter": name, "seconds": 0.1}) for i, name in enumerate(names)]
    file.write_text("\n".join(lines))
    return str(file)


def test_a_logged_adapter_has_its_own_rank(tmp_path: Path) -> None:
    """The log asks for two of many adapters: if they are large their moves take longer, whatever the others are."""
    others = [f"other{i}" for i in range(20)]
    file = log(tmp_path, "ab" * 50)
    large = registry(tmp_path, {**dict.fromkeys("ab", 64), **dict.fromkeys(others, 8)})
    (tmp_path / "small").mkdir()
    small = registry(tmp_path / "small", {**dict.fromkeys("ab", 8), **dict.fromkeys(others, 64)})
    slow, fast = (answer("--adapters", place, "--log", file, "--slots", "1")["traffic"] for place in (large, small))
    assert slow["wait_p50_s"] - 0.02 > 5 * (fast["wait_p50_s"] - 0.02)


def test_names_of_a_log_mean_what_the_registry_says(tmp_path: Path) -> None:
    """Aliases share their requests out, `a@1` is a version that is not current, unknown names are left out and told."""
    versions = [
        {"version": number, "digest": f"x{number}", "path": f"s3://models/x{number}", "rank": rank}
        for number, rank in ((1, 64), (2, 8))
    ]
    place = tmp_path / "adapters.yaml"
    place.write_text(
        yaml.safe_dump(
            {
                "schema": 1,
                "adapters": {"a": {"versions": versions}, "b": {"versions": [{**versions[1], "digest": "b"}]}},
                "aliases": {"best": {"targets": {"a@1": 75, "b": 25}}},
            }
        )
    )
    asked = [Request(float(i), name, 1.0) for i, name in enumerate(["a", "a@1", "nobody"] + ["best"] * 1000)]
    source = from_registry(str(place), load_profile(Path(LLAMA)).shape(), ["a", "a@1", "best"])
    assert dict(zip(source.fleet.names, source.fleet.names, strict=True)).keys() == {"a@2", "b@2", "a@1"}
    traffic = logged(asked, source, "log")
    counts = {name: sum(r.adapter == name for r in traffic.requests) for name in source.fleet.names}
    assert counts["a@2"] == 1
    assert 700 < counts["a@1"] < 800
    assert counts["b@2"] == 1002 - 1 - counts["a@1"]
    assert traffic.notes == (
        "log: 1 of 1003 requests ask for names that no adapter has (nobody): they are left out, as a server answers "
        "them NOT_FOUND",
    )
    with pytest.raises(Refused, match=r"1 of 1 requests ask for names that no adapter has"):
        logged(asked[2:3], source, "log")


def test_unknown_names_are_told_by_the_command(tmp_path: Path) -> None:
    """In the text and in the JSON, beside a forecast of the rest."""
    words = ("--adapters", registry(tmp_path, {"a": 8}), "--log", log(tmp_path, "abac" * 5))
    data = answer(*words)
    assert "10 of 20 requests ask for names that no adapter has (b, c)" in data["warnings"][0]
    assert data["traffic"]["requests"] == 8
    assert "(b, c)" in run(*words).output


def test_new_tenants_bring_traffic(tmp_path: Path) -> None:
    """Four adapters in turn through four slots all hit; with four more, drawn like they are, cold loads come."""
    data = answer("--log", log(tmp_path, "abcd" * 40), "--slots", "4", "--what-if", "tenants=+4")
    assert data["traffic"]["hit_rate"] == 1.0
    more = data["what_if"]["tenants=+4"]["traffic"]
    assert more["requests"] == 2 * data["traffic"]["requests"]
    assert more["hit_rate"] < 0.9
    assert more["cold_loads_per_min"] > 1


def test_a_new_tenant_is_asked_for_as_another_is() -> None:
    """As often and as long as one of those there are, within the same time; the others' requests stay as they were."""
    asked = ZipfGuess(count=400).requests(["a", "b", "c", "d"])
    found = with_new_tenants(asked, ["new"], ["a", "b", "c", "d"])
    new = [request for request in found if request.adapter == "new"]
    assert [request for request in found if request.adapter != "new"] == asked
    assert [r.at for r in found] == sorted(r.at for r in found)
    assert min(r.at for r in new) >= 0 and max(r.at for r in new) <= asked[-1].at
    spans = [sorted(r.seconds for r in asked if r.adapter == name) for name in "abcd"]
    assert sorted(r.seconds for r in new) in spans


def test_pin_takes_the_most_asked_for_or_the_one_that_is_named(tmp_path: Path) -> None:
    """`first` comes first and rarely, `b` is asked for most: pin=1 holds b, and pin=first holds first."""
    place = registry(tmp_path, {"f": 8, "b": 8, "c": 8, "d": 8})
    words = ("--adapters", place, "--log", log(tmp_path, "f" + "bcbd" * 40), "--slots", "1")
    cases = answer(*words, "--what-if", "pin=1", "--what-if", "pin=b", "--what-if", "pin=f")["what_if"]
    assert cases["pin=1"]["traffic"] == cases["pin=b"]["traffic"]
    assert cases["pin=1"]["traffic"]["hit_rate"] == pytest.approx(0.5, abs=0.02)
    assert cases["pin=f"]["traffic"]["hit_rate"] == 0.0
    assert cases["pin=f"]["adapters"]["pinned"] == 1
    assert "--what-if pin=q: no adapter 'q'" in run(*words, "--what-if", "pin=q", code=2).stderr
    assert "no request of the log asks for 'q'" in run(*words[2:], "--what-if", "pin=q", code=2).stderr
    assert "give --adapters, --bundles or --log" in run("--what-if", "pin=q", code=2).stderr


def test_pins_are_simulated_as_many_as_asked_or_refused(tmp_path: Path) -> None:
    """Four of four slots pinned: the other adapters are refused. Five: the slot manager would not take the fifth."""
    words = ("--fleet", "8x16", "--log", log(tmp_path, "abcdefgh" * 20), "--slots", "4")
    cases = answer(*words, "--what-if", "pin=4", "--what-if", "pin=5", "--what-if", "pin=9")["what_if"]
    full = cases["pin=4"]["traffic"]
    assert (full["hit_rate"], full["refused"]) == (0.5, full["requests"] // 2)
    assert cases["pin=5"]["impossible"] == "5 adapters cannot be pinned in 4 slots: the slot manager refuses it"
    assert cases["pin=9"]["impossible"] == "9 adapters cannot be pinned: there are 8"
    assert "cannot be pinned in 4 slots" in run(*words, "--pinned", "5", code=2).stderr


def test_what_cannot_be_had_is_an_answer(tmp_path: Path) -> None:
    """A what-if too large for the GPU has its reason, beside the plan and the other cases: text, JSON and picture."""
    words = ("--what-if", "gpu=16GiB", "--what-if", "slots=300", "--what-if", "slots=8")
    file = tmp_path / "plan.svg"
    data = answer(*words, "--plot", str(file))
    assert data["parameters"]
    assert "raise tensor_parallel" in data["what_if"]["gpu=16GiB"]["impossible"]
    assert data["what_if"]["slots=8"]["lora_cache"]["slots"] == 8
    assert "cannot be had: " in file.read_text()
    text = run(*words).output
    assert "recommended" in text
    assert "gpu=16GiB: cannot be had: llama-3.1-8b takes" in text
    assert "slots=8" in text


def test_a_context_is_judged_alike_everywhere() -> None:
    """More tokens than max_seq_len are refused as an option and as a what-if."""
    assert "the engine's max_seq_len is 8192" in run("--what-if", "context=999999", code=2).stderr
    assert "the engine's max_seq_len is 8192" in run("--context", "999999", code=2).stderr


def test_a_bad_fleet_hides_no_other_problem(tmp_path: Path) -> None:
    """Fleet, GPU and what-ifs are told together; a bad profile with what can be judged without it."""
    told = run("--fleet", "3y", "--gpu", "big", "--what-if", "luck=3", "--what-if", "slots=0", code=2).stderr
    assert [line.split()[0] for line in told.splitlines()] == ["'3y'", "--gpu:", "--what-if", "--what-if"]
    file = tmp_path / "bad.yaml"
    file.write_text(Path(LLAMA).read_text().replace("max_rank: 64", "max_rank: x"))
    app = typer.Typer()
    plan_command.register(app)
    both = CliRunner().invoke(app, [str(file), "--rate", "nan"])
    assert (both.exit_code, len(both.stderr.splitlines())) == (2, 2)


def test_a_broken_registry_is_told_line_by_line(tmp_path: Path) -> None:
    """Each problem as file:line, and exit code 2; the same code for no YAML and for no file."""
    file = tmp_path / "bad.yaml"
    file.write_text("schema: 1\nadapters:\n  a:\n    versions: []\n  b:\n    vrsions: []\n  b: {}\n")
    told = run("--adapters", str(file), code=2).stderr.splitlines()
    assert [line.split(": ")[0] for line in told] == [f"{file}:4", f"{file}:5", f"{file}:7"]
    file.write_text("schema: 1\nadapters: {a\n")
    assert run("--adapters", str(file), code=2).stderr.startswith(f"{file}:3: not YAML")
    assert "No such file" in run("--adapters", str(tmp_path / "none.yaml"), code=2).stderr
    assert "a registry is a file, or s3://" in run("--adapters", "ftp://x/y", code=2).stderr


@pytest.mark.parametrize(
    "text",
    [
        "time,adapter\n0,a\n2026-01-01T00:00:00,b\n",
        '{"time": 0, "adapter": "a"}\n{"time": "2026-01-01T00:00:00", "adapter": "b"}\n',
    ],
)
def test_a_log_has_one_clock(tmp_path: Path, text: str) -> None:
    """Seconds and dates in one log would be half a century apart: the line is told."""
    file = tmp_path / "log"
    file.write_text(text)
    line = text.count("\n")
    with pytest.raises(Refused, match=rf"log:{line}: 'time' is ISO 8601 here and seconds in line {line - 1}: write"):
        read_log(file, 1.0)


def test_eighty_columns_hold_the_what_ifs(tmp_path: Path) -> None:
    """No heading and no number is cut where a terminal has 80 columns."""
    words = ("--log", log(tmp_path, "abcd" * 40), "--what-if", "tenants=+50x16", "--what-if", "max-rank=128")
    text = run(*words, columns=80).output
    table = text[text.index("what if") - 200 :]
    for word in ("LoRA", "GiB", "pages", "tokens", "streams", "rate", "loads/min", "tenants=+50x16", "max-rank=128"):
        assert word in table
    assert "…" not in table


def test_a_guess_is_run_until_its_hit_rate_is_known() -> None:
    """With a precision no more requests are run than needed, and the margin holds what all of them would give."""
    names = [f"a{i}" for i in range(40)]
    asked = ZipfGuess(count=20_000).requests(names)
    config = plan_config()
    kinds = dict.fromkeys(names, Kind(pages=1, num_bytes=84_000_000))
    short, long = (forecast(config, kinds, asked[:n], precision=p) for n, p in ((3000, 0.03), (20_000, 0.0001)))
    assert short.requests < 2000
    assert short.margin is not None and short.margin <= 0.03
    assert abs(short.hit_rate - long.hit_rate) <= 0.03
    assert forecast(config, kinds, asked[:1000]).margin is None


def plan_config() -> Any:
    """A machine of 24 slots."""
    from adapter_slots.records import MachineConfig

    return MachineConfig(num_slots=24, cache_pages=64, host_bytes=2**40)


def test_many_unknown_names_cost_no_search_for_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred names that the registry lacks are counted; nobody compares them with those it has."""
    monkeypatch.setattr("difflib.get_close_matches", lambda *_, **__: pytest.fail("compared"))
    place = registry(tmp_path, {"a": 8})
    asked = [Request(float(i), f"nobody{i}" if i else "a", 1.0) for i in range(101)]
    source = from_registry(place, load_profile(Path(LLAMA)).shape(), [request.adapter for request in asked])
    (note,) = logged(asked, source, "log").notes
    assert (
        "100 of 101 requests ask for names that no adapter has (nobody1, nobody2, nobody3, nobody4, nobody5, …)" in note
    )
