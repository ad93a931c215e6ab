"""`repo check` finds what upstream's templates and their users get wrong, in anybody's repository; `repo render`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from lora_slots.refusals import Refused
from lora_slots.repo_check import check_repository
from lora_slots.repo_files import Finding
from lora_slots.repository import RepositoryConfig, render
from trtllm_lora import EngineShape

Change = Callable[[Path], object]
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


def warm_up_with_zeros(config: Any) -> None:
    """A warm-up request whose task id is zero."""
    warmup = config.model_warmup.add(name="zeros", batch_size=1)
    warmup.inputs["lora_task_id"].data_type = model_config_pb2.TYPE_UINT64
    warmup.inputs["lora_task_id"].dims.append(1)
    warmup.inputs["lora_task_id"].zero_data = True


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


@pytest.mark.parametrize(
    ("change", "file", "says", "fix"),
    [
        (
            edit(TENSORRT_LLM, "max_batch_size: 64", "max_batch_size: ${triton_max_batch_size}"),
            "tensorrt_llm",
            "cannot parse",
            "",
        ),
        (
            edit(TENSORRT_LLM, "decoupled: true", "decoupled: ${decoupled_mode}"),
            "tensorrt_llm",
            "${decoupled_mode}",
            "true",
        ),
        (edit(TENSORRT_LLM, "TYPE_BF16", "${lora_datatype}"), "tensorrt_llm", "${lora_datatype}", "TYPE_FP16"),
        (
            edit(TENSORRT_LLM, 'backend: "tensorrtllm"', 'backend: "${triton_backend}"'),
            "tensorrt_llm",
            "backend",
            "tensorrtllm",
        ),
        (
            parameter("tensorrt_llm", "gpt_model_path", "${engine_dir}"),
            "tensorrt_llm",
            "is the text ${engine_dir}",
            "fill it",
        ),
        (
            parameter("tensorrt_llm", "lora_prefetch_dir", "${x}"),
            "tensorrt_llm",
            "is the text",
            "leave the parameter out",
        ),
        (edit(TENSORRT_LLM, "input {", "inputs {"), "tensorrt_llm", "not a model configuration", "correct it"),
        (
            tensor("lora_weights", data_type=model_config_pb2.TYPE_FP16),
            "tensorrt_llm",
            "dtype is bfloat16",
            "TYPE_BF16",
        ),
        (tensor("lora_config", dims=[-1, 4]), "tensorrt_llm", "4 columns here", "the same in every model"),
        (tensor("lora_config", dims=[3]), "tensorrt_llm", "has dims [3]", "write [-1, 3]"),
        (
            tensor("lora_task_id", data_type=model_config_pb2.TYPE_INT32),
            "tensorrt_llm",
            "lora_task_id is TYPE_INT32",
            "UINT64",
        ),
        (tensor("lora_task_id", reshape=None), "tensorrt_llm", "no reshape", "add reshape"),
        (remove_input("lora_task_id"), "tensorrt_llm", "lora_task_id is missing", "add lora_task_id TYPE_UINT64"),
        (edit(TENSORRT_LLM, '"min_tokens"', '"min_length"'), "tensorrt_llm", "was renamed", "write min_tokens"),
        (parameter("tensorrt_llm", "gpt_model_type", "V1"), "tensorrt_llm", "does not feed LoRA", "inflight_fused"),
        (
            parameter("tensorrt_llm", "lora_cache_max_adapter_size", "8"),
            "tensorrt_llm",
            "below the engine's",
            "write 64",
        ),
        (
            parameter("tensorrt_llm", "lora_cache_host_memory_bytes", "1000"),
            "tensorrt_llm",
            "Not enough space",
            "raise it",
        ),
        (parameter("tensorrt_llm", "lora_cache_max_adapter_size", "many"), "tensorrt_llm", "no number", "whole number"),
        (parameter("lora_router", "lora_cache_host_memory_bytes", "5"), "lora_router", "miscounts", "the same in both"),
        (configure("tensorrt_llm", warm_up_with_zeros), "tensorrt_llm", "lora_task_id 0", "input_data_file"),
        (
            configure("tensorrt_llm", lambda c: setattr(c.instance_group[0], "count", 2)),
            "tensorrt_llm",
            "2 instances",
            "count: 1",
        ),
        (
            configure("lora_router", lambda c: setattr(c.instance_group[0], "count", 2)),
            "lora_router",
            "two slot managers",
            "",
        ),
        (
            configure("lora_router", lambda c: c.ClearField("model_transaction_policy")),
            "lora_router",
            "not decoupled",
            "",
        ),
        (
            configure("tensorrt_llm", lambda c: setattr(c, "name", "llm")),
            "tensorrt_llm",
            "is named llm",
            "write tensorrt_llm",
        ),
        (lambda root: (root / "tensorrt_llm" / "1").rmdir(), "tensorrt_llm", "no version folder", "make a folder 1"),
        (
            lambda root: (root / "lora_router" / "1" / "model.py").unlink(),
            "lora_router",
            "finds no model.py",
            "put one",
        ),
        (
            unmap("tensorrt_llm", "lora_task_id"),
            "ensemble",
            "without lora_task_id: they are ignored",
            "map lora_task_id",
        ),
        (unmap("preprocessing", "QUERY"), "ensemble", "needs QUERY", "add it"),
        (map_to("tensorrt_llm", "no_such", "text_input"), "ensemble", "has no input no_such", "correct"),
        (map_to("tensorrt_llm", "seed", "nobody"), "ensemble", "given by no earlier step", "correct"),
        (map_to("tensorrt_llm", "seed", "temperature"), "ensemble", "different types", "make both the same"),
        (
            edit("ensemble/config.pbtxt", 'model_name: "postprocessing"', 'model_name: "post"'),
            "ensemble",
            "no model of",
            "",
        ),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, change: Change, file: str, says: str, fix: str) -> None:
    """Each mistake is an error with the file it is in, a line, what it does and the remedy."""
    root = make_repository(tmp_path)
    change(root)
    found = errors(check_repository(root, tmp_path / "engine"))
    hits = [each for each in found if says in each.what and fix in each.fix and Path(each.file).parent.name == file]
    assert hits, found
    assert all(hit.line >= 1 for hit in hits)


def test_the_line_is_the_tensors(tmp_path: Path) -> None:
    """A finding about lora_weights points at the line that declares it."""
    root = make_repository(tmp_path)
    tensor("lora_weights", data_type=model_config_pb2.TYPE_FP16)(root)
    finding = next(each for each in check_repository(root) if each.file == str(root / TENSORRT_LLM))
    assert 'name: "lora_weights"' in (root / TENSORRT_LLM).read_text().splitlines()[finding.line - 1]
    assert str(finding).startswith(f"{root / TENSORRT_LLM}:{finding.line}: lora_weights is TYPE_FP16")


def adapter(folder: Path, columns: int = 3, dtype: str = "<f2") -> None:
    """The two arrays of an adapter."""
    folder.mkdir(parents=True)
    np.save(folder / "model.lora_config.npy", np.zeros((1, 2, columns), np.int32))
    np.save(folder / "model.lora_weights.npy", np.zeros((1, 2, 8), dtype))


def test_three_columns_with_dora_bundles(tmp_path: Path) -> None:
    """tensorrtllm_backend#750: [-1, 3] in the configs and 4-column adapters, in all three models on the path."""
    root = make_repository(tmp_path)
    adapter(tmp_path / "bundles" / "abc", columns=4)
    found = [each for each in check_repository(root, bundles=tmp_path / "bundles") if each.rule == "lora-columns"]
    assert {Path(each.file).parent.name for each in found} == {"ensemble", "lora_router", "tensorrt_llm"}
    assert all("write [-1, 4] in every model" in each.fix for each in found)


def test_prefetch_on_bfloat16(tmp_path: Path) -> None:
    """The runtime's loadNpy cannot read bfloat16 files, so the directory does nothing."""
    root = make_repository(tmp_path, engine={"lora_prefetch_dir": str(tmp_path)})
    assert any("on a bfloat16 engine" in each.what for each in errors(check_repository(root)))


def test_prefetch_directories_that_fail_in_silence(tmp_path: Path) -> None:
    """Missing, misnamed, zero, too large, incomplete and wrongly typed prefetch folders are five different errors."""
    root = make_repository(tmp_path, "float16", engine={"lora_prefetch_dir": str(tmp_path / "adapters")})
    assert any("does not exist" in each.what for each in errors(check_repository(root)))
    for name, dtype in (("abc", "<f2"), ("0", "<f2"), ("3000000000", "<f2"), ("7", "<f4"), ("12", "<f2")):
        adapter(tmp_path / "adapters" / name, dtype=dtype)
    (tmp_path / "adapters" / "9").mkdir()
    found = {
        each.what.removeprefix("lora_prefetch_dir/").partition(":")[0]: each.what
        for each in errors(check_repository(root))
    }
    assert set(found) == {"abc", "0", "3000000000", "7", "9"}
    assert "skipped" in found["abc"]
    assert "task id 0" in found["0"]
    assert "int32" in found["3000000000"]
    assert "B#791" in found["7"]
    assert "no model.lora_weights.npy" in found["9"]


def test_engines_that_do_not_fit(tmp_path: Path) -> None:
    """An engine of a version without engines, and one built without LoRA, are told."""
    root = make_repository(tmp_path)
    make_engine(tmp_path / "engine", version="1.3.0")
    assert any("built by TensorRT-LLM 1.3.0" in each.what for each in check_repository(root))
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    config["build_config"]["plugin_config"]["lora_plugin"] = None
    (tmp_path / "engine" / "config.json").write_text(json.dumps(config))
    assert any("built without LoRA" in each.what for each in check_repository(root))


def test_numpy_models_cannot_carry_bfloat16(tmp_path: Path) -> None:
    """tensorrtllm_backend#671: a BLS model that copies tensors through numpy stands in the way."""
    root = make_repository(tmp_path)
    bls = root / "tensorrt_llm_bls"
    (bls / "1").mkdir(parents=True)
    (bls / "1" / "model.py").write_text("x = tensor.as_numpy()\n")
    text = (
        (root / TENSORRT_LLM)
        .read_text()
        .replace('"tensorrt_llm"', '"tensorrt_llm_bls"')
        .replace("tensorrtllm", "python")
    )
    (bls / "config.pbtxt").write_text(text)
    assert any("cannot pass this model.py" in each.what for each in errors(check_repository(root)))


def test_every_problem_at_once(tmp_path: Path) -> None:
    """A file that does not parse is still looked through for all the rest."""
    root = make_repository(tmp_path)
    for change in (
        edit(TENSORRT_LLM, "max_batch_size: 64", "max_batch_size: ${triton_max_batch_size}"),
        edit(TENSORRT_LLM, "TYPE_BF16", "TYPE_FP16"),
        edit(TENSORRT_LLM, "inflight_fused_batching", "V1"),
    ):
        change(root)
    assert {"placeholder", "lora-type", "batching"} <= {each.rule for each in check_repository(root)}


def test_no_repository(tmp_path: Path) -> None:
    """A folder without models is refused in words."""
    with pytest.raises(Refused, match="no model repository here"):
        check_repository(tmp_path)
