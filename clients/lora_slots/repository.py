"""Renders the Triton model repository: the templates of `triton_repo/`, filled through Triton's own ModelConfig.

Rules:
1. A template is a valid config.pbtxt by itself; values are set on the parsed message, never pasted into text, and a
   parameter that is still a `${…}` at the end is left out, so no placeholder can survive.
2. The ensemble gets the input maps of `tensorrt_llm` and `lora_router`: whatever either takes and the ensemble or
   `preprocessing` offers. What `lora_router` gives (`lora_task_id`) reaches `tensorrt_llm` from there alone, and
   clients' weights reach it not at all.
3. `lora_weights` has the engine's dtype, and `lora_config` 3 columns or 4, in every model on the path
   (tensorrtllm_backend#671, #750).
4. Two forms of `tensorrt_llm`: `python`, the reference engine, and `tensorrtllm`, NVIDIA's C++ backend. They differ in
   the header, the batching and one parameter, never in tensors.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtllm_lora import ContractError, EngineShape
from trtllm_lora.shape import read_json

MODELS = ("preprocessing", "lora_router", "tensorrt_llm", "postprocessing", "ensemble")
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
Backend = Literal["python", "tensorrtllm"]
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
"""Where the NGC image has the C++ backend's worker."""
_WEIGHTS = ("lora_weights", "lora_config")
_LOGITS = ("draft_logits", "context_logits", "generation_logits")
CACHE_PARAMETERS = (
    "lora_cache_host_memory_bytes",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
)


class RepositoryError(ContractError):
    """The repository cannot be rendered; the message has one line for each reason."""


@dataclass(frozen=True, slots=True)
class RepositoryConfig:
    """What the model repository is filled with."""

    engine_dir: Path
    tokenizer_dir: Path
    registry: Path | str
    """`adapters.yaml` of the slot manager: a file, or s3://bucket/key."""
    engine_url: str
    """gRPC host:port at which `lora_router` reaches `tensorrt_llm`: this same Triton."""
    max_batch_size: int = 64
    router: Mapping[str, str] = field(default_factory=dict)
    """Parameters of `lora_router` (adapter_slots.Settings)."""
    engine: Mapping[str, str] = field(default_factory=dict)
    """Parameters of `tensorrt_llm`; the `lora_cache_*` ones are given to `lora_router` too."""
    text: Mapping[str, str] = field(default_factory=dict)
    """Parameters of `preprocessing` and `postprocessing`; each takes those it has."""
    backend: Backend = "python"
    dora: bool = False
    """`lora_config` has 4 columns."""
    with_router: bool = True
    """False leaves `lora_router` out of the ensemble: the yardstick of the benchmarks."""


def render(config: RepositoryConfig, out: Path, templates: Path | None = None) -> Path:
    """Write the model repository to `out` (replaced if it exists); returns `out`.

    Raises:
        RepositoryError: a template is broken, or a parameter has no such name.
        trtllm_lora.ShapeError: the engine's config.json cannot be read.
    """
    templates = templates or template_folder()
    shape = EngineShape.from_engine_config(config.engine_dir)
    models = {name: _parse(templates / name / "config.pbtxt") for name in MODELS}
    for model in models.values():
        model.max_batch_size = config.max_batch_size
    _set_tensors(models.values(), shape.dtype, logits_dtype(config.engine_dir), dora=config.dora)
    if config.backend == "tensorrtllm":
        _to_cpp_backend(models["tensorrt_llm"], config.max_batch_size)
    _fill(models, config)
    _join(models, with_router=config.with_router)
    if not config.with_router:
        del models["lora_router"]
    if out.exists():
        shutil.rmtree(out)
    for name, model in models.items():
        (out / name / "1").mkdir(parents=True)
        (out / name / "config.pbtxt").write_text(_text(model), encoding="utf-8")
        source = templates / name / "1" / "model.py"
        if source.is_file() and model.backend == "python":
            shutil.copyfile(source, out / name / "1" / "model.py")
    return out


def template_folder() -> Path:
    """The templates: packed into the wheel, or those of the checkout."""
    packed = Path(__file__).with_name("_triton_repo")
    return packed if packed.is_dir() else Path(__file__).parents[2] / "triton_repo"


def template_parameters(model: str) -> list[str]:
    """Names of a model's parameters, in order."""
    return sorted(_parse(template_folder() / model / "config.pbtxt").parameters)


def _parse(file: Path) -> Any:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig()
    try:
        return text_format.Parse(file.read_text(encoding="utf-8"), message)
    except OSError as error:
        raise RepositoryError(f"{file}: {error.strerror}") from None
    except text_format.ParseError as error:
        raise RepositoryError(f"{file}: {error}") from None


def _text(model: Any) -> str:
    from google.protobuf import text_format

    return str(text_format.MessageToString(model))


def logits_dtype(engine_dir: Path) -> str:
    """`pretrained_config.logits_dtype` of an engine; float32 where it does not say."""
    config = read_json(engine_dir / "config.json" if engine_dir.is_dir() else engine_dir)
    return str(config["pretrained_config"].get("logits_dtype") or "float32")


def _set_tensors(models: Any, dtype: str, logits: str, *, dora: bool) -> None:
    from tritonclient.grpc import model_config_pb2

    value = model_config_pb2.DataType.Value
    for model in models:
        for tensor in (*model.input, *model.output):
            if tensor.name == "lora_weights":
                tensor.data_type = value(_TYPES[dtype])
            elif tensor.name == "lora_config":
                tensor.dims[-1] = 4 if dora else 3
            elif tensor.name in _LOGITS:
                tensor.data_type = value(_TYPES[logits])


def _to_cpp_backend(model: Any, max_batch_size: int) -> None:
    """The header of NVIDIA's template: same tensors, a queue in front, no parameter of ours (rule 4)."""
    model.backend = "tensorrtllm"
    model.dynamic_batching.preferred_batch_size.append(max_batch_size)
    model.dynamic_batching.max_queue_delay_microseconds = 0
    model.dynamic_batching.default_queue_policy.max_queue_size = 0
    model.parameters["executor_worker_path"].string_value = WORKER
    del model.parameters["num_threads"]


def _fill(models: Mapping[str, Any], config: RepositoryConfig) -> None:
    cache = {key: config.engine[key] for key in CACHE_PARAMETERS if key in config.engine}
    text = {"tokenizer_dir": str(config.tokenizer_dir)}
    steps = {
        name: text | {key: value for key, value in config.text.items() if key in models[name].parameters}
        for name in ("preprocessing", "postprocessing")
    }
    values: dict[str, dict[str, str]] = {
        **steps,
        "tensorrt_llm": {"gpt_model_path": str(config.engine_dir), **text, **config.engine},
        "lora_router": {
            "engine_dir": str(config.engine_dir),
            "registry": str(config.registry),
            "engine_url": config.engine_url,
            **cache,
            **config.router,
        },
    }
    problems = []
    for name, parameters in values.items():
        known = models[name].parameters
        for key, value in parameters.items():
            if key not in known:
                near = difflib.get_close_matches(key, list(known), n=1)
                instead = f"write {near[0]}" if near else f"it has {', '.join(sorted(known))}"
                problems.append(f"{name} has no parameter {key}; {instead}")
            elif "${" in value:
                problems.append(f"{name}: {key} is {value!r}, a placeholder; write its value")
    if problems:
        raise RepositoryError("\n".join(sorted(problems)))
    for name, parameters in values.items():
        for key, value in parameters.items():
            models[name].parameters[key].string_value = value
    for model in models.values():
        for key in [key for key, value in model.parameters.items() if "${" in value.string_value]:
            del model.parameters[key]  # absent means the runtime's default; a literal ${…} is text to it


def _join(models: Mapping[str, Any], *, with_router: bool) -> None:
    """Give the ensemble the input maps of `lora_router` and `tensorrt_llm` (rule 2)."""
    engine, router, ensemble = models["tensorrt_llm"], models["lora_router"], models["ensemble"]
    pre_step, router_step, engine_step, _ = ensemble.ensemble_scheduling.step
    renamed = dict(engine_step.input_map)
    offered = {tensor.name for tensor in ensemble.input} | set(pre_step.output_map.values())
    routed = dict(router_step.output_map) if with_router else {}
    kept_back = set(_WEIGHTS) if with_router else set()
    for model, step in ((router, router_step), (engine, engine_step)):
        for name in (tensor.name for tensor in model.input):
            sources = (renamed.get(name, ""), f"encoded.{name}", name)
            source = next((source for source in sources if source in offered), "")
            if step is engine_step:
                source = "" if name in kept_back else routed.get(name, source)
            if source:  # else no input of the ensemble: draft tokens, retention, multimodal
                step.input_map[name] = source
    for tensor in ensemble.output:
        if tensor.name != "text_output":
            engine_step.output_map[tensor.name] = tensor.name
    if not with_router:
        del ensemble.ensemble_scheduling.step[1]
        for i, tensor in enumerate(ensemble.input):
            if tensor.name == "adapter":
                del ensemble.input[i]
                break
