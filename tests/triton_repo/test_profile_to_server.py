"""From a profile to a server: build, plan, render, serve, and what a client then meets. All by the commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import typer
import yaml
from fakes.bundles import small_bundle
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from adapter_slots.registry import publish
from lora_slots import engine_command, plan_command, repo_command
from lora_slots.base_model.tiny import make_tiny_llama
from lora_slots.stack import StackConfig, TritonServer
from lora_slots.stack.ports import choose_ports
from trtllm_lora import CacheGeometry, EngineShape

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "engines" / "profiles" / "smollm2-135m.yaml"


def run(*words: str, code: int = 0) -> Any:
    """Run a command in this process; it must end with the code."""
    app = typer.Typer()
    for command in (engine_command, repo_command, plan_command):
        command.register(app)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@dataclass(frozen=True)
class Made:
    """A profile of the tiny base, and the engine built from it."""

    profile: Path
    engine: Path
    registry: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Built by `engine build`."""
    folder = tmp_path_factory.mktemp("profile")
    base = make_tiny_llama(folder / "base", seed=11)
    data = yaml.safe_load(PROFILE.read_text())
    data["name"] = "tiny"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    data["model"] |= {**sizes, "head_size": 16, "vocab_size": 256, "max_positions": 2048}
    data["engine"] |= {"max_batch_size": 16, "max_seq_len": 1536}  # long answers: the suite wants requests that last
    data["lora"]["max_rank"] = 16
    data["serving"]["slots"] = 2
    profile, registry = folder / "tiny.yaml", folder / "adapters.yaml"
    profile.write_text(yaml.safe_dump(data))
    registry.write_text("schema: 1\nadapters: {}\n")
    engine = folder / "engine"
    run("engine", "build", str(profile), "--base", str(base), "--cache", str(folder / "cache"), "-o", str(engine))
    return Made(profile, engine, registry)


def test_render_refuses_what_it_would_destroy_and_what_does_not_fit(made: Made, tmp_path: Path) -> None:
    """A folder that is no repository is left alone; an engine that is not the profile's is told key by key."""
    (tmp_path / "mine.txt").write_text("keep")
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine))
    assert "left alone" in run(*words, "-o", str(tmp_path), code=2).stderr
    assert (tmp_path / "mine.txt").read_text() == "keep"
    other = run("repo", "render", str(PROFILE), "--engine", str(made.engine), "-o", str(tmp_path / "models"), code=2)
    assert "pretrained_config.hidden_size: 64, not 576" in other.stderr
    assert not (tmp_path / "models").exists()
    assert "write python or tensorrtllm" in run(*words, "-o", str(tmp_path / "m"), "--backend", "x", code=2).stderr


def test_a_plan_that_overrules_the_profile_says_so(made: Made, tmp_path: Path) -> None:
    """Caches come from the plan; a value of the profile that it replaces is told, and kept if it is set by hand."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    told = run(*words).stderr
    assert re.search(
        r"lora_cache_host_memory_bytes: \d+, as 100x16 in 2 slots needs; the profile's .* 1073741824", told
    )
    kept = run(*words, "--set", "lora_cache_host_memory_bytes=1073741824").stderr
    assert "lora_cache_host_memory_bytes" not in kept
    planned = json.loads(run("plan", str(made.profile), "--json").stdout)["parameters"]
    run(*words)
    text = (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    for key in ("lora_cache_host_memory_bytes", "lora_cache_optimal_adapter_size"):
        assert config.parameters[key].string_value == planned[key]


def test_the_cpp_form_has_its_shares(made: Made, tmp_path: Path) -> None:
    """A profile of the reference engine in the form for GPUs: the plan's shares of the memory are in it, no warning."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    told = run(*words, "--backend", "tensorrtllm").stderr
    assert "cache-fraction" not in told
    text = (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "lora_cache_gpu_memory_fraction" in text


def test_what_cannot_be_meant_is_refused_at_once(made: Made, tmp_path: Path) -> None:
    """A door that is none, a tokenizer that is not there and a placeholder: each is told, and nothing is written."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    told = run(*words, "--grpc", "nonsense", "--tokenizer", "${tok}", "--set", "=1", code=2).stderr.splitlines()
    assert told[0] == "--grpc nonsense: write HOST:PORT, such as 127.0.0.1:8001"
    assert told[1] == "--tokenizer ${tok}: no tokenizer.json there; write a directory that has it"
    assert told[2].startswith("--set =1: write KEY=VALUE")
    for door in ("127.0.0.1:0", "127.0.0.1:70000", ":8001", "a b:1"):
        assert "write HOST:PORT" in run(*words, "--grpc", door, code=2).stderr
    own = ("--set", "foo=bar", "--set", "max_beam_widht=1", "--set", "max_beam_width=${x}")
    told = run(*words, *own, code=2).stderr.splitlines()[-3:]
    assert told[0].startswith("tensorrt_llm has no parameter foo; ")
    assert told[1] == "tensorrt_llm has no parameter max_beam_widht; write max_beam_width"
    assert told[2] == "tensorrt_llm: max_beam_width is '${x}', a placeholder; write its value"
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("gpt_model_type=V1", "does not feed LoRA tensors"),
        ("lora_cache_host_memory_bytes=abc", "is 'abc', which the backend cannot use; write a whole number"),
        ("lora_cache_host_memory_bytes=1000", "the engine would not start"),
        ("decoding_mode=zzz", "'zzz' is none of top_k_top_p"),
        ("kv_cache_free_gpu_mem_fraction=1.5", "write a number above 0 and below 1"),
        ("lora_router.num_slots=abc", "lora_router: num_slots: a number is expected, found 'abc'"),
        ("lora_router.disk_bytes=-4", "lora_router: disk_bytes: at least 1 is expected, found '-4'"),
        ("lora_router.policy=mru", "lora_router: policy: 'mru' is none of"),
        ("lora_router.lora_cache_optimal_adapter_size=16", "the slot manager miscounts"),
    ],
)
def test_values_that_cannot_be_are_refused(made: Made, tmp_path: Path, word: str, says: str) -> None:
    """With 2, in a line, and what stood there before still stands there alone."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    run(*words)
    before = (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert says in run(*words, "--set", word, code=2).stderr
    assert (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_one_command_line_tells_all_that_is_wrong_with_it(made: Made, tmp_path: Path) -> None:
    """Engine, door, tokenizer, form, fleet, parameters and place: a line for each; a broken profile hides no option."""
    (tmp_path / "mine.txt").write_text("keep")
    own = ("foo", "bar=1", "lora_cache_host_memory_bytes=${x}", "decoding_mode=zzz", "lora_router.num_slots=abc")
    options = ("--backend", "foo", "--grpc", "bad", "--tokenizer", "/nope", "--fleet", "3x", "-o", str(tmp_path))
    sets = tuple(word for each in own for word in ("--set", each))
    words = ("--engine", str(made.engine), *options, *sets)
    told = run("repo", "render", str(PROFILE), *words, code=2).stderr.splitlines()
    starts = (
        *("--grpc bad:", "--tokenizer /nope:", "--backend foo:", "--set foo:", "tensorrt_llm has no parameter bar;"),
        *("tensorrt_llm: lora_cache_host_memory_bytes", "tensorrt_llm: decoding_mode", "lora_router: num_slots:"),
        *("'3x' is not", f"{tmp_path}: has mine.txt"),
    )
    told_of_options = [line for line in told if "/config.json:" not in line]
    assert [line.startswith(start) for line, start in zip(told_of_options, starts, strict=True)] == [True] * len(starts)
    assert any("hidden_size: 64, not 576" in line for line in told)
    bad = tmp_path / "x.yaml"
    bad.write_text("name: x")
    told = run("repo", "render", str(bad), *words, code=2).stderr.splitlines()
    assert any(line.startswith(f"{bad}:1: ") for line in told)
    assert sum(line.startswith(start) for line in told for start in starts) == len(starts) - 2  # tokenizer and fleet


def test_a_profile_without_a_gpu_says_where_it_is_wanted(made: Made, tmp_path: Path) -> None:
    """The caches' plan starts from the GPU's memory: file, line, and what to write."""
    file = tmp_path / "mine.yaml"
    data = yaml.safe_load(made.profile.read_text())
    del data["serving"]["gpu_memory"]
    file.write_text(yaml.safe_dump(data))
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if text.startswith("serving:"))
    told = run("repo", "render", str(file), "--engine", str(made.engine), "-o", str(tmp_path / "m"), code=2).stderr
    assert f"{file}:{line}: serving.gpu_memory is missing" in told
    assert "write gpu_memory: 80GiB" in told


def test_the_profiles_tokenizer_is_used(made: Made, tmp_path: Path) -> None:
    """`model.tokenizer` is relative to the profile, and goes before the engine's own; one that is not there is told."""
    file = tmp_path / "mine.yaml"
    data = yaml.safe_load(made.profile.read_text())
    data["model"]["tokenizer"] = "text"
    file.write_text(yaml.safe_dump(data))
    words = ("repo", "render", str(file), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    assert f"{file}: model.tokenizer {tmp_path}/text: no tokenizer.json" in run(*words, code=2).stderr
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tokenizer.json").write_text("{}")
    run(*words)
    assert f'"{tmp_path}/text"' in (tmp_path / "models" / "preprocessing" / "config.pbtxt").read_text()


def test_rendering_again_replaces_in_one_step(made: Made, tmp_path: Path) -> None:
    """A repository that is there is replaced whole; nothing else is left beside it."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    run(*words)
    before = (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").read_text()
    (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").write_text("spoilt")
    run(*words)
    assert (tmp_path / "models" / "tensorrt_llm" / "config.pbtxt").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert json.loads(run("repo", "check", str(tmp_path / "models"), "--json").output) == []


def test_render_prints_json(made: Made, tmp_path: Path) -> None:
    """The repository, and what `repo check` finds in it."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    said = json.loads(run(*words, "--json").stdout)
    assert said == {"path": str(tmp_path / "models"), "findings": []}


@pytest.mark.triton
def test_serve_prints_one_line_of_json_once_it_serves(made: Made, tmp_path: Path) -> None:
    """A program that reads a pipe gets the line while the server runs, can use what it says, and gets nothing more."""
    ports, registry = choose_ports(0, 0, 0), tmp_path / "adapters.yaml"
    publish(registry, small_bundle(tmp_path / "bundles", "mine"))
    words = ["--registry", str(registry), "--grpc", f"127.0.0.1:{ports.grpc}", "-o", f"{tmp_path}/models"]
    run("repo", "render", str(made.profile), "--engine", str(made.engine), *words)
    command = [sys.executable, "-c", "from lora_slots.cli import main; main()", "repo", "serve", f"{tmp_path}/models"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert (said["grpc"], said["adapters"]) == (f"127.0.0.1:{ports.grpc}", ["mine"])
            with triton.InferenceServerClient(said["grpc"]) as client:
                assert client.is_server_ready()
            os.kill(said["pid"], signal.SIGTERM)
            assert process.stdout.read() == ""
            assert process.wait(60) == 143
        finally:
            process.kill()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine of the SmolLM2 profile as it is shipped, out of the pipeline's cache after the first time."""
    engine = tmp_path_factory.mktemp("smollm2") / "engine"
    run("engine", "build", str(PROFILE), "-o", str(engine))
    return engine


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of the rendered repository, served by `repo serve`."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "adapters.yaml").write_text("schema: 1\nadapters: {}\n")
    (folder / "prefetch").mkdir()
    ports = choose_ports(0, 0, 0)
    words = ["--registry", f"{folder}/adapters.yaml", "--grpc", f"127.0.0.1:{ports.grpc}", "-o", f"{folder}/models"]
    # the suite expects the runtime's default here, and every LoRA parameter to be there
    own = (
        "exclude_input_in_output=false",
        "lora_cache_gpu_memory_fraction=0.1",
        f"lora_prefetch_dir={folder}/prefetch",
        # two of the largest adapters fill it: the suite fills it again and again
        f"lora_cache_host_memory_bytes={16 * CacheGeometry.of(EngineShape.from_engine_config(smollm2)).page_bytes}",
        "lora_router.num_slots=2",
    )
    words += [word for each in own for word in ("--set", each)]
    run("repo", "render", str(PROFILE), "--engine", str(smollm2), *words)
    assert json.loads(run("repo", "check", f"{folder}/models", "--json").output) == []
    command = [sys.executable, "-c", "from lora_slots.cli import main; main()", "repo", "serve", f"{folder}/models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(f"ready: grpc 127.0.0.1:{ports.grpc}, ")
            yield f"127.0.0.1:{ports.grpc}"
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130


@pytest.mark.triton
def test_the_smollm2_profile_keeps_the_contract(smollm2: Path, served: str, tmp_path: Path) -> None:
    """Profile, plan, engine, repository, server, all by the commands: the contract suite passes against it."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=120", "-p", "no:cacheprovider", "tests/contract"]
    command += ["--triton", f"grpc://{served}", "--engine", str(smollm2)]
    told = tmp_path / "contract.txt"
    with told.open("w") as out:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, timeout=500, check=False).returncode
        except subprocess.TimeoutExpired:  # a failed check leaves its stream open, and gRPC then does not end
            code = -1
    assert code == 0, told.read_text()[-6000:]
    passed = re.search(r"^(\d+) passed in ", told.read_text(), re.MULTILINE)  # and none skipped
    assert passed, told.read_text()[-600:]
    assert int(passed[1]) > 100


@pytest.mark.triton
def test_serve_needs_to_know_its_own_door(made: Made, tmp_path: Path) -> None:
    """A repository whose router looks for the engine elsewhere is not served here, and the reason says what to do."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    run(*words, "--grpc", "gpu7.example:8001")
    assert "render with --grpc 127.0.0.1:PORT" in run("repo", "serve", str(tmp_path / "models"), code=2).stderr


def test_parameters_by_hand(made: Made, tmp_path: Path) -> None:
    """--set reaches both models, wrong ones are told together, and the router knows which base adapters must have."""
    words = ("repo", "render", str(made.profile), "--engine", str(made.engine), "-o", str(tmp_path / "models"))
    wrong = run(*words, "--set", "a", "--set", "ensemble.x=1", "--set", "=3", code=2).stderr
    assert [line.split(":")[0] for line in wrong.splitlines()] == ["--set a", "--set ensemble.x=1", "--set =3"]
    run(*words, "--registry", "s3://models/adapters.yaml", "--set", "lora_router.idle_s=7", "--set", "max_beam_width=1")
    router, engine = (
        text_format.Parse((tmp_path / "models" / name / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        for name in ("lora_router", "tensorrt_llm")
    )
    values = {key: value.string_value for key, value in router.parameters.items()}
    assert (values["idle_s"], values["registry"]) == ("7", "s3://models/adapters.yaml")
    assert values["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert engine.parameters["max_beam_width"].string_value == "1"
    run(*words, "--set", "lora_router.registry=", "--set", "lora_router.num_slots=")  # as docs/migration.md has it


STUB = '''
import json
import triton_python_backend_utils as pb


class TritonPythonModel:
    """Answers every request with the shapes of its inputs, and the parameters of the model."""

    def initialize(self, args):
        self.parameters = json.loads(args["model_config"])["parameters"]

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            told = {t.name(): list(t.shape()) for t in request.inputs()}
            text = json.dumps([told, {k: v["string_value"] for k, v in self.parameters.items()}])
            import numpy as np
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)[None, None]
            length = np.array([[ids.shape[-1]]], np.int32)
            outputs = [pb.Tensor("output_ids", ids), pb.Tensor("sequence_length", length)]
            sender.send(pb.InferenceResponse(outputs), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
'''


@pytest.mark.triton
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_real_server_takes_the_cpp_form(made: Made, tmp_path: Path, dtype: str) -> None:
    """The C++ form, its backend line swapped for a stub: Triton loads all models and takes every tensor."""
    engine = tmp_path / "engine"
    engine.mkdir()
    config = json.loads((made.engine / "config.json").read_text())
    config["pretrained_config"]["dtype"] = dtype
    config["build_config"]["plugin_config"]["lora_plugin"] = dtype
    (engine / "config.json").write_text(json.dumps(config))
    ports, models = choose_ports(0, 0, 0), tmp_path / "models"
    words = ["--registry", str(made.registry), "--tokenizer", str(made.engine / "base"), "--no-check-engine"]
    words += ["--grpc", f"127.0.0.1:{ports.grpc}", "--backend", "tensorrtllm", "-o", str(models)]
    run("repo", "render", str(made.profile), "--engine", str(engine), *words)
    file = models / "tensorrt_llm" / "config.pbtxt"
    text = file.read_text()
    assert 'backend: "tensorrtllm"' in text
    file.write_text(text.replace('backend: "tensorrtllm"', 'backend: "python"'))
    (models / "tensorrt_llm" / "1" / "model.py").write_text(STUB)
    stack = StackConfig(models, http_port=ports.http, grpc_port=ports.grpc, metrics_port=ports.metrics)
    with TritonServer(stack) as server:
        told, parameters = ask_stub(f"127.0.0.1:{server.ports.grpc}", text)
    parsed = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert set(told) == {tensor.name for tensor in parsed.input}
    assert told["lora_weights"] == [1, 2, 8]
    assert told["lora_config"] == [1, 2, 3]
    assert told["lora_task_id"] == [1]  # reshaped: the wire's [1, 1] without its last dimension
    assert parameters == {key: value.string_value for key, value in parsed.parameters.items()}


def ask_stub(url: str, text: str) -> Any:
    """Send one request with every input there is; what the stub saw."""
    parsed = text_format.Parse(text, model_config_pb2.ModelConfig())
    inputs = []
    for tensor in parsed.input:
        dims = {"lora_weights": [2, 8], "lora_config": [2, 3], "stop_words_list": [2, 3], "bad_words_list": [2, 3]}
        shape = [1, *dims.get(tensor.name, [abs(d) if d > 0 else 4 for d in tensor.dims])]
        wire = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
        each = triton.InferInput(tensor.name, shape, wire)
        if wire == "BF16":
            each.set_data_from_numpy(np.zeros(shape, ml_dtypes.bfloat16))
        elif wire == "BYTES":
            each.set_data_from_numpy(np.full(shape, b"x", np.object_))
        else:
            kinds = {
                "FP16": "f2",
                "FP32": "f4",
                "INT32": "i4",
                "INT64": "i8",
                "UINT64": "u8",
                "UINT8": "u1",
                "BOOL": "?",
            }
            each.set_data_from_numpy(np.zeros(shape, kinds[wire]))
        inputs.append(each)
    answers: list[Any] = []
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer("tensorrt_llm", inputs)
        client.stop_stream()
    result, error = answers[0]
    assert error is None, error.message()
    return json.loads(bytes(result.as_numpy("output_ids").ravel().astype(np.uint8)))
