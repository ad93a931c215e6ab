"""The build pipeline: exact commands, content-addressed steps, and nothing half-made whatever goes wrong."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import trtllm_tools
from typer.testing import CliRunner

from lora_slots.base_model.tiny import make_tiny_llama
from lora_slots.cli import application
from reference_engine import open_engine
from trtllm_lora import EngineShape
from trtllm_lora.carry_over import adapters_carry_over
from trtllm_lora.pipeline import BuildError, BuildFailed, Built, Runner, base_problems, plan_tensorrt_llm
from trtllm_lora.pipeline.manifest import MANIFEST_FILE, ManifestError, check_manifest
from trtllm_lora.pipeline.steps import build_flags
from trtllm_lora.profile import EngineProfile, load_profile
from trtllm_lora.verify import Difference, diff_engines, tell, verify_engine

PROFILES = Path(__file__).parents[2] / "engines" / "profiles"


def tiny_profile(file: Path, **changes: Any) -> EngineProfile:
    """A profile of the tiny base, on a GPU; changes are `section__field=value`."""
    data = yaml.safe_load((PROFILES / "smollm2-135m-gpu.yaml").read_text())
    data["name"] = "tiny"
    data["model"] |= {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    data["model"] |= {"head_size": 16, "vocab_size": 256, "max_positions": 2048}
    data["engine"] |= {"max_batch_size": 4, "max_seq_len": 256}
    data["lora"]["max_rank"] = 16
    for place, value in changes.items():
        section, _, field = place.partition("__")
        if field:
            data[section][field] = value
        else:
            data[section] = value
    file.write_text(yaml.safe_dump(data))
    return load_profile(file)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base."""
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", seed=1)


def of_architecture(base: Path, folder: Path, architecture: str) -> Path:
    """A copy of a base that says that it is of another architecture."""
    shutil.copytree(base, folder)
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


def build(
    profile: EngineProfile, base: Path, cache: Path, environment: Mapping[str, str], remote: Any = None
) -> tuple[list[Built], Path]:
    """Build with the stand-ins."""
    plan = plan_tensorrt_llm(profile, cache, base)
    runner = Runner(cache, lambda: 0.0, lambda _: None, environment=environment, remote=remote)
    return runner.run(plan), plan.engine.folder


def test_flags_are_trtllm_builds() -> None:
    """The exact flags of Llama-3.1-8B, the LoRA ones as commands/build.py names them."""
    flags = " ".join(build_flags(load_profile(PROFILES / "llama-3.1-8b.yaml")))
    assert flags == (
        "--max_batch_size 64 --max_input_len 8191 --max_seq_len 8192 --max_num_tokens 8192 --max_beam_width 1 "
        "--kv_cache_type paged --remove_input_padding enable --use_paged_context_fmha enable --gemm_plugin auto "
        "--gpt_attention_plugin auto --lora_plugin bfloat16 --max_lora_rank 64 --workers 1 --lora_target_modules "
        "attn_q attn_k attn_v attn_dense mlp_h_to_4h mlp_4h_to_h mlp_gate"
    )


def test_a_plan_without_a_base_fetches_the_revision(tmp_path: Path) -> None:
    """fetch -> checkpoint -> engine; the model comes at the profile's commit, and ranks are the profile's."""
    profile = load_profile(PROFILES / "llama-3.1-70b-tp4.yaml")
    steps = plan_tensorrt_llm(profile, tmp_path, None, python="python3").steps
    assert [step.name for step in steps] == ["fetch", "checkpoint", "engine"]
    named = ("hf", "download", profile.model.id, "--revision", profile.model.revision, "--local-dir", "{out}")
    assert steps[0].argv == (*named, "--exclude", "original/*", "*.pth", "*.gguf", "consolidated*")
    assert steps[1].argv[:3] == ("python3", "-m", "trtllm_lora.pipeline.checkpoint")
    assert steps[1].argv[4] == str(steps[0].folder)
    assert "--tp 4 --pp 1" in " ".join(steps[1].argv)
    assert steps[2].argv[:3] == ("trtllm-build", "--checkpoint_dir", str(steps[1].folder))


def test_keys_follow_what_a_step_depends_on(tmp_path: Path, base: Path) -> None:
    """Serving changes no key, a rank only the engine's, a dtype both, other weights both."""

    def keys(**changes: Any) -> list[str]:
        profile = tiny_profile(tmp_path / "p.yaml", **changes)
        return [step.key for step in plan_tensorrt_llm(profile, tmp_path / "cache", base).steps]

    first = keys()
    assert keys() == first
    assert keys(serving__slots=3) == first
    assert [a == b for a, b in zip(keys(lora__max_rank=8), first, strict=True)] == [True, False]
    assert not set(keys(engine__dtype="bfloat16")) & set(first)
    other = make_tiny_llama(tmp_path / "other", seed=2)
    profile = tiny_profile(tmp_path / "p.yaml")
    assert not {step.key for step in plan_tensorrt_llm(profile, tmp_path / "cache", other).steps} & set(first)


def test_build_verify_manifest(tmp_path: Path, base: Path) -> None:
    """The engine is what the profile says, has its tokenizer, and a manifest that knows each file's hash."""
    profile = tiny_profile(tmp_path / "p.yaml")
    done, engine = build(profile, base, tmp_path / "cache", trtllm_tools.install(tmp_path))
    assert [(each.step.name, each.how) for each in done] == [("checkpoint", "run"), ("engine", "run")]
    assert verify_engine(engine, profile) == []
    assert (engine / "tokenizer" / "tokenizer.json").is_file()
    manifest = json.loads((engine / MANIFEST_FILE).read_text())
    assert manifest["tensorrt_llm"] == "1.2.1"
    assert {"config.json", "rank0.engine", "tokenizer/tokenizer.json"} <= set(manifest["files"])
    assert check_manifest(engine) == []
    for name in ("rank0.engine", "tokenizer/tokenizer.json"):
        (engine / name).unlink()
        (engine / name).write_bytes(b"engimf")
    (engine / "tokenizer" / "more.json").write_text("{}")
    assert check_manifest(engine) == [
        "rank0.engine differs from the manifest's sha256",
        "tokenizer/tokenizer.json differs from the manifest's sha256",
        "tokenizer/more.json is not in the manifest",
    ]
    (engine / MANIFEST_FILE).chmod(0o644)
    (engine / MANIFEST_FILE).write_text('{"format": 1, "files": ["rank0.engine"], "key": "x", "profile": {}}')
    with pytest.raises(ManifestError, match="is no manifest"):
        check_manifest(engine)
    (engine / MANIFEST_FILE).unlink()
    with pytest.raises(ManifestError, match="not built by"):
        check_manifest(engine)


def test_progress_names_real_folders(tmp_path: Path, base: Path) -> None:
    """What is told of a step can be read and pasted: no stand-in for the folder is in it."""
    profile, cache, said = tiny_profile(tmp_path / "p.yaml"), tmp_path / "cache", list[str]()
    plan = plan_tensorrt_llm(profile, cache, base)
    Runner(cache, lambda: 0.0, said.append, environment=trtllm_tools.install(tmp_path)).run(plan)
    assert not any("{out}" in line for line in said)
    assert f"--output_dir {plan.engine.folder}" in said[2]


def test_unchanged_steps_are_not_run(tmp_path: Path, base: Path) -> None:
    """A second build runs nothing; another rank runs trtllm-build alone, even if the checkpoint is all that is left."""
    environment, cache = trtllm_tools.install(tmp_path), tmp_path / "cache"
    profile = tiny_profile(tmp_path / "p.yaml")
    build(profile, base, cache, environment)
    done, _ = build(profile, base, cache, {**environment, "FAKE_BUILD": "fail"})
    assert [each.how for each in done] == ["cached", "cached"]
    done, engine = build(tiny_profile(tmp_path / "p.yaml", lora__max_rank=8), base, cache, environment)
    assert [each.how for each in done] == ["cached", "run"]
    assert EngineShape.from_engine_config(engine).max_lora_rank == 8


@pytest.mark.parametrize("lost", ["checkpoint", "engine"])
def test_a_result_that_lost_a_file_is_built_again(tmp_path: Path, base: Path, lost: str) -> None:
    """A cache that somebody cleaned gives no half engine: what is not whole any more is replaced."""
    environment, cache = trtllm_tools.install(tmp_path), tmp_path / "cache"
    profile = tiny_profile(tmp_path / "p.yaml")
    _, engine = build(profile, base, cache, environment)
    next(next(cache.glob(f"{lost}-*/")).glob("rank0.*")).unlink()
    if lost == "checkpoint":
        (engine / "rank0.engine").unlink()
    done, engine = build(profile, base, cache, environment)
    assert [each.how for each in done] == (["run", "run"] if lost == "checkpoint" else ["cached", "run"])
    assert check_manifest(engine) == []
    assert verify_engine(engine, profile) == []
    assert sorted(path.name.partition("-")[0] for path in cache.iterdir() if path.is_dir()) == [
        "checkpoint",
        "engine",
        "logs",
    ]


def test_a_memo_that_is_none_is_made_anew(tmp_path: Path, base: Path) -> None:
    """fingerprints.json saves hashing again, and nothing else hangs on it."""
    profile = tiny_profile(tmp_path / "p.yaml")
    first = plan_tensorrt_llm(profile, tmp_path / "cache", base).engine.key
    for text in ("half a li", "[]", '{"x": 1}'):
        (tmp_path / "cache" / "fingerprints.json").write_text(text)
        assert plan_tensorrt_llm(profile, tmp_path / "cache", base).engine.key == first
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["fingerprints.json"]


def test_two_ranks_and_a_quantised_type(tmp_path: Path, base: Path) -> None:
    """tp 2 gives two files of each kind; fp8 goes through calibration and its algorithm is verified."""
    environment = trtllm_tools.install(tmp_path)
    profile = tiny_profile(tmp_path / "p.yaml", engine__tensor_parallel=2, engine__quantization="fp8")
    _, engine = build(profile, base, tmp_path / "cache", environment)
    assert {file.name for file in engine.glob("rank*")} == {"rank0.engine", "rank1.engine"}
    assert EngineShape.from_engine_config(engine).quant_algo == "FP8"


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("fail", "engine: ended with code 1"),
        ("empty", "ended well but wrote nothing"),
        ("wrong", "max_lora_rank: 8, not 16"),
    ],
)
def test_a_failed_step_leaves_no_half_engine(tmp_path: Path, base: Path, mode: str, says: str) -> None:
    """Failing, writing nothing, or building something else: no engine, the checkpoint stays, the log is kept."""
    environment, cache = trtllm_tools.install(tmp_path, FAKE_BUILD=mode), tmp_path / "cache"
    with pytest.raises(BuildFailed, match=says) as caught:
        build(tiny_profile(tmp_path / "p.yaml"), base, cache, environment)
    names = {path.name.partition("-")[0] for path in cache.iterdir()}
    assert names == {"checkpoint", "logs", "fingerprints.json"}
    assert not list(cache.glob("engine*"))
    log = next((cache / "logs").glob("engine-*.log"))
    assert log.read_text().startswith("$ trtllm-build --checkpoint_dir")
    if mode == "fail":
        assert "| [TRT] out of memory" in str(caught.value)
        assert f"whole log: {log}" in str(caught.value)


def test_outside_of_the_image_it_says_so(tmp_path: Path, base: Path) -> None:
    """Without TensorRT-LLM the conversion says where to run, without a traceback."""
    with pytest.raises(BuildFailed, match="run this inside the NGC image") as caught:
        build(tiny_profile(tmp_path / "p.yaml"), base, tmp_path / "cache", dict(os.environ))
    assert "Traceback" not in str(caught.value)


def has_ended(pid: int) -> bool:
    """Whether a process that is not our child ends within ten seconds, or has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, *_ = select.select([handle], [], [], 10)
    os.close(handle)
    return bool(ready)


def test_an_interrupted_build_ends_its_children(tmp_path: Path, base: Path) -> None:
    """SIGTERM during trtllm-build ends its whole process group and removes its folder."""
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    environment = trtllm_tools.install(tmp_path, FAKE_BUILD=f"hang:{fifo}")
    tiny_profile(tmp_path / "p.yaml")
    words = ["engine", "build", str(tmp_path / "p.yaml"), "--base", str(base), "--cache", str(tmp_path / "cache")]
    command = [sys.executable, "-c", "from lora_slots.cli import main; main()", *words]
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(command, env=dict(environment), stderr=subprocess.PIPE, text=True) as process:
        ready, *_ = select.select([reader], [], [], 60)  # until trtllm-build runs
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert ready, told
    grandchild = int(os.read(reader, 32))
    os.close(reader)
    assert process.returncode == 128 + signal.SIGTERM
    assert has_ended(grandchild)
    assert not [path for path in (tmp_path / "cache").iterdir() if "engine" in path.name]


def test_a_base_that_is_not_the_profiles_is_refused(tmp_path: Path, base: Path) -> None:
    """Every size that differs is named, before anything runs."""
    profile = tiny_profile(tmp_path / "p.yaml", model__num_layers=4, model__vocab_size=512)
    problems = base_problems(profile, base)
    assert [problem.partition(": ")[2] for problem in problems] == [
        "num_hidden_layers is 2, the profile says model.num_layers 4",
        "vocab_size is 256, the profile says model.vocab_size 512",
    ]
    with pytest.raises(BuildError, match="vocab_size"):
        plan_tensorrt_llm(profile, tmp_path / "cache", base)
    assert "no such file" in base_problems(profile, tmp_path)[0]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "write"),
    [
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, ['"rope_theta": 5']),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, ['"rope_theta"', '"rope_scaling": {']),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, ['"rope_scaling": {']),
        ({"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["publisher"]),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "rope_scaling": LLAMA3}, []),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, []),
    ],
)
def test_positions_that_the_image_would_not_read_are_refused(
    tmp_path: Path, base: Path, config: dict[str, Any], write: list[str]
) -> None:
    """`rope_parameters` alone, as transformers 5 writes them, would become theta 10000 in the image, silently."""
    other = of_architecture(base, tmp_path / "base", "LlamaForCausalLM")
    told = json.loads((other / "config.json").read_text()) | config
    (other / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    problems = base_problems(tiny_profile(tmp_path / "p.yaml"), other)
    assert len(problems) == bool(write)
    assert all(f"{other}/config.json: has rope_parameters" in problem for problem in problems)
    assert all(word in problem for problem in problems for word in write)
    command = [sys.executable, "-m", "trtllm_lora.pipeline.checkpoint", "--model-dir", str(other), "--output-dir"]
    done = subprocess.run(
        [*command, str(tmp_path / "out"), "--dtype", "float16"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert ("has rope_parameters" in done.stderr) is bool(write)


class Shared:
    """A remote store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.broken = folder, False

    def fetch(self, name: str, into: Path) -> bool:
        """As `RemoteStore.fetch`."""
        import shutil

        if self.broken:
            raise OSError("connection refused")
        if not (self.folder / name).is_dir():
            return False
        shutil.copytree(self.folder / name, into)
        return True

    def keep(self, name: str, folder: Path) -> None:
        """As `RemoteStore.keep`."""
        import shutil

        if self.broken:
            raise OSError("connection refused")
        shutil.copytree(folder, self.folder / name, dirs_exist_ok=True)

    def keep_again(self, name: str, folder: Path) -> None:
        """Replace what is kept."""
        import shutil

        shutil.rmtree(self.folder / name)
        self.keep(name, folder)


def test_a_remote_store_shares_results(tmp_path: Path, base: Path) -> None:
    """A second machine fetches what the first one built; a store that does not answer stops nobody."""
    environment, store = trtllm_tools.install(tmp_path), Shared(tmp_path / "store")
    profile = tiny_profile(tmp_path / "p.yaml")
    build(profile, base, tmp_path / "one", environment, store)
    done, engine = build(profile, base, tmp_path / "two", {"PATH": ""}, store)
    assert [each.how for each in done] == ["fetched", "fetched"]
    assert check_manifest(engine) == []
    kept = next((tmp_path / "store").glob("engine-*"))
    for spoil in ("config.json", "rank0.engine"):
        text = (kept / spoil).read_text()
        (kept / spoil).chmod(0o644)
        (kept / spoil).write_text(text.replace("1.2.1", "1.1.0").replace("engine", "engima"))
        said: list[str] = []
        runner = Runner(tmp_path / spoil, lambda: 0.0, said.append, environment=environment, remote=store)
        done = runner.run(plan_tensorrt_llm(profile, tmp_path / spoil, base))
        assert [each.how for each in done] == ["fetched", "run"], spoil
        assert any("what the remote store has is not used" in line for line in said)
        store.keep_again(kept.name, done[-1].step.folder)
    store.broken = True
    done, _ = build(profile, base, tmp_path / "three", environment, store)
    assert [each.how for each in done] == ["run", "run"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_the_reference_engine_is_built_for_real(tmp_path: Path, base: Path, architecture: str) -> None:
    """The same pipeline builds the reference engine: it opens, fits its profile, and a second build is cached."""
    from lora_slots.reference_build import plan_reference

    base = of_architecture(base, tmp_path / "base", architecture)
    data = yaml.safe_load((PROFILES / "smollm2-135m.yaml").read_text())
    tiny = tiny_profile(tmp_path / "tiny.yaml")
    data["model"] = {**tiny.model.model_dump(exclude_none=True), "architecture": architecture}
    data["engine"] |= {"max_batch_size": 4, "max_seq_len": 256}
    file = tmp_path / "reference.yaml"
    file.write_text(yaml.safe_dump(data))
    profile, cache = load_profile(file), tmp_path / "cache"
    plan = plan_reference(profile, file, cache, base)
    runner = Runner(cache, lambda: 0.0, lambda _: None)
    assert [each.how for each in runner.run(plan)] == ["run"]
    assert open_engine(plan.engine.folder).shape == profile.shape()
    assert verify_engine(plan.engine.folder, profile) == []
    assert check_manifest(plan.engine.folder) == []
    assert [each.how for each in runner.run(plan)] == ["cached"]


def test_verify_names_every_difference(tmp_path: Path, base: Path) -> None:
    """Rank, dtype, modules, version, lora_dir and files are each told, from config.json and names alone."""
    profile = tiny_profile(tmp_path / "p.yaml")
    _, engine = build(profile, base, tmp_path / "cache", trtllm_tools.install(tmp_path))
    file = engine / "config.json"
    config = json.loads(file.read_text())
    config["version"] = "1.1.0"
    config["pretrained_config"]["dtype"] = "bfloat16"
    config["pretrained_config"]["architecture"] = "MistralForCausalLM"
    config["build_config"]["lora_config"] |= {"lora_target_modules": ["attn_q"], "lora_dir": ["lora/0"]}
    config["build_config"]["kv_cache_type"] = "CONTINUOUS"
    config["build_config"]["max_beam_width"] = 4
    config["build_config"]["plugin_config"]["remove_input_padding"] = False
    config["pretrained_config"].setdefault("quantization", {})["kv_cache_quant_algo"] = "FP8"
    file.write_text(json.dumps(config))
    (engine / "rank0.engine").unlink()
    keys = {difference.key for difference in verify_engine(engine, profile)}
    assert keys == {
        "version",
        "pretrained_config.dtype",
        "pretrained_config.architecture",
        "build_config.lora_config.lora_target_modules",
        "build_config.lora_config.lora_dir",
        "build_config.kv_cache_type",
        "build_config.max_beam_width",
        "build_config.plugin_config.remove_input_padding",
        "pretrained_config.quantization.kv_cache_quant_algo",
        "files",
    }


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM"])
def test_the_architecture_is_the_bases(tmp_path: Path, base: Path, architecture: str) -> None:
    """The conversion writes the base's architecture into the engine; an engine of another one is refused, by place."""
    other = of_architecture(base, tmp_path / "base", architecture)
    environment, file = trtllm_tools.install(tmp_path), tmp_path / "p.yaml"
    profile = tiny_profile(file, model__architecture=architecture)
    _, engine = build(profile, other, tmp_path / "cache", environment)
    assert json.loads((engine / "config.json").read_text())["pretrained_config"]["architecture"] == architecture
    assert verify_engine(engine, profile) == []
    found = verify_engine(engine, tiny_profile(file))
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if "architecture:" in text)
    assert tell(found, engine, file) == [
        f"{engine}/config.json:1: pretrained_config.architecture: '{architecture}', not 'LlamaForCausalLM' "
        f"(another base model), {file}:{line} (model.architecture); build the engine anew (`lora-slots engine build "
        f"{file}`), or write there what it is"
    ]


def test_a_difference_has_the_line_of_its_key(tmp_path: Path) -> None:
    """In an engine's config.json as it is written for people, the line is the key's own; else what is there of it."""
    shape = load_profile(PROFILES / "llama-3.1-8b.yaml").shape()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape.to_engine_config(), indent=1))
    keys = ("build_config.plugin_config.dtype", "pretrained_config.dtype", "build_config.no_such", "files")
    told = tell([Difference(key, 1, 2) for key in keys], file, PROFILES / "llama-3.1-8b.yaml")
    lines = [int(line.split(":")[1]) for line in told]
    text = file.read_text().splitlines()
    assert [text[number - 1].split(":")[0].strip() for number in lines] == ['"dtype"', '"dtype"', '"build_config"', "{"]
    assert lines[0] > lines[2] > lines[1]
    assert all("build the engine anew" in line for line in told)


@pytest.mark.parametrize(
    ("version", "same"), [("1.2.10", False), ("1.2.1.post1", True), ("1.2.1+cu13", True), ("1.2", False)]
)
def test_the_version_is_the_whole_one(tmp_path: Path, base: Path, version: str, same: bool) -> None:
    """An engine loads only in the version that built it; what is told apart by a build tag is one version."""
    profile = tiny_profile(tmp_path / "p.yaml")
    _, engine = build(profile, base, tmp_path / "cache", trtllm_tools.install(tmp_path))
    assert profile.engine.tensorrt_llm == "1.2.1"
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**config, "version": version}))
    assert ([each.key for each in verify_engine(engine, profile)] == []) is same


def test_diff_says_what_it_means_for_adapters(tmp_path: Path, base: Path) -> None:
    """Two engines key by key; a lower rank and another dtype mean that adapters do not carry over."""
    environment, cache = trtllm_tools.install(tmp_path), tmp_path / "cache"
    _, first = build(tiny_profile(tmp_path / "p.yaml"), base, cache, environment)
    changes = {"lora__max_rank": 8, "engine__dtype": "bfloat16"}
    _, second = build(tiny_profile(tmp_path / "p.yaml", **changes), base, cache, environment)
    keys = {difference.key for difference in diff_engines(first, second)}
    assert {"pretrained_config.dtype", "build_config.lora_config.max_lora_rank"} <= keys
    assert len(adapters_carry_over(first, second)) == 2
    assert adapters_carry_over(first, first) == []
    assert diff_engines(first, first) == []


def test_verify_takes_the_profile_out_of_the_manifest(tmp_path: Path, base: Path) -> None:
    """Without a profile the manifest's is meant; where there is none it says so; both broken files are told at once."""
    _, engine = build(tiny_profile(tmp_path / "p.yaml"), base, tmp_path / "cache", trtllm_tools.install(tmp_path))

    def verify(*words: str) -> tuple[int, list[str]]:
        done = CliRunner().invoke(application(), ["engine", "verify", *words])
        return done.exit_code, done.output.splitlines()

    assert verify(str(engine)) == (0, [f"{engine} is what {engine / MANIFEST_FILE} says"])
    config = json.loads((engine / "config.json").read_text())
    config["build_config"]["max_batch_size"] = 3
    (engine / "config.json").unlink()
    (engine / "config.json").write_text(json.dumps(config))
    code, (told,) = verify(str(engine))
    line = next(
        i for i, text in enumerate((engine / MANIFEST_FILE).read_text().splitlines(), 1) if "batch_size" in text
    )
    assert code == 2
    assert f"max_batch_size: 3, not 4, {engine / MANIFEST_FILE}:{line} (engine.max_batch_size); build" in told
    (engine / MANIFEST_FILE).unlink()
    assert verify(str(engine)) == (
        2,
        [f"{engine}: no {MANIFEST_FILE} that names a profile: write the profile after the directory"],
    )
    (tmp_path / "bad.yaml").write_text("name: x")
    (engine / "config.json").write_text("{}")
    code, lines = verify(str(engine), str(tmp_path / "bad.yaml"))
    assert code == 2
    assert {line.split(":")[0] for line in lines} == {str(engine / "config.json"), str(tmp_path / "bad.yaml")}
