"""The model repository's config speaks NVIDIA's contract: names, types, dims and flags of every tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from reference_engine.contract import REFUSED
from reference_engine.errors import StartupRefused
from reference_engine.settings import THREADS, Settings

CONFIG = Path(__file__).parents[2] / "triton_repo" / "tensorrt_llm" / "config.pbtxt"

# one line per kind: scalars are reshaped from [1] to [], the ragged ones may differ in length within a batch
SCALARS = {
    pb.TYPE_INT32: "encoder_output_lengths input_lengths request_output_len num_return_sequences decoder_input_lengths "
    "end_id pad_id beam_width runtime_top_k runtime_top_p_reset_ids min_tokens prompt_vocab_size",
    pb.TYPE_FP32: "draft_acceptance_threshold temperature runtime_top_p runtime_top_p_min runtime_top_p_decay "
    "len_penalty repetition_penalty beam_search_diversity_rate presence_penalty frequency_penalty",
    pb.TYPE_BOOL: "early_stopping return_log_probs return_context_logits return_generation_logits return_perf_metrics "
    "return_num_input_tokens return_num_output_tokens exclude_input_in_output stop streaming",
    pb.TYPE_UINT64: "seed lora_task_id",
}
RAGGED = {
    (pb.TYPE_INT32, (-1,)): "input_ids draft_input_ids decoder_input_ids retention_token_range_starts "
    "retention_token_range_ends retention_token_range_priorities retention_token_range_durations_ms",
    (pb.TYPE_INT32, (1,)): "retention_decode_priority retention_decode_duration_ms lookahead_window_size "
    "lookahead_ngram_size lookahead_verification_set_size",
    (pb.TYPE_INT32, (2, -1)): "stop_words_list bad_words_list",
    (pb.TYPE_INT32, (-1, 3)): "lora_config",
    (pb.TYPE_FP16, (-1, -1)): "encoder_input_features prompt_embedding_table lora_weights",
    (pb.TYPE_FP32, (-1, -1)): "draft_logits",
    (pb.TYPE_FP32, (-1,)): "embedding_bias",
    (pb.TYPE_UINT64, (-1,)): "prompt_table_extra_ids",
    (pb.TYPE_BOOL, (-1, -1)): "cross_attention_mask",
    (pb.TYPE_BOOL, (1,)): "skip_cross_attn_blocks",
    (pb.TYPE_UINT8, (-1,)): "context_phase_params",
    (pb.TYPE_STRING, (1,)): "guided_decoding_guide_type guided_decoding_guide",
}
PLAIN = {"mrope_rotary_cos_sin": (pb.TYPE_FP32, (-1,)), "mrope_position_deltas": (pb.TYPE_INT64, (1,))}
OUTPUTS = {
    (pb.TYPE_INT32, (-1, -1)): "output_ids",
    (pb.TYPE_INT32, (-1,)): "sequence_length",
    (pb.TYPE_FP32, (-1,)): "cum_log_probs",
    (pb.TYPE_FP32, (-1, -1)): "output_log_probs context_logits",
    (pb.TYPE_FP32, (-1, -1, -1)): "generation_logits",
    (pb.TYPE_INT32, (1,)): "batch_index sequence_index kv_cache_alloc_new_blocks kv_cache_reused_blocks "
    "kv_cache_alloc_total_blocks total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens",
    (pb.TYPE_UINT8, (-1,)): "context_phase_params",
    (pb.TYPE_INT64, (1,)): "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns",
    (pb.TYPE_FP32, (1,)): "acceptance_rate",
}
LORA_PARAMETERS = {
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_prefetch_dir",
}


@pytest.fixture(scope="module")
def config() -> pb.ModelConfig:
    """The template as it stands: valid without being filled in."""
    return text_format.Parse(CONFIG.read_text(encoding="utf-8"), pb.ModelConfig())


def test_inputs_are_the_contracts(config: pb.ModelConfig) -> None:
    """Every input with its type, dims, reshape and ragged flag; only two are required."""
    expected: dict[str, tuple[int, tuple[int, ...], bool, bool]]
    expected = {name: (kind, (1,), True, False) for kind, names in SCALARS.items() for name in names.split()}
    expected |= {name: (*spec, False, True) for spec, names in RAGGED.items() for name in names.split()}
    expected |= {name: (*spec, False, False) for name, spec in PLAIN.items()}
    got = {i.name: (i.data_type, tuple(i.dims), i.HasField("reshape"), i.allow_ragged_batch) for i in config.input}
    assert expected == got
    assert {i.name for i in config.input if not i.optional} == {"input_lengths", "request_output_len"}


def test_outputs_are_the_contracts(config: pb.ModelConfig) -> None:
    """Every output with its type and dims."""
    expected = {name: spec for spec, names in OUTPUTS.items() for name in names.split()}
    assert expected == {o.name: (o.data_type, tuple(o.dims)) for o in config.output}


def test_one_instance_decoupled_with_the_lora_parameters(config: pb.ModelConfig) -> None:
    """Each instance would have a LoRA cache of its own, so there is one."""
    assert [(g.count, g.kind) for g in config.instance_group] == [(1, pb.ModelInstanceGroup.KIND_CPU)]
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size > 0
    assert set(config.parameters) >= LORA_PARAMETERS


def test_every_refused_input_is_in_the_contract(config: pb.ModelConfig) -> None:
    """A refusal names an input that a client can send."""
    assert {i.name for i in config.input} >= set(REFUSED)


def test_unfilled_parameters_fall_to_the_runtimes_defaults(config: pb.ModelConfig) -> None:
    """`${...}` is unset, whatever type is wanted; a filled one counts."""
    config.parameters["gpt_model_path"].string_value = "/engine"
    parameters = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    read = Settings.from_model_config({"parameters": parameters, "model_transaction_policy": {"decoupled": True}})
    assert Settings(engine_dir="/engine") == read
    parameters["lora_cache_max_adapter_size"] = {"string_value": "many"}
    parameters["lora_cache_host_memory_bytes"] = {"string_value": "1048576"}
    changed = Settings.from_model_config({"parameters": parameters})
    assert (changed.max_rank, changed.host_bytes, changed.decoupled) == (64, 1048576, False)


def test_threads_of_the_parameter_before_those_of_the_environment(config: pb.ModelConfig) -> None:
    """A variable that is no number of threads fails the load."""
    config.parameters["gpt_model_path"].string_value = "/engine"
    parameters = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    assert Settings.from_model_config({"parameters": parameters}, {THREADS: "3"}).num_threads == 3
    for wrong in ("0", "-1", "two", "٣"):
        with pytest.raises(StartupRefused, match=f"{THREADS}={wrong} is no number of threads"):
            Settings.from_model_config({"parameters": parameters}, {THREADS: wrong})
    parameters["num_threads"] = {"string_value": "2"}
    assert Settings.from_model_config({"parameters": parameters}, {THREADS: "3"}).num_threads == 2
