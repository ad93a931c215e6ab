"""`repo check` finds what upstream's templates and their users get wrong, in anybody's repository; `repo render`."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from numpy.lib.format import open_memmap
from tritonclient.grpc import model_config_pb2

from lora_slots import repo_command
from lora_slots.errors import UsageError
from lora_slots.refusals import Refused
from lora_slots.repo_check import check_repository
from lora_slots.repo_files import Finding
from lora_slots.repo_rules import RULES
from lora_slots.repository import RepositoryConfig, render
from trtllm_lora import EngineShape

Change = Callable[[Path], object]
ROOT = Path(__file__).parents[2]
TENSORRT_LLM = "tensorrt_llm/config.pbtxt"
# every tensor of NVIDIA's tensorrt_llm template of the 1.2 line (triton-contract 1.2 and 1.3)
STOCK_INPUTS = set(
    re.findall(
        r"\w+",
        """
input_ids encoder_input_features encoder_output_lengths input_lengths request_output_len num_return_sequences
draft_input_ids decoder_input_ids decoder_input_lengths draft_logits draft_acceptance_threshold end_id pad_id
beam_width stop_words_list bad_words_list embedding_bias runtime_top_k runtime_top_p_reset_ids min_tokens
temperature runtime_top_p runtime_top_p_min runtime_top_p_decay len_penalty repetition_penalty
beam_search_diversity_rate presence_penalty frequency_penalty early_stopping seed return_log_probs
return_context_logits return_generation_logits return_perf_metrics return_num_input_tokens
return_num_output_tokens exclude_input_in_output stop streaming prompt_embedding_table prompt_table_extra_ids
prompt_vocab_size cross_attention_mask mrope_rotary_cos_sin mrope_position_deltas lora_task_id lora_weights
lora_config context_phase_params skip_cross_attn_blocks retention_token_range_starts
retention_token_range_ends retention_token_range_priorities retention_token_range_durations_ms
retention_decode_priority retention_decode_duration_ms guided_decoding_guide_type guided_decoding_guide
lookahead_window_size lookahead_ngram_size lookahead_verification_set_size
        """,
    )
)
STOCK_OUTPUTS = set(
    re.findall(
        r"\w+",
        """
output_ids sequence_length cum_log_probs output_log_probs context_logits generation_logits batch_index
sequence_index context_phase_params kv_cache_alloc_new_blocks kv_cache_reused_blocks
kv_cache_alloc_total_blocks arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns
acceptance_rate total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens
        """,
    )
)


def make_engine(folder: Path, dtype: str = "bfloat16", **changes: Any) -> Path:
    """An engine directory's config.json, which is all that rendering and checking read."""
    base = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = EngineShape.from_hf_config(base, dtype=dtype).to_engine_config() | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_repository(tmp_path: Path, dtype: str = "bfloat16", **more: Any) -> Path:
    """A good repository in C++ backend form."""
    cache = {
        "lora_cache_host_memory_bytes": "10000000",
        "lora_cache_gpu_memory_fraction": "0.1",
        "lora_cache_max_adapter_size": "64",
    }
    engine = more.pop("engine", {}) | cache
    config = RepositoryConfig(
        make_engine(tmp_path / "engine", dtype),
        tmp_path / "tokenizer",
        tmp_path / "adapters.yaml",
        "127.0.0.1:8001",
        engine=engine,
        **{"backend": "tensorrtllm", **more},
    )
    return render(config, tmp_path / "models")


def edit(file: str, old: str, new: str) -> Change:
    """A change of text in a file of the repository; the text must be there."""

    def change(root: Path) -> None:
        text = (root / file).read_text()
        assert old in text
        (root / file).write_text(text.replace(old, new))

    return change


def configure(model: str, change: Callable[[Any], object]) -> Change:
    """A change of a model's parsed configuration."""

    def apply(root: Path) -> None:
        file = root / model / "config.pbtxt"
        config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
        change(config)
        file.write_text(text_format.MessageToString(config))

    return apply


def parameter(model: str, key: str, value: str) -> Change:
    """A parameter set."""

    def change(config: Any) -> None:
        config.parameters[key].string_value = value

    return configure(model, change)


def tensor(name: str, **fields: Any) -> Change:
    """Fields of an input of tensorrt_llm set."""

    def change(config: Any) -> None:
        found = next(each for each in config.input if each.name == name)
        for key, value in fields.items():
            if key == "dims":
                found.dims[:] = value
            elif key == "reshape":
                found.ClearField("reshape")
            else:
                setattr(found, key, value)

    return configure("tensorrt_llm", change)


def remove_input(name: str) -> Change:
    """An input of tensorrt_llm gone, and the maps that name it."""

    def change(config: Any) -> None:
        kept = [each for each in config.input if each.name != name]
        del config.input[:]
        config.input.extend(kept)

    return configure("tensorrt_llm", change)


def remove_output(name: str) -> Change:
    """An output of tensorrt_llm gone."""

    def change(config: Any) -> None:
        at = [tensor.name for tensor in config.output].index(name)
        del config.output[at]

    return configure("tensorrt_llm", change)


def engine_within(root: Path) -> None:
    """The engine in the model's version folder, as NVIDIA's guides once had it, and a path of another machine."""
    shutil.move(root.parent / "engine" / "config.json", root / "tensorrt_llm" / "1" / "config.json")
    parameter("tensorrt_llm", "gpt_model_path", "/models/tensorrt_llm/1")(root)


def unmap(step: str, name: str) -> Change:
    """An input of an ensemble's step unmapped."""

    def change(config: Any) -> None:
        for each in config.ensemble_scheduling.step:
            if each.model_name == step:
                del each.input_map[name]

    return configure("ensemble", change)


def map_to(step: str, name: str, source: str) -> Change:
    """An input of an ensemble's step mapped."""

    def change(config: Any) -> None:
        for each in config.ensemble_scheduling.step:
            if each.model_name == step:
                each.input_map[name] = source

    return configure("ensemble", change)


def take_from(step: str, name: str, target: str) -> Change:
    """An output of an ensemble's step mapped."""

    def change(config: Any) -> None:
        for each in config.ensemble_scheduling.step:
            if each.model_name == step:
                each.output_map[name] = target

    return configure("ensemble", change)


def warm_up_with_zeros(config: Any) -> None:
    """A warm-up request whose task id is zero."""
    warmup = config.model_warmup.add(name="zeros", batch_size=1)
    warmup.inputs["lora_task_id"].data_type = model_config_pb2.TYPE_UINT64
    warmup.inputs["lora_task_id"].dims.append(1)
    warmup.inputs["lora_task_id"].zero_data = True


def warm_up_with_file(content: bytes | None) -> Change:
    """A warm-up request whose task id is in a file, which is not there if it has no content."""

    def declare(config: Any) -> None:
        warm_up_with_zeros(config)
        config.model_warmup[0].inputs["lora_task_id"].input_data_file = "id"

    def change(root: Path) -> None:
        configure("tensorrt_llm", declare)(root)
        if content is not None:
            (root / "tensorrt_llm" / "warmup").mkdir()
            (root / "tensorrt_llm" / "warmup" / "id").write_bytes(content)

    return change


def remove(model: str) -> Change:
    """A model gone."""
    return lambda root: shutil.rmtree(root / model)


def no_parameter(model: str, key: str) -> Change:
    """A parameter gone."""

    def change(config: Any) -> None:
        del config.parameters[key]

    return configure(model, change)


def errors(findings: list[Finding]) -> list[Finding]:
    """Without warnings."""
    return [finding for finding in findings if not finding.warning]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("backend", ["python", "tensorrtllm"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_rendered_passes(tmp_path: Path, dtype: str, backend: str, dora: bool) -> None:
    """Both forms, three dtypes, both widths of lora_config: nothing is found in a repository of ours."""
    root = make_repository(tmp_path, dtype, backend=backend, dora=dora)
    assert check_repository(root) == []
    wanted = model_config_pb2.DataType.Value(
        {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}[dtype]
    )
    for file in root.glob("*/config.pbtxt"):
        config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
        for each in (*config.input, *config.output):
            assert each.name != "lora_config" or list(each.dims) == [-1, 4 if dora else 3]
            assert each.name != "lora_weights" or each.data_type == wanted


def test_no_tensor_of_the_stock_templates_is_missing(tmp_path: Path) -> None:
    """The C++ form has every input and output of NVIDIA's template, and its header."""
    file = make_repository(tmp_path) / TENSORRT_LLM
    config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    assert {each.name for each in config.input} == STOCK_INPUTS
    assert {each.name for each in config.output} == STOCK_OUTPUTS
    assert config.backend == "tensorrtllm"
    assert list(config.dynamic_batching.preferred_batch_size) == [config.max_batch_size]
    assert config.model_transaction_policy.decoupled
    assert "num_threads" not in config.parameters
    assert config.parameters["executor_worker_path"].string_value.startswith("/opt/tritonserver/")
    assert not (file.parent / "1" / "model.py").exists()
    assert (file.parent / "1").is_dir()


def adapter(folder: Path, columns: int = 3, dtype: str = "<f2", ids: Any = np.int32) -> None:
    """The two arrays of an adapter."""
    folder.mkdir(parents=True)
    np.save(folder / "model.lora_config.npy", np.zeros((1, 2, columns), ids))
    np.save(folder / "model.lora_weights.npy", np.zeros((1, 2, 8), dtype))


def bundle(name: str = "abc", *, spoil: str = "", **more: Any) -> Change:
    """An adapter in the bundles beside the registry, which the slot manager will send; `spoil` names a broken array."""

    def change(root: Path) -> None:
        folder = root.parent / "bundles" / name
        adapter(folder, **more)
        if spoil:
            (folder / spoil).write_bytes(b"no array")

    return change


def prefetch(name: str = "7", *, files: bool = True, spoil: str = "", **more: Any) -> Change:
    """A prefetch directory with one folder; `spoil` names an array that is written over."""

    def change(root: Path) -> None:
        folder = root.parent / "prefetch" / name
        if files:
            adapter(folder, **more)
        else:
            folder.mkdir(parents=True)
        if spoil:
            (folder / spoil).write_bytes(b"no array")
        parameter("tensorrt_llm", "lora_prefetch_dir", str(folder.parent))(root)

    return change


def both(*changes: Change) -> Change:
    """Changes one after the other."""

    def change(root: Path) -> None:
        for each in changes:
            each(root)

    return change


def engine(**changes: Any) -> Change:
    """Another engine: changes are `section__key=value` of its config.json, or a key of its own."""

    def change(root: Path) -> None:
        file = root.parent / "engine" / "config.json"
        config = json.loads(file.read_text())
        for place, value in changes.items():
            *way, last = place.split("__")
            section = config
            for step in way:
                section = section[step]
            section[last] = value
        file.write_text(json.dumps(config))

    return change


def without_router(root: Path) -> None:
    """The line of three, as NVIDIA ships it."""
    shutil.rmtree(root / "lora_router")
    (root / "ensemble" / "config.pbtxt").unlink()


def large_bundle(root: Path) -> None:
    """A bundle whose weights are just too large for a message; the file is a hole."""
    without_router(root)
    folder = root.parent / "given" / "abc"
    adapter(folder, dtype="V2")
    make: Any = open_memmap  # numpy 1.26 has no types for it
    make(folder / "model.lora_weights.npy", mode="w+", dtype="V2", shape=(1, 1, 2**30))


def bls(root: Path) -> None:
    """NVIDIA's other way to the engine, a model that copies tensors through numpy."""
    folder = root / "tensorrt_llm_bls"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("x = tensor.as_numpy()\n")
    text = (root / TENSORRT_LLM).read_text().replace('"tensorrt_llm"', '"tensorrt_llm_bls"')
    (folder / "config.pbtxt").write_text(text.replace("tensorrtllm", "python"))


def nvidias_python_model(root: Path) -> None:
    """tensorrt_llm in NVIDIA's python form, which reads the prefetch directory's name as a number."""
    prefetch()(root)
    edit(TENSORRT_LLM, 'backend: "tensorrtllm"', 'backend: "python"')(root)
    (root / "tensorrt_llm" / "1" / "model.py").write_text('int(parameters["lora_prefetch_dir"])\n')


def count_of(model: str, count: int) -> Change:
    """Instances of a model."""
    return configure(model, lambda config: setattr(config.instance_group[0], "count", count))


@dataclass(frozen=True)
class Case:
    """A mistake, and what must be said of it."""

    rule: str
    change: Change
    says: str
    fix: str
    model: str = "tensorrt_llm"
    """Whose config.pbtxt is named; "" for the repository."""
    dtype: str = "bfloat16"
    warning: bool = False


def wrong(rule: str, change: Change, says: str, fix: str, model: str = "tensorrt_llm", **more: Any) -> Case:
    """A case on one line."""
    return Case(rule, change, says, fix, model, **more)


CASES = [
    wrong("not-a-config", edit(TENSORRT_LLM, "input {", "inputs {"), "not a model configuration", "correct it"),
    wrong("placeholder", edit(TENSORRT_LLM, "max_batch_size: 64", "max_batch_size: ${x}"), "cannot parse", "with 1"),
    wrong(
        "placeholder",
        edit(TENSORRT_LLM, "decoupled: true", "decoupled: ${decoupled_mode}"),
        "${decoupled_mode}",
        "true",
    ),
    wrong(
        "placeholder", edit(TENSORRT_LLM, "TYPE_BF16", "${lora_datatype}"), "${lora_datatype}", "write TYPE_BF16, the"
    ),
    wrong(
        "placeholder", edit(TENSORRT_LLM, '"tensorrtllm"', '"${triton_backend}"'), "backend ${triton_b", "tensorrtllm"
    ),
    wrong(
        "placeholder-text", parameter("tensorrt_llm", "gpt_model_path", "${engine_dir}"), "the text ${engine", "fill it"
    ),
    wrong(
        "placeholder-text",
        parameter("tensorrt_llm", "lora_prefetch_dir", "${x}"),
        "is the text ${x}",
        "leave the parameter",
    ),
    wrong(
        "placeholder-default",
        parameter("tensorrt_llm", "enable_kv_cache_reuse", "${y}"),
        "defaults are in force, with warnings in the log: enable_kv_cache_reuse",
        "leave these",
        warning=True,
    ),
    wrong(
        "model-name",
        configure("tensorrt_llm", lambda c: setattr(c, "name", "llm")),
        "is named llm",
        "write tensorrt_llm",
    ),
    wrong(
        "not-a-config",
        both(lambda root: (root / TENSORRT_LLM).unlink(), lambda root: (root / TENSORRT_LLM).mkdir()),
        "cannot be read: Is a directory",
        "make it a file",
    ),
    wrong("backend", edit(TENSORRT_LLM, '"tensorrtllm"', '"tensortllm"'), "no backend tensortllm", "write tensorrtllm"),
    wrong("backend", edit(TENSORRT_LLM, '"tensorrtllm"', '"onnxruntime"'), "no backend onnx", "write tensorrtllm"),
    wrong("backend", edit(TENSORRT_LLM, '"tensorrtllm"', '""'), "has no backend", 'backend: "tensorrtllm"'),
    wrong(
        "backend",
        configure("preprocessing", lambda c: setattr(c, "backend", "pyton")),
        "no backend pyton",
        "write python",
        "preprocessing",
    ),
    wrong("parameter-missing", no_parameter("tensorrt_llm", "gpt_model_path"), "gpt_model_path is missing", "add the"),
    *(
        wrong("parameter-missing", no_parameter(model, key), f"{key} is missing, without which", "add the", model)
        for model, key in (
            ("preprocessing", "tokenizer_dir"),
            ("postprocessing", "tokenizer_dir"),
            ("lora_router", "registry"),
            ("lora_router", "engine_dir"),
            ("lora_router", "engine_url"),
        )
    ),
    wrong("no-ensemble", remove("ensemble"), "no ensemble", "render one", ""),
    wrong(
        "no-ensemble",
        both(*(remove(name) for name in ("ensemble", "preprocessing", "postprocessing"))),
        "can only send token ids",
        "render one",
        "",
        warning=True,
    ),
    wrong("tensor-optional", tensor("lora_weights", optional=False), "lora_weights is not optional", "optional: true"),
    wrong("tensor-optional", tensor("lora_task_id", optional=False), "lora_task_id is not", "optional: true"),
    wrong("bundle-config", bundle(ids=np.int64, dtype="V2"), "abc: lora_config is int64 [1, 2, 3]", "has to be int32"),
    wrong("bundle-array", bundle(dtype="V2", spoil="model.lora_weights.npy"), "abc: model.lora_weights.npy", "again"),
    wrong("bundle-array", bundle(dtype="V2", spoil="model.lora_config.npy"), "abc: model.lora_config.npy", "again"),
    wrong("zero-task-id", warm_up_with_file(bytes(8)), "lora_task_id 0", "input_data_file"),
    wrong("warmup-file", warm_up_with_file(None), "has no file", "8 bytes"),
    wrong("batching-type", parameter("tensorrt_llm", "gpt_model_type", "junk"), "'junk' is none of", "inflight_fused"),
    wrong(
        "no-batch",
        edit(TENSORRT_LLM, "max_batch_size: 64", "max_batch_size: 0"),
        "max_batch_size 0",
        "write 64, as the",
    ),
    wrong(
        "placeholder-default",
        parameter("tensorrt_llm", "kv_cache_free_gpu_mem_fraction", "${kv}"),
        "kv_cache_free_gpu_mem_fraction is not filled, so its default 0.9",
        "fill it; `lora-slots plan` says with what",
        warning=True,
    ),
    wrong("no-version", lambda root: (root / "tensorrt_llm" / "1").rmdir(), "no version folder", "make a folder 1"),
    wrong(
        "no-model-py",
        lambda root: (root / "lora_router" / "1" / "model.py").unlink(),
        "no model.py",
        "put one",
        "lora_router",
    ),
    wrong(
        "no-tensorrt-llm",
        lambda root: (root / "tensorrt_llm").rename(root / "llm"),
        "no model tensorrt_llm",
        "render one",
        "",
    ),
    wrong("renamed-tensor", edit(TENSORRT_LLM, '"min_tokens"', '"min_length"'), "was renamed", "write min_tokens"),
    wrong("tensor-missing", remove_input("lora_task_id"), "requests are refused", "add lora_task_id TYPE_UINT64"),
    wrong(
        "tensor-missing", remove_input("lora_weights"), "requests are refused", "add lora_weights TYPE_BF16 [-1, -1]"
    ),
    wrong("tensor-missing", remove_input("input_ids"), "no request is answered", "add input_ids TYPE_INT32 [-1]"),
    wrong("tensor-missing", remove_output("sequence_length"), "output sequence_length is missing", "TYPE_INT32 [-1]"),
    wrong("tensor-missing", remove_input("seed"), "input seed is missing", "add seed TYPE_UINT64 [1]", warning=True),
    wrong(
        "tensor-type",
        tensor("lora_task_id", data_type=model_config_pb2.TYPE_INT32),
        "is TYPE_INT32",
        "write TYPE_UINT64",
    ),
    wrong("tensor-dims", tensor("lora_config", dims=[3]), "has dims [3]", "write [-1, 3]"),
    wrong("task-id-reshape", tensor("lora_task_id", reshape=None), "no reshape", "add reshape"),
    wrong("lora-pair", remove_input("lora_weights"), "lora_config without lora_weights", "add lora_weights"),
    wrong("lora-type", tensor("lora_weights", data_type=model_config_pb2.TYPE_FP16), "dtype is bfloat16", "TYPE_BF16"),
    wrong("lora-numpy", bls, "cannot pass this model.py", "send them to tensorrt_llm", "tensorrt_llm_bls"),
    wrong("lora-columns", tensor("lora_config", dims=[-1, 4]), "4 columns here", "the same in every model"),
    wrong("bundle-columns", bundle(columns=4, dtype="V2"), "abc has 4 columns (DoRA", "write [-1, 4] in every model"),
    wrong("bundle-columns", bundle(columns=4, dtype="V2"), "abc has 4 columns", "write [-1, 4]", "lora_router"),
    wrong("bundle-columns", bundle(columns=4, dtype="V2"), "abc has 4 columns", "write [-1, 4]", "ensemble"),
    wrong(
        "bundle-type",
        bundle(dtype="<f2"),
        "abc: weights are float16, the engine's dtype is bfloat16",
        "--dtype bfloat16",
    ),
    wrong("bundle-size", large_bundle, "abc: weights of 2.0 GiB", "shared memory"),
    wrong("zero-task-id", configure("tensorrt_llm", warm_up_with_zeros), "lora_task_id 0", "input_data_file"),
    wrong("prefetch-bfloat16", prefetch(dtype="V2"), "on a bfloat16 engine", "leave it out"),
    wrong("prefetch-python", nvidias_python_model, "as a number", "use backend tensorrtllm", dtype="float16"),
    wrong(
        "prefetch-missing", parameter("tensorrt_llm", "lora_prefetch_dir", "/no/where"), "does not exist", "correct it"
    ),
    wrong("prefetch-name", prefetch("abc"), "lora_prefetch_dir/abc: is not a task id", "from 1 to", dtype="float16"),
    wrong("prefetch-name", prefetch("٣"), "is not a task id", "from 1 to", dtype="float16"),
    wrong("prefetch-zero", prefetch("0"), "task id 0", "from 1 to", dtype="float16"),
    wrong("prefetch-overflow", prefetch("3000000000"), "int32", "at most 2147483647", dtype="float16"),
    wrong("prefetch-files", prefetch(files=False), "no model.lora_weights.npy", "convert", dtype="float16"),
    wrong(
        "prefetch-array",
        prefetch(spoil="model.lora_weights.npy"),
        "model.lora_weights.npy is not",
        "again",
        dtype="float16",
    ),
    wrong(
        "prefetch-array",
        prefetch(spoil="model.lora_config.npy"),
        "model.lora_config.npy is not",
        "again",
        dtype="float16",
    ),
    wrong("prefetch-type", prefetch(dtype="<f4"), "B#791", "--dtype float16", dtype="float16"),
    wrong(
        "engine-unread",
        lambda root: shutil.rmtree(root.parent / "engine"),
        "cannot be read from here",
        "--engine DIR",
        warning=True,
    ),
    wrong("engine-version", engine(version="1.3.0"), "built by TensorRT-LLM 1.3.0", "write 1.2.1"),
    wrong("engine-no-lora", engine(build_config__plugin_config__lora_plugin=None), "without LoRA", "--lora_plugin"),
    wrong(
        "engine-plugin",
        engine(build_config__plugin_config__lora_plugin="float16"),
        "lora_plugin is float16, its dtype bfloat16: adapters in the engine's dtype, which",
        "build it with --lora_plugin bfloat16",
    ),
    wrong(
        "engine-plugin",
        both(
            engine_within, edit("tensorrt_llm/1/config.json", '"lora_plugin": "bfloat16"', '"lora_plugin": "float32"')
        ),
        "lora_plugin is float32",
        "--lora_plugin bfloat16",
    ),
    wrong(
        "engine-quantisation",
        engine(pretrained_config__quantization__quant_algo="W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"),
        "runs no LoRA",
        "build it with fp8",
    ),
    wrong("engine-dense", engine(pretrained_config__head_size=32), "is 4 x 32 and not", "without attn_dense"),
    wrong(
        "batch-size",
        engine(build_config__max_batch_size=8),
        "max_batch_size 64, the engine was built for 8",
        "write 8",
        warning=True,
    ),
    wrong(
        "cache-fraction",
        parameter("tensorrt_llm", "lora_cache_gpu_memory_fraction", ""),
        "0.02",
        "set it",
        warning=True,
    ),
    wrong(
        "cache-number", parameter("tensorrt_llm", "lora_cache_max_adapter_size", "many"), "no number", "whole number"
    ),
    wrong(
        "cache-number",
        parameter("tensorrt_llm", "lora_cache_max_adapter_size", "9" * 5000),
        "no number",
        "whole number",
    ),
    wrong("cache-number", parameter("tensorrt_llm", "kv_cache_free_gpu_mem_fraction", "lots"), "no share", "below 1"),
    wrong("cache-number", parameter("tensorrt_llm", "lora_cache_gpu_memory_fraction", "2"), "no share", "below 1"),
    wrong("cache-number", parameter("tensorrt_llm", "lora_cache_gpu_memory_fraction", "nan"), "no share", "below 1"),
    wrong(
        "cache-rank", parameter("tensorrt_llm", "lora_cache_max_adapter_size", "8"), "below the engine's", "write 64"
    ),
    wrong(
        "cache-memory",
        parameter("tensorrt_llm", "lora_cache_host_memory_bytes", "1000"),
        "Not enough space",
        "raise it",
    ),
    wrong(
        "cache-mirror",
        parameter("lora_router", "lora_cache_host_memory_bytes", "5"),
        "miscounts",
        "in both",
        "lora_router",
    ),
    wrong("batching-v1", parameter("tensorrt_llm", "gpt_model_type", "V1"), "does not feed LoRA", "inflight_fused"),
    wrong(
        "not-decoupled",
        edit(TENSORRT_LLM, "decoupled: true", "decoupled: false"),
        "streaming is refused",
        "true",
        warning=True,
    ),
    wrong("parameter-value", parameter("tensorrt_llm", "decoding_mode", "topk"), "'topk' is none of", "write top_k"),
    wrong("parameter-value", parameter("tensorrt_llm", "enable_kv_cache_reuse", "on"), "is 'on'", "true or false"),
    wrong("parameter-value", parameter("tensorrt_llm", "max_beam_width", "0"), "is '0'", "at least 1"),
    wrong("instances", count_of("tensorrt_llm", 2), "2 instances", "count: 1"),
    wrong("router-instances", count_of("lora_router", 2), "two slot managers", "count: 1", "lora_router"),
    wrong(
        "step-decoupled",
        configure("lora_router", lambda c: setattr(c.model_transaction_policy, "decoupled", True)),
        "tensorrt_llm takes inputs of the decoupled lora_router and others",
        "do without decoupled",
        "ensemble",
    ),
    wrong(
        "step-model",
        edit("ensemble/config.pbtxt", 'model_name: "postprocessing"', 'model_name: "post"'),
        "step post is no",
        "add the folder post",
        "ensemble",
    ),
    wrong("step-input", map_to("tensorrt_llm", "no_such", "text_input"), "has no input no_such", "correct", "ensemble"),
    wrong("step-source", map_to("tensorrt_llm", "seed", "nobody"), "given by no earlier step", "correct", "ensemble"),
    wrong(
        "step-types", map_to("tensorrt_llm", "seed", "temperature"), "different types", "make both the same", "ensemble"
    ),
    wrong("step-unfed", unmap("preprocessing", "QUERY"), "needs QUERY", "add it", "ensemble"),
    wrong(
        "step-output", take_from("postprocessing", "NOTHING", "more"), "has no output NOTHING", "output_map", "ensemble"
    ),
    wrong(
        "lora-without-id",
        both(map_to("tensorrt_llm", "lora_weights", "lora_weights"), unmap("tensorrt_llm", "lora_task_id")),
        "are ignored",
        "map lora_task_id",
        "ensemble",
    ),
    wrong(
        "lora-id-lost",
        unmap("tensorrt_llm", "lora_task_id"),
        "every adapter is answered by the base",
        "map lora_task_id",
        "ensemble",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_what_is_wrong_is_found(tmp_path: Path, case: Case) -> None:
    """Each mistake is told by its rule, with the file it is in, a line, what it does and the remedy."""
    root = make_repository(tmp_path, case.dtype)
    assert check_repository(root) == []
    case.change(root)
    given = tmp_path / "given"
    found = check_repository(root, bundles=given if given.is_dir() else None)
    place = root / case.model / "config.pbtxt" if case.model else root
    hits = [each for each in found if (each.rule, each.file) == (case.rule, str(place))]
    assert any(case.says in hit.what and case.fix in hit.fix and hit.warning == case.warning for hit in hits), found
    assert all(1 <= hit.line <= (len(place.read_text().splitlines()) if place.is_file() else 1) for hit in hits)


def test_every_documented_rule_is_tried() -> None:
    """The table in docs/engines.md has the rules of the code, and each of them has its wrong input above."""
    page = (ROOT / "docs" / "engines.md").read_text()
    table = page.partition("<!-- generated: repo rules -->")[2].partition("<!-- end: repo rules -->")[0]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE) == list(RULES)
    assert {case.rule for case in CASES} == set(RULES)
    assert set(rules_in_code()) == set(RULES)


def rules_in_code() -> Iterator[str]:
    """Rules that findings are made with: `Finding`'s third argument, `finding`'s first, and what it is handed."""
    for file in (ROOT / "clients" / "lora_slots").glob("repo_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            arguments: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                arguments = {"Finding": node.args[2:3], "finding": node.args[:1]}.get(node.func.id, [])
            elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3:
                arguments = node.value.elts[:1]
            for argument in arguments:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value)


def test_what_is_meant_is_let_pass(tmp_path: Path) -> None:
    """A backend of one's own beside ours, a warm-up for a real id, and a share told once and not two ways."""
    root = make_repository(tmp_path)
    warm_up_with_file((7).to_bytes(8, "little"))(root)
    shutil.copytree(root / "preprocessing", root / "mine")
    edit("mine/config.pbtxt", '"preprocessing"', '"mine"')(root)
    edit("mine/config.pbtxt", '"python"', '"our_own"')(root)
    assert check_repository(root) == []
    parameter("tensorrt_llm", "kv_cache_free_gpu_mem_fraction", "${kv}")(root)
    assert [each.fix for each in check_repository(root)] == ["fill it; `lora-slots plan` says with what"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data_type: TYPE_BF16", "data_type: ${lora_type}"),
        ("data_type: TYPE_INT32\n  dims: -1", "data_type: ${int_type}\n  dims: -1"),
        ("data_type: TYPE_BF16\n  dims: -1\n  dims: -1", "data_type: TYPE_BF16\n  dims: [ -1, ${width} ]"),
    ],
)
def test_a_placeholder_is_told_once(tmp_path: Path, old: str, new: str) -> None:
    """And no rule complains of the value that stands in for it while the rest is looked at."""
    root = make_repository(tmp_path)
    edit(TENSORRT_LLM, old, new)(root)
    assert {each.rule for each in check_repository(root)} == {"placeholder"}


def test_an_engine_that_is_not_known_gives_no_type(tmp_path: Path) -> None:
    """Where the engine cannot be read, adapters' type is the engine's, whatever it is: no FP16 is advised."""
    root = make_repository(tmp_path)
    shutil.rmtree(root.parent / "engine")
    remove_input("lora_weights")(root)
    fixes = [each.fix for each in check_repository(root) if "lora_weights is missing" in each.what]
    assert fixes == ["add lora_weights of the engine's dtype (TYPE_FP16, TYPE_BF16 or TYPE_FP32) [-1, -1]"]


def test_without_streams_where_something_streams(tmp_path: Path) -> None:
    """tensorrt_llm not decoupled is an error beside a decoupled model, which was put there for streams."""
    root = make_repository(tmp_path)
    bls(root)
    edit(TENSORRT_LLM, "decoupled: true", "decoupled: false")(root)
    (found,) = (each for each in check_repository(root) if each.rule == "not-decoupled")
    assert not found.warning
    assert "tensorrt_llm_bls streams" in found.what


def test_the_line_is_the_tensors(tmp_path: Path) -> None:
    """A finding about lora_weights points at the line that declares it."""
    root = make_repository(tmp_path)
    tensor("lora_weights", data_type=model_config_pb2.TYPE_FP16)(root)
    finding = next(each for each in check_repository(root) if each.file == str(root / TENSORRT_LLM))
    assert 'name: "lora_weights"' in (root / TENSORRT_LLM).read_text().splitlines()[finding.line - 1]
    assert str(finding).startswith(f"{root / TENSORRT_LLM}:{finding.line}: lora_weights is TYPE_FP16")


def test_every_problem_at_once(tmp_path: Path) -> None:
    """A file that does not parse is still looked through for all the rest."""
    root = make_repository(tmp_path)
    for change in (
        edit(TENSORRT_LLM, "max_batch_size: 64", "max_batch_size: ${triton_max_batch_size}"),
        edit(TENSORRT_LLM, "TYPE_BF16", "TYPE_FP16"),
        edit(TENSORRT_LLM, "inflight_fused_batching", "V1"),
    ):
        change(root)
    assert {"placeholder", "lora-type", "batching-v1"} <= {each.rule for each in check_repository(root)}


def test_no_repository(tmp_path: Path) -> None:
    """A folder without models is refused in words."""
    with pytest.raises(Refused, match="no model repository here"):
        check_repository(tmp_path)


def test_a_folder_without_bundles_is_no_good_sign(tmp_path: Path) -> None:
    """A mistyped --bundles would look like clean adapters."""
    with pytest.raises(UsageError, match="no bundle here"):
        repo_command.check(tmp_path, bundles=tmp_path / "nowhere")
