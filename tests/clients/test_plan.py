"""`lora-slots plan` as a person and a program use it; the forecast by the slot machine; logs, pictures and advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

from adapter_slots import room
from adapter_slots.events import Event
from adapter_slots.machine import SlotMachine
from adapter_slots.records import MachineConfig
from lora_slots import engine_command, merge_command, plan_command
from lora_slots.advice import advise
from lora_slots.fleet_source import from_bundles, from_registry
from lora_slots.refusals import Refused
from lora_slots.simulation import Kind, forecast
from lora_slots.traffic import Request, ZipfGuess, read_log
from trtllm_lora.fleet import Fleet, usual_fleet
from trtllm_lora.profile import load_profile

PROFILES = Path(__file__).parents[2] / "engines" / "profiles"
LLAMA = str(PROFILES / "llama-3.1-8b.yaml")
KIND = Kind(pages=1, num_bytes=84_000_000)


def run(*words: str, code: int = 0) -> Any:
    """Run commands of this issue in this process; the result must have the exit code."""
    app = typer.Typer()
    for command in (plan_command, engine_command, merge_command):
        command.register(app)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def test_text_and_json_say_the_same() -> None:
    """The recommended parameters of the table are those of the JSON, and the what-ifs are in both."""
    words = ("plan", LLAMA, "--fleet", "200x16,20x64", "--what-if", "max-rank=128", "--what-if", "pin=3")
    text, data = run(*words).output, json.loads(run(*words, "--json").stdout)
    for value in data["parameters"].values():
        assert value in text
    assert set(data["what_if"]) == {"max-rank=128", "pin=3"}
    assert data["what_if"]["max-rank=128"]["parameters"]["lora_cache_max_adapter_size"] == "128"
    assert sum(data["gpu_bytes"].values()) == 2 * data["gpu_bytes"]["total"]
    assert data["traffic"] is None
    assert "assumed: " in text


def test_a_forecast_from_a_guess() -> None:
    """More slots give a higher hit rate and fewer cold loads; with too few, some requests are refused."""
    words = ("--fleet", "30x16", "--slots", "12", "--what-if", "slots=24", "--what-if", "slots=4")
    data = json.loads(run("plan", LLAMA, *words, "--zipf", "1", "--json").stdout)
    many, few = (data["what_if"][name]["traffic"] for name in ("slots=24", "slots=4"))
    assert many["hit_rate"] > data["traffic"]["hit_rate"] > few["hit_rate"]
    assert many["cold_loads_per_min"] < data["traffic"]["cold_loads_per_min"]
    assert (many["refused"], data["traffic"]["refused"]) == (0, 0)
    assert few["refused"] > 0


def test_ten_thousand_adapters() -> None:
    """A plan and a forecast for 10,000 adapters; how long they take is bench/plan.py's matter."""
    data = json.loads(run("plan", LLAMA, "--fleet", "9000x16,1000x64", "--zipf", "1", "--json").stdout)
    assert data["adapters"]["count"] == 10_000
    traffic = data["traffic"]
    assert traffic["requests"] == 2400 or traffic["hit_rate_margin"] <= 0.03


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpu", "big"), "--gpu: 'big' is not a size"),
        (("--fleet", "3x128"), "3x128: rank 128"),
        (("--fleet", "3x8", "--bundles", "x"), "give one of them"),
        (("--bundles", "/nowhere"), "no bundle here"),
        (("--context", "10000"), "max_seq_len is 8192"),
        (("--what-if", "luck=3"), "write one of pin=N"),
        (("--gpu", "12GiB"), "raise tensor_parallel"),
        (("--log", "/nowhere.jsonl"), "No such file"),
        (("--plot", "plan.gif"), "ends in .svg or .png"),
        (("--plot", "/nowhere/plan.svg"), "/nowhere is no folder; make it first"),
        (("--gpu", "80"), "--gpu 80: that is 80 bytes, and no GPU; write the unit, such as --gpu 80GiB"),
        (("--gpu", ""), "--gpu: '' is not a size"),
        (("--what-if", "gpu=80"), "no GPU: write the unit, such as 80GiB"),
        (("--zipf", "nan"), "--zipf nan: write a number of at least 0"),
        (("--zipf", "-1"), "--zipf -1.0: write a number of at least 0"),
        (("--rate", "inf"), "--rate inf: write a number of at least 0.001"),
        (("--seconds", "nan"), "--seconds nan: write a number"),
        (("--latency-goal-ms", "nan"), "--latency-goal-ms nan: write a number"),
    ],
)
def test_bad_input_ends_with_2_and_a_reason(words: tuple[str, ...], says: str) -> None:
    """Each refusal is one line that says what is wrong; the exit code is 2."""
    assert says in run("plan", LLAMA, *words, code=2).stderr


def test_every_wrong_option_is_told_at_once(tmp_path: Path) -> None:
    """Fleet, context, log and plot are wrong together, and so are two what-ifs: a line for each, and no picture."""
    words = ("--fleet", "3x128,ax", "--context", "10000", "--log", "/nowhere", "--plot", "p.gif")
    told = run("plan", LLAMA, *words, code=2).stderr.splitlines()
    assert [line.split(":")[0] for line in told] == ["/nowhere", "--plot p.gif", "3x128", "--context 10000"]
    what_ifs = ("--what-if", "luck=3", "--what-if", "slots=0", "--plot", str(tmp_path / "p.svg"))
    assert len(run("plan", LLAMA, *what_ifs, code=2).stderr.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


def test_defaults_fit_the_engine(tmp_path: Path) -> None:
    """Where nothing is said, ranks and context are no larger than the engine takes."""
    file = tmp_path / "small.yaml"
    text = (
        Path(LLAMA).read_text().replace("max_rank: 64", "max_rank: 8").replace("max_seq_len: 8192", "max_seq_len: 512")
    )
    file.write_text(text)
    data = json.loads(run("plan", str(file), "--json").stdout)
    assert (data["adapters"]["ranks"], data["kv"]["context"]) == ([8], 512)


def test_plan_and_render_plan_for_the_same_adapters() -> None:
    """Where nobody says which adapters come: as many as the slots, or 100, of the largest rank that is taken."""
    shape = load_profile(Path(LLAMA)).shape()
    assert (usual_fleet(shape, 32), usual_fleet(shape, 200)) == ("100x64", "200x64")
    data = json.loads(run("plan", LLAMA, "--json").stdout)
    assert (data["adapters"]["count"], data["adapters"]["ranks"]) == (100, [64])


def test_a_bad_profile_tells_every_problem(tmp_path: Path) -> None:
    """All problems of a profile, each with file:line, and exit code 2, from every command that takes one."""
    file = tmp_path / "bad.yaml"
    file.write_text(
        Path(LLAMA).read_text().replace("max_rank: 64", "max_rank: x").replace("dtype: bfloat16", "dtype: int")
    )
    for words in (("plan", str(file)), ("engine", "build", str(file), "--dry-run")):
        lines = run(*words, code=2).stderr.splitlines()
        assert [line.startswith(f"{file}:") for line in lines] == [True, True]
    assert "profiles are good" in run("engine", "check", *map(str, sorted(PROFILES.glob("*.yaml")))).output
    assert len(run("engine", "check", str(file), code=2).output.splitlines()) == 2


def test_dry_run_prints_the_commands_of_every_profile(tmp_path: Path) -> None:
    """--dry-run runs anywhere and prints what would be run, for each compiled profile of the repository."""
    for file in sorted(PROFILES.glob("*.yaml")):
        if load_profile(file).runtime == "tensorrt_llm":
            output = run("engine", "build", str(file), "--dry-run", "--cache", str(tmp_path)).output
            assert "trtllm-build --checkpoint_dir" in output
            assert "\npython3 -m trtllm_lora.pipeline.checkpoint" in output  # the image's, not this machine's
            assert not list(tmp_path.iterdir())


def test_dry_run_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the reference profile too, whose base is not there yet: the command is printed, and no file is written."""
    monkeypatch.setenv("LORA_SLOTS_CACHE", str(tmp_path / "cache"))
    told = run("engine", "build", str(PROFILES / "smollm2-135m.yaml"), "--dry-run")
    assert f"--base {tmp_path}/cache/base/SmolLM2-135M-Instruct --out {tmp_path}/cache/builds/engine-KEY" in told.stdout
    assert "the build makes it first" in told.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_picture_is_svg(tmp_path: Path) -> None:
    """--plot writes a well-formed picture with a bar for the plan and each what-if."""
    file = tmp_path / "plan.svg"
    run("plan", LLAMA, "--plot", str(file), "--what-if", "slots=64")
    root = ElementTree.fromstring(file.read_text())  # noqa: S314 - our own file
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert {"as asked", "slots=64"} <= set(texts)
    assert any("KV tokens" in text for text in texts)


def test_pictures_as_png_say_what_they_need(tmp_path: Path) -> None:
    """PNG is drawn by matplotlib if it is there; without it the message says what to install."""
    file = tmp_path / "plan.png"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "lora-slots[plot]" in run("plan", LLAMA, "--plot", str(file), code=2).stderr
    else:
        run("plan", LLAMA, "--plot", str(file))
        assert file.read_bytes().startswith(b"\x89PNG")


def test_bundles_are_counted_by_their_rows(tmp_path: Path) -> None:
    """Adapters of a folder are grouped by equal rows; those that do not fit the profile are named."""
    shape = load_profile(PROFILES / "smollm2-135m.yaml").shape()
    for name, rank in (("a", 8), ("b", 8), ("c", 16)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "model.lora_config.npy", np.array([[[1, 0, rank], [3, 0, rank]]], np.int32))
    fleet = from_bundles(tmp_path, shape).fleet
    assert sorted((group.count, group.rank) for group in fleet.groups) == [(1, 16), (2, 8)]
    np.save(tmp_path / "c" / "model.lora_config.npy", np.array([[[1, 0, 128]]], np.int32))
    with pytest.raises(Refused, match=r"c: rank 128: the profile has lora\.max_rank 64"):
        from_bundles(tmp_path, shape)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (np.array([[[9, 0, 8]]], np.int32), r"module id 9: is not enabled in the profile"),
        (np.array([[[1, 30, 8]]], np.int32), r"layer 30: the profile has 30"),
        (np.array([[[1, 0, 0]]], np.int32), r"rank 0: the profile has lora\.max_rank 64 \(2 like it\)"),
        (np.zeros((2, 3), np.int32), r"is \[1, rows, 3 or 4\] int32, found \[2, 3\] int32"),
        (np.zeros((1, 2, 3), np.float32), r"found \[1, 2, 3\] float32"),
        (None, r"is not a readable array"),
        (b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i4',(", r"is not a readable array"),
    ],
)
def test_bundles_that_are_none(tmp_path: Path, rows: Any, says: str) -> None:
    """What the engine would not take, and what is no array, is named with its folder."""
    shape = load_profile(PROFILES / "smollm2-135m.yaml").shape()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "model.lora_config.npy"
        if rows is None or isinstance(rows, bytes):
            file.write_bytes(rows or b"no array")
        else:
            np.save(file, rows)
    with pytest.raises(Refused, match=says):
        from_bundles(tmp_path, shape)


def test_a_registry_counts_what_is_elsewhere_by_its_facts(tmp_path: Path) -> None:
    """A bundle here by its rows, one in a store by rank and modules; one of which nothing is known is told."""
    shape = load_profile(PROFILES / "smollm2-135m.yaml").shape()
    (tmp_path / "here").mkdir()
    np.save(tmp_path / "here" / "model.lora_config.npy", np.array([[[1, 0, 4]]], np.int32))
    entries: dict[str, dict[str, Any]] = {
        "near": {"path": "here"},
        "far": {"path": "s3://models/far", "rank": 16, "target_modules": ["q_proj", "down_proj"]},
        "raw": {"path": "raw", "rank": 16, "target_modules": ["q_proj", "down_proj"]},
    }

    def registry() -> Fleet:
        adapters = {
            name: {"versions": [{"version": 1, "digest": f"{i}" * 64, **entry}]}
            for i, (name, entry) in enumerate(entries.items())
        }
        (tmp_path / "adapters.yaml").write_text(yaml.safe_dump({"schema": 1, "adapters": adapters}))
        return from_registry(str(tmp_path / "adapters.yaml"), shape).fleet

    fleet = registry()
    assert sorted((group.count, group.rank, len(group.rows)) for group in fleet.groups) == [(1, 4, 1), (2, 16, 60)]
    assert fleet.count == 3
    entries["unknown"] = {"path": "s3://models/unknown"}
    with pytest.raises(Refused, match=r"unknown@1: is not on this machine, and the registry does not say its rank"):
        registry()


def requests(names: str, every: float = 1.0, seconds: float = 0.1) -> list[Request]:
    """One request for each letter."""
    return [Request(i * every, name, seconds) for i, name in enumerate(names)]


def machine(slots: int) -> MachineConfig:
    """A machine with room for everything but slots."""
    return MachineConfig(num_slots=slots, cache_pages=64, host_bytes=2**40, idle_s=1e9, report_margin_s=0.0)


def test_the_forecast_counts_hits_as_the_machine_grants_them() -> None:
    """Two adapters in turn: with two slots all hit after the warm-up, with one slot none does."""
    kinds = {"a": KIND, "b": KIND}
    both = forecast(machine(2), kinds, requests("ab" * 50, every=2.0))
    assert (both.hit_rate, both.cold_loads_per_min) == (1.0, 0.0)
    one = forecast(machine(1), kinds, requests("ab" * 50, every=2.0))
    assert one.hit_rate == 0.0
    assert one.cold_loads_per_min == pytest.approx(30, rel=0.05)
    assert one.wait_p50_s > 0.02


def test_a_quiet_night_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days without a request are one tick of the machine: adapters have left, only the pinned one is there."""
    ticks = []
    original = SlotMachine.handle

    def counted(self: SlotMachine, event: Event, now: float) -> Any:
        ticks.append(now)
        return original(self, event, now)

    monkeypatch.setattr(SlotMachine, "handle", counted)
    config = MachineConfig(num_slots=2, cache_pages=64, host_bytes=2**40, idle_s=10.0, report_margin_s=0.0)
    asked = [Request(i * 1e6, name, 0.1) for i, name in enumerate("abab" * 5)]
    found = forecast(config, {"a": KIND, "b": KIND}, asked, pins=["a"])
    assert found.hit_rate == 0.5  # the pinned one
    assert len(ticks) < 200 * len(asked)
    assert ticks == sorted(ticks)
    long = [Request(0.0, "a", 1e9), Request(1.0, "b", 1e9)]
    assert forecast(config, {"a": KIND, "b": KIND}, long).refused == 0


def test_who_waits_for_the_same_room_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HOST is full of busy adapters, sixty that wait for it make one search of an event, not sixty."""
    searches, events = list[int](), list[Event]()
    search, handle = room.room_in_host, SlotMachine.handle

    def counted(*words: Any) -> room.Room:
        searches.append(1)
        return search(*words)

    def heard(self: SlotMachine, event: Event, now: float) -> Any:
        events.append(event)
        return handle(self, event, now)

    monkeypatch.setattr("adapter_slots.machine.room_in_host", counted)
    monkeypatch.setattr(SlotMachine, "handle", heard)
    names = [f"a{i}" for i in range(64)]
    config = MachineConfig(num_slots=2, cache_pages=64, host_bytes=4 * KIND.num_bytes)
    asked = [Request(i * 0.01, name, 20.0) for i, name in enumerate(names)]
    found = forecast(config, dict.fromkeys(names, KIND), asked)
    assert found.refused > 40
    assert len(searches) < 1.5 * len(events)


def test_a_pinned_adapter_always_hits() -> None:
    """With two slots, one of them pinned, the pinned adapter hits and the two others take turns."""
    kinds = {"a": KIND, "b": KIND, "c": KIND}
    free = forecast(machine(2), kinds, requests("abc" * 40, every=2.0))
    pinned = forecast(machine(2), kinds, requests("abc" * 40, every=2.0), pins=["a"])
    assert pinned.hit_rate > free.hit_rate
    assert pinned.hit_rate == pytest.approx(1 / 3, abs=0.02)


def test_a_guess_is_the_same_every_time() -> None:
    """The same guess gives the same requests, most of them for the first adapters."""
    names = [f"a{i}" for i in range(100)]
    first = ZipfGuess().requests(names)
    assert first == ZipfGuess().requests(names)
    assert sum(request.adapter == "a0" for request in first) > len(first) * 0.15


@pytest.mark.parametrize(
    "text",
    [
        '{"time": 5, "adapter": "a", "seconds": 2}\n\n{"time": 3, "adapter": "b"}\n',
        "time,adapter,seconds\n5,a,2\n3,b,\n",
        '{"time": "2026-01-01T00:00:02+00:00", "adapter": "a", "seconds": 2}\n'
        '{"time": "2026-01-01T00:00:00+00:00", "adapter": "b"}\n',
    ],
)
def test_logs_in_three_spellings(tmp_path: Path, text: str) -> None:
    """JSON lines, CSV and ISO times give the same requests, in order of time."""
    file = tmp_path / "log"
    file.write_text(text)
    assert read_log(file, 1.5) == [Request(0.0, "b", 1.5), Request(2.0, "a", 2.0)]


def test_a_bad_log_names_its_lines(tmp_path: Path) -> None:
    """Every line that cannot be read is told with its number."""
    file = tmp_path / "log"
    lines = ['{"time": 1, "adapter": "a"}', "{", '{"time": "noon", "adapter": "a"}', '{"time": 1}', "[]"]
    file.write_text("\n".join(lines))
    with pytest.raises(Refused) as caught:
        read_log(file, 1.0)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["2", "3", "4", "5"]
    for wrong in ("1e999", "NaN", "1" * 400, '"9999-99-99"', "true"):
        file.write_text(f'{{"time": {wrong}, "adapter": "a"}}')
        with pytest.raises(Refused, match="neither seconds nor ISO 8601"):
            read_log(file, 1.0)
    file.write_text('{"time": 1, "adapter": "a", "seconds": 1e300}')
    with pytest.raises(Refused, match="'seconds' '1e\\+300' is not a number"):
        read_log(file, 1.0)
    file.write_text("time,adapter\n")
    with pytest.raises(Refused, match="no request in it"):
        read_log(file, 1.0)


def log_of(share: float, ttft: float | None = None, *, early_only: bool = False) -> list[Request]:
    """1,000 requests, `share` of them for `big`; with `early_only` all of those come first."""
    big = [i < share * 1000 if early_only else int((i + 1) * share) > int(i * share) for i in range(1000)]
    return [Request(float(i), "big" if is_big else f"small{i % 7}", 1.0, ttft) for i, is_big in enumerate(big)]


def test_merge_advice_needs_all_three_reasons() -> None:
    """More than 80 % of the traffic, all the time, and bound by latency: only then merge."""
    assert advise(log_of(0.9, 300.0), 200.0)[0].merge is True
    assert advise(log_of(0.9, 100.0), 200.0)[0].merge is False
    assert advise(log_of(0.9))[0].merge is None
    assert "no ttft_ms" in advise(log_of(0.9), 200.0)[0].why
    assert advise(log_of(0.5, 300.0), 200.0)[0].merge is False
    burst = advise(log_of(0.85, 300.0, early_only=True), 200.0)[0]
    assert burst.merge is False
    assert "not permanent" in burst.why
    assert advise([]) == []


def test_advice_wants_a_goal_that_is_a_number(tmp_path: Path) -> None:
    """A goal of nan would be missed by everybody and met by everybody."""
    file = tmp_path / "log.jsonl"
    file.write_text('{"time": 0, "adapter": "a"}')
    told = run("merge-advice", str(file), "--latency-goal-ms", "nan", code=2).stderr
    assert told == "--latency-goal-ms nan: write a number of milliseconds\n"


def test_the_plan_of_a_log_carries_advice(tmp_path: Path) -> None:
    """`plan --log` forecasts from the log and says whether an adapter should be merged."""
    file = tmp_path / "log.jsonl"
    rows = [{"time": r.at, "adapter": r.adapter, "seconds": 1, "ttft_ms": 300} for r in log_of(0.9)]
    file.write_text("\n".join(map(json.dumps, rows)))
    data = json.loads(run("plan", LLAMA, "--log", str(file), "--latency-goal-ms", "200", "--json").stdout)
    assert data["merge_advice"][0].startswith("big: merge: 90% of the requests")
    assert data["traffic"]["hit_rate"] > 0.95
    assert "big: merge:" in run("merge-advice", str(file), "--latency-goal-ms", "200").output
