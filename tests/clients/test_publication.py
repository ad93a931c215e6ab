"""Engines and bundles in a real S3 (SeaweedFS), by the commands; and which profiles need a build."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from fakes import seaweed, trtllm_tools
from typer.testing import CliRunner

from lora_slots import bundle_command, engine_command
from lora_slots.base_model.tiny import make_tiny_llama
from trtllm_lora import BundleFacts, EngineShape, open_bundle, write_bundle
from trtllm_lora.pipeline import Runner, plan_tensorrt_llm
from trtllm_lora.pipeline.manifest import MANIFEST_FILE
from trtllm_lora.pipeline.steps import PIPELINE
from trtllm_lora.profile import load_profile

PROFILES = Path(__file__).parents[2] / "engines" / "profiles"


def run(*words: str | Path, code: int = 0) -> Any:
    """Run a command in this process; it must end with the code."""
    app = typer.Typer()
    for command in (bundle_command, engine_command):
        command.register(app)
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(autouse=True)
def _aws(store: seaweed.Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store as the AWS tools' settings have it."""
    for name, value in {**seaweed.environment(), "AWS_ENDPOINT_URL": store.url}.items():
        monkeypatch.setenv(name, value)


def profile_of(file: Path, **changes: Any) -> Path:
    """A profile of the tiny base for a GPU."""
    data = yaml.safe_load((PROFILES / "smollm2-135m-gpu.yaml").read_text())
    data["name"] = file.stem
    data["model"] |= {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    data["model"] |= {"head_size": 16, "vocab_size": 256, "max_positions": 2048}
    data["engine"] |= {"max_seq_len": 256}
    for section, values in changes.items():
        data[section] |= values
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory as the pipeline leaves it, built by the stand-in of trtllm-build."""
    folder = tmp_path_factory.mktemp("engine")
    base = make_tiny_llama(folder / "base", seed=1)
    plan = plan_tensorrt_llm(load_profile(profile_of(folder / "tiny.yaml")), folder / "cache", base)
    Runner(folder / "cache", lambda: 0.0, lambda _: None, environment=trtllm_tools.install(folder)).run(plan)
    return plan.engine.folder


def test_an_engine_goes_there_and_comes_back(engine: Path, tmp_path: Path) -> None:
    """What is published under profile and key comes back byte for byte; publishing again sends nothing."""
    done = json.loads(run("engine", "publish", engine, "--to", "s3://builds/engines", "--json").stdout)
    files = {path.relative_to(engine).as_posix(): path.read_bytes() for path in engine.rglob("*") if path.is_file()}
    key = json.loads(files[MANIFEST_FILE])["key"]
    assert done == {"url": f"s3://builds/engines/tiny/{key}", "sent": len(files)}
    assert json.loads(run("engine", "publish", engine, "--to", "s3://builds/engines", "--json").stdout)["sent"] == 0
    out = tmp_path / "back"
    fetched = run("engine", "fetch", done["url"], "-o", out, "--profile", profile_of(tmp_path / "tiny.yaml"), "--json")
    assert json.loads(fetched.stdout) == {"url": done["url"], "path": str(out)}
    assert {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()} == files
    assert "is there already" in run("engine", "fetch", done["url"], "-o", out, code=2).stderr


def test_an_engine_that_is_not_whole_is_not_published(engine: Path, tmp_path: Path) -> None:
    """A file that differs from the manifest, and an engine without one, stop before anything is sent."""
    copied = tmp_path / "engine"
    copied.mkdir()
    assert "not built by" in run("engine", "publish", copied, "--to", "s3://builds/other", code=2).stderr
    for path in engine.iterdir():
        if path.is_file():
            (copied / path.name).write_bytes(path.read_bytes())
    (copied / "rank0.engine").write_bytes(b"engima")
    told = run("engine", "publish", copied, "--to", "s3://builds/other", code=2).stderr
    assert "rank0.engine differs from the manifest's sha256" in told
    assert "tokenizer/tokenizer.json is missing" in told
    assert "write s3://bucket/prefix" in run("engine", "publish", copied, "--to", "builds", code=2).stderr


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("rank0.engine", "its bytes are not those of its manifest"),
        ("tokenizer/tokenizer.json", "is missing, although its manifest is there"),
        (MANIFEST_FILE, "nothing is published there"),
    ],
)
def test_half_an_engine_is_not_fetched(
    store: seaweed.Seaweed, engine: Path, tmp_path: Path, spoil: str, says: str
) -> None:
    """Changed bytes, a lost file and an upload that did not end: one line each, and no directory."""
    prefix = f"half/{spoil.replace('/', '-')}"
    url = run("engine", "publish", engine, "--to", f"s3://builds/{prefix}").stdout.strip()
    key = f"{url.removeprefix('s3://builds/')}/{spoil}"
    if spoil == "rank0.engine":
        store.client().put_object(Bucket="builds", Key=key, Body=b"engima")
    else:
        store.client().delete_object(Bucket="builds", Key=key)
    assert says in run("engine", "fetch", url, "-o", tmp_path / "back", code=2).stderr
    assert list(tmp_path.iterdir()) == []
    if spoil == MANIFEST_FILE:  # publishing again ends what did not end
        again = json.loads(run("engine", "publish", engine, "--to", f"s3://builds/{prefix}", "--json").stdout)
        assert again["sent"] == 1
        run("engine", "fetch", url, "-o", tmp_path / "back")


def test_a_manifest_that_leads_elsewhere_is_refused(store: seaweed.Seaweed, engine: Path, tmp_path: Path) -> None:
    """A name with .. in a published manifest writes nothing outside of the directory."""
    manifest = json.loads((engine / MANIFEST_FILE).read_text())
    manifest["files"]["../../outside"] = {"bytes": 1, "sha256": "0" * 64}
    body = json.dumps(manifest).encode()
    store.client().put_object(Bucket="builds", Key=f"evil/{MANIFEST_FILE}", Body=body)
    told = run("engine", "fetch", "s3://builds/evil", "-o", tmp_path / "back", code=2).stderr
    assert "names '../../outside', which is no file below it" in told
    assert list(tmp_path.iterdir()) == []


def test_an_engine_of_another_profile_is_not_fetched(engine: Path, tmp_path: Path) -> None:
    """--profile refuses an engine that is not what it says, and leaves nothing."""
    url = run("engine", "publish", engine, "--to", "s3://builds/engines").stdout.strip()
    other = profile_of(tmp_path / "tiny.yaml", lora={"max_rank": 8})
    assert (
        "max_lora_rank: 64, not 8"
        in run("engine", "fetch", url, "-o", tmp_path / "b", "--profile", other, code=2).stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def make_bundles(folder: Path, shape: EngineShape, names: Sequence[str]) -> list[Path]:
    """Bundles of one row each, all different."""
    made = []
    for number, name in enumerate(names):
        d_in = shape.hidden_size
        weights = np.full((1, 1, 16 * d_in), number, np.float16)
        config = np.array([[[1, 0, 8]]], np.int32)
        facts = BundleFacts(adapter=name, dtype="float16", num_layers=2)
        made.append(write_bundle(folder / name, weights, config, facts).path)
    return made


def test_bundles_go_where_servers_fetch_them(store: seaweed.Seaweed, engine: Path, tmp_path: Path) -> None:
    """Each under its digest, the manifest last, in the order given; a second time nothing is sent."""
    made = make_bundles(tmp_path, EngineShape.from_engine_config(engine), ["b", "a"])
    words = ("--to", "s3://builds/models/bundles", "--engine", engine)
    rows = json.loads(run("bundle", "publish", *made, *words, "--json").stdout)
    assert [row["adapter"] for row in rows] == ["b", "a"]
    assert [row["url"] for row in rows] == [f"s3://builds/models/bundles/{path.name}" for path in made]
    assert [row["sent"] for row in rows] == [3, 3]
    urls = run("bundle", "publish", tmp_path / "b", tmp_path / "a", *words).stdout.split()  # folders of bundles
    assert urls == [row["url"] for row in rows]
    for path in made:
        for file in path.iterdir():
            found = store.client().get_object(Bucket="builds", Key=f"models/bundles/{path.name}/{file.name}")
            assert found["Body"].read() == file.read_bytes()


def test_a_bundle_that_is_wrong_stops_all_of_them(store: seaweed.Seaweed, engine: Path, tmp_path: Path) -> None:
    """One with a flipped bit and one that does not fit: both are told, and nothing is sent, not even the good one."""
    shape = EngineShape.from_engine_config(engine)
    good, flipped, other = make_bundles(tmp_path, shape, ["good", "flipped", "other"])
    file = flipped / "model.lora_weights.npy"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    wrong = engine / "config.json"
    config = json.loads(wrong.read_text())
    config["build_config"]["lora_config"]["max_lora_rank"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = run("bundle", "verify", good, flipped, other, "--engine", tmp_path / "config.json", code=2).stderr
    assert "differ from the manifest's sha256" in told
    assert told.count("rank 8") == 2
    run("bundle", "publish", good, flipped, "--to", "s3://builds/none", code=2)
    assert "Contents" not in store.client().list_objects_v2(Bucket="builds", Prefix="none/")
    assert "is whole and fits" in run("bundle", "verify", good, "--engine", engine).stdout
    assert "no bundle here" in run("bundle", "verify", tmp_path / "nothing", code=2).stderr
    assert open_bundle(good).adapter == "good"


def test_which_engines_have_to_be_built(tmp_path: Path) -> None:
    """Since a commit: a new profile and one with another rank; not one whose serving changed, nor an untouched one."""
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path))
    names = ("same", "served", "ranked", "broken")
    files = {name: profile_of(tmp_path / f"{name}.yaml") for name in names}
    files["broken"].write_text("name: [")
    subprocess.run((*git, "init", "-q"), check=True)
    subprocess.run((*git, "add", "."), check=True)
    subprocess.run((*git, "commit", "-q", "-m", "first"), check=True)
    profile_of(files["served"], serving={"slots": 3})
    profile_of(files["ranked"], lora={"max_rank": 8})
    profile_of(files["broken"])
    files["new"] = profile_of(tmp_path / "new.yaml")
    found = json.loads(run("engine", "changed", *files.values(), "--since", "HEAD", "--json").stdout)
    assert [Path(row["profile"]).stem for row in found] == ["ranked", "broken", "new"]
    assert {row["container"] for row in found} == {"tritonserver:26.07-trtllm-python-py3"}
    everything = json.loads(run("engine", "changed", *files.values(), "--since", "0" * 40, "--json").stdout)
    assert [row["name"] for row in everything] == list(files)
    assert "no engine has to be built" in run("engine", "changed", files["same"], "--since", "HEAD").stdout
    assert "no such commit" in run("engine", "changed", files["same"], "--since", "v9", code=2).stderr
    reference = str(PROFILES / "smollm2-135m.yaml")
    assert "no engine" in run("engine", "changed", reference, "--since", "").stdout  # it is built where it is served


def test_a_raised_pipeline_builds_all_engines(tmp_path: Path) -> None:
    """Code that makes other engines has to raise PIPELINE: then all are built; code that changed without it is told."""
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path))
    code, profile = tmp_path / "engines" / "trtllm_lora" / "pipeline" / "steps.py", profile_of(tmp_path / "p.yaml")
    code.parent.mkdir(parents=True)
    code.write_text(f"PIPELINE = {PIPELINE}\n")
    subprocess.run((*git, "init", "-q"), check=True)
    subprocess.run((*git, "add", "."), check=True)
    subprocess.run((*git, "commit", "-q", "-m", "first"), check=True)
    same = run("engine", "changed", profile, "--since", "HEAD")
    assert ("no engine has to be built" in same.stdout, same.stderr) == (True, "")
    code.write_text(f"PIPELINE = {PIPELINE}\nelse_ = 1\n")
    told = run("engine", "changed", profile, "--since", "HEAD")
    assert "no engine has to be built" in told.stdout
    assert "the pipeline's code changed since HEAD, and PIPELINE" in told.stderr
    code.write_text(f"PIPELINE = {PIPELINE - 1}\n")
    subprocess.run((*git, "commit", "-qam", "before it was raised"), check=True)
    code.write_text(f"PIPELINE = {PIPELINE}\n")
    assert run("engine", "changed", profile, "--since", "HEAD").stdout.strip() == str(profile)
