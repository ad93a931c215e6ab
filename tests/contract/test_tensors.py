"""The model's tensors, parameters and the core's own checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2 as pb

pytestmark = pytest.mark.triton

INT, FLOAT, BOOL, UINT64 = pb.TYPE_INT32, pb.TYPE_FP32, pb.TYPE_BOOL, pb.TYPE_UINT64
LORA = (
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction",
    "lora_cache_host_memory_bytes",
    "lora_prefetch_dir",
)


def _inputs(server: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in server.config.input}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("input_lengths", INT),
        ("request_output_len", INT),
        ("end_id", INT),
        ("runtime_top_k", INT),
        ("runtime_top_p", FLOAT),
        ("temperature", FLOAT),
        ("seed", UINT64),
        ("min_tokens", INT),
        ("streaming", BOOL),
        ("stop", BOOL),
        ("exclude_input_in_output", BOOL),
        ("return_perf_metrics", BOOL),
        ("lora_task_id", UINT64),
    ],
)
def test_scalar_inputs(server: Any, name: str, kind: int) -> None:
    """Rule: scalars are [1] on the wire, reshaped to []; types by name."""
    tensor = _inputs(server)[name]
    assert (tensor.data_type, list(tensor.dims), tensor.HasField("reshape")) == (kind, [1], True)


@pytest.mark.parametrize(
    ("name", "dims"),
    [("input_ids", [-1]), ("stop_words_list", [2, -1]), ("bad_words_list", [2, -1]), ("embedding_bias", [-1])],
)
def test_ragged_inputs(server: Any, name: str, dims: list[int]) -> None:
    """Rule: lists of tokens and weights are ragged."""
    tensor = _inputs(server)[name]
    assert list(tensor.dims) == dims
    assert tensor.allow_ragged_batch


def test_lora_tensors(server: Any) -> None:
    """Rule: lora_weights [-1,-1] of the engine's dtype, lora_config [-1, 3 or 4] INT32, both ragged and optional."""
    weights, config = _inputs(server)["lora_weights"], _inputs(server)["lora_config"]
    kinds = {"float32": pb.TYPE_FP32, "float16": pb.TYPE_FP16, "bfloat16": pb.TYPE_BF16}
    assert (weights.data_type, list(weights.dims)) == (kinds[server.shape.dtype], [-1, -1])
    assert (config.data_type, len(config.dims)) == (INT, 2)
    assert list(config.dims)[1] in (3, 4)
    assert weights.allow_ragged_batch
    assert config.allow_ragged_batch
    assert weights.optional
    assert config.optional


def test_only_two_inputs_are_required(server: Any) -> None:
    """Rule: everything but input_lengths and request_output_len is optional."""
    assert {n for n, t in _inputs(server).items() if not t.optional} == {"input_lengths", "request_output_len"}


def test_outputs(server: Any) -> None:
    """Rule: output_ids and sequence_length lead; timings are INT64, counters INT32."""
    outputs = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in server.config.output}
    assert outputs["output_ids"] == (INT, [-1, -1])
    assert outputs["sequence_length"] == (INT, [-1])
    assert outputs["last_token_time_ns"] == (pb.TYPE_INT64, [1])
    assert outputs["kv_cache_reused_blocks"] == (INT, [1])


def test_one_decoupled_instance(server: Any) -> None:
    """Rule: one instance, because each has a LoRA cache of its own; decoupled, because it streams."""
    assert sum(group.count for group in server.config.instance_group) == 1
    assert server.config.model_transaction_policy.decoupled
    assert server.config.max_batch_size > 0


@pytest.mark.parametrize("key", LORA)
def test_lora_parameters(server: Any, key: str) -> None:
    """Rule: the names of the lora_cache_* parameters never changed. The prefetch reads float16 alone."""
    if key == "lora_prefetch_dir" and server.shape.dtype == "bfloat16" and key not in server.config.parameters:
        pytest.skip("a bfloat16 engine has nothing to prefetch")
    assert key in server.config.parameters


def test_inflight_batching(server: Any) -> None:
    """Rule: V1 batching does not feed LoRA tensors."""
    assert server.config.parameters["gpt_model_type"].string_value.startswith("inflight")


def test_missing_required_input(server: Any, prompt: list[int]) -> None:
    """Rule: the core refuses a request without request_output_len."""
    error = server.answer(prompt, 1, leave_out=["request_output_len"]).error
    assert "request_output_len" in error


def test_unknown_input(server: Any, prompt: list[int]) -> None:
    """Rule: the core refuses an input the model does not have."""
    assert "no_such_input" in server.answer(prompt, 1, no_such_input=np.zeros((1, 1), np.int32)).error


def test_wrong_type(server: Any, prompt: list[int]) -> None:
    """Rule: the core names the type it was given and the type it wants."""
    error = server.answer(prompt, 1, lora_task_id=np.array([[1]], np.int32)).error
    assert "lora_task_id" in error
    assert "INT32" in error
    assert "UINT64" in error


def test_columns_the_config_does_not_declare(server: Any, prompt: list[int], make_adapter: Any, new_task: Any) -> None:
    """Rule: lora_config has exactly the declared columns, or the core refuses it (tensorrtllm_backend#750)."""
    declared = list(_inputs(server)["lora_config"].dims)[1]
    adapter = make_adapter(1)
    rows = adapter["lora_config"].shape[1]
    adapter["lora_config"] = np.zeros((1, rows, 7 - declared), np.int32)
    error = server.answer(prompt, 1, lora_task_id=new_task(), **adapter).error
    assert f"unexpected shape for input 'lora_config' for model 'tensorrt_llm'. Expected [-1,-1,{declared}]" in error
