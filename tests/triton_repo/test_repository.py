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
from trtllm_lora.request_rules import RULED


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
    """lora_router has one instance: two would be two managers, and the bound a fiction.

    It is not decoupled, so that tensorrt_llm can take inputs from it and from preprocessing (decision 29).
    """
    router = rendered(tmp_path)["lora_router"]
    assert [(group.count, group.kind) for group in router.instance_group] == [
        (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    ]
    assert not router.model_transaction_policy.decoupled


def test_the_router_sees_what_it_judges_and_nothing_else(tmp_path: Path) -> None:
    """Its engine inputs: those with a rule, the LoRA tensors, and three that tell how long and how an answer comes."""
    models = rendered(tmp_path)
    engine = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in models["tensorrt_llm"].input}
    router = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in models["lora_router"].input}
    lora = {"lora_task_id", "lora_weights", "lora_config"}
    assert set(router) - {"adapter", "op", "op_args"} == RULED | lora | {
        "input_lengths",
        "streaming",
        "return_perf_metrics",
    }
    assert {name: router[name] for name in router if name in engine} == {
        name: engine[name] for name in router if name in engine
    }
    assert all(tensor.optional for tensor in models["lora_router"].input)


def test_a_task_id_reaches_the_engine_by_the_router_alone(tmp_path: Path) -> None:
    """Clients' weights do not reach it at all; every other input of the ensemble does, from where it is made."""
    models = rendered(tmp_path)
    steps = {step.model_name: step for step in models["ensemble"].ensemble_scheduling.step}
    to_engine = steps["tensorrt_llm"].input_map
    assert to_engine["lora_task_id"] == "routed.lora_task_id"
    assert to_engine["return_perf_metrics"] == "routed.return_perf_metrics"
    assert (to_engine["input_ids"], to_engine["runtime_top_k"]) == ("encoded.input_ids", "top_k")
    assert not {"lora_weights", "lora_config"} & set(to_engine)
    plain = {tensor.name for tensor in models["ensemble"].input}
    sources = {source for step in steps.values() for source in step.input_map.values()}
    assert plain <= sources
    without = rendered(tmp_path, with_router=False)["ensemble"].ensemble_scheduling.step[1].input_map
    assert set(without) - set(to_engine) == {"lora_weights", "lora_config"}


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
    with pytest.raises(
        RepositoryError,
        match="lora_router has no parameter num_slot; write num_slots\ntensorrt_llm has no parameter x; it has F",
    ):
        rendered(tmp_path, router={"num_slot": "4"}, engine={"x": "1"})


def test_the_ensemble_without_the_router_is_a_line_of_three(tmp_path: Path) -> None:
    """The benchmarks' yardstick: same engine, same text steps, no adapter input."""
    models = rendered(tmp_path, with_router=False)
    assert set(models) == set(MODELS) - {"lora_router"}
    assert "adapter" not in {tensor.name for tensor in models["ensemble"].input}
