"""The rendered model repository: complete, one list of names, and one slot manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from lora_slots.repository import MODELS, RepositoryConfig, RepositoryError, render
from reference_engine.engine_dir import CONFIG_FILE
from trtllm_lora import EngineShape


def engine_dir(tmp_path: Path, dtype: str) -> Path:
    """An engine's config.json, which is all that rendering reads."""
    import json

    shape = EngineShape.from_hf_config(
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        dtype=dtype,
    )
    (tmp_path / CONFIG_FILE).write_text(json.dumps(shape.to_engine_config()))
    return tmp_path


def rendered(tmp_path: Path, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    """Model name -> parsed config of a rendered repository."""
    config = RepositoryConfig(
        engine_dir(tmp_path, dtype), Path("tokenizer"), Path("adapters.yaml"), "127.0.0.1:1", **more
    )
    out = render(config, tmp_path / "models")
    return {
        folder.name: text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        for folder in out.iterdir()
    }


def test_one_slot_manager_per_engine(tmp_path: Path) -> None:
    """lora_router has one instance and is decoupled: two would be two managers, and the bound a fiction."""
    router = rendered(tmp_path)["lora_router"]
    assert [(group.count, group.kind) for group in router.instance_group] == [
        (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    ]
    assert router.model_transaction_policy.decoupled


def test_every_engine_input_passes_through_the_router(tmp_path: Path) -> None:
    """lora_router takes and gives exactly what tensorrt_llm takes, and everything is optional there."""
    models = rendered(tmp_path)
    engine = {(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in models["tensorrt_llm"].input}
    router = models["lora_router"]
    taken = {(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in router.input}
    given = {(tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in router.output}
    assert engine <= taken
    assert engine <= given
    assert {name for name, *_ in taken - engine} == {"adapter", "op", "op_args"}
    assert all(tensor.optional for tensor in router.input)
    steps = {step.model_name: step for step in models["ensemble"].ensemble_scheduling.step}
    assert set(steps["tensorrt_llm"].input_map) == set(steps["lora_router"].output_map)
    assert {"input_ids", "request_output_len", "lora_task_id", "return_perf_metrics"} <= set(
        steps["tensorrt_llm"].input_map
    )


@pytest.mark.parametrize(
    ("dtype", "wire"), [("float32", "TYPE_FP32"), ("float16", "TYPE_FP16"), ("bfloat16", "TYPE_BF16")]
)
def test_lora_weights_have_the_engines_dtype_everywhere(tmp_path: Path, dtype: str, wire: str) -> None:
    """tensorrtllm_backend#671: a template's TYPE_FP16 on an engine of another dtype."""
    wanted = model_config_pb2.DataType.Value(wire)
    for name, model in rendered(tmp_path, dtype).items():
        for tensor in (*model.input, *model.output):
            if tensor.name == "lora_weights":
                assert tensor.data_type == wanted, name


def test_no_placeholder_survives(tmp_path: Path) -> None:
    """Every model is there, and no ${…} in any of them."""
    models = rendered(tmp_path)
    assert set(models) == set(MODELS)
    assert all("${" not in str(model) for model in models.values())


def test_a_parameter_with_no_such_name_is_refused(tmp_path: Path) -> None:
    """A misspelt parameter is an error, not a default."""
    with pytest.raises(RepositoryError, match="lora_router has no parameter num_slot; tensorrt_llm has no parameter x"):
        rendered(tmp_path, router={"num_slot": "4"}, engine={"x": "1"})


def test_the_ensemble_without_the_router_is_a_line_of_three(tmp_path: Path) -> None:
    """The benchmarks' yardstick: same engine, same text steps, no adapter input."""
    models = rendered(tmp_path, with_router=False)
    assert set(models) == set(MODELS) - {"lora_router"}
    assert "adapter" not in {tensor.name for tensor in models["ensemble"].input}
