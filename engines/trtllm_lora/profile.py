"""The engine profile: everything that decides what one compiled engine is, in one YAML file.

Rules of the file stand in `profile_rules.py`, what is said of one field in `profile_fields.py`; every problem is found
at once, with file and line. `schema()` is the JSON schema for editors, kept in engines/profiles/profile.schema.json.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trtllm_lora.errors import ContractError
from trtllm_lora.geometry import DEFAULT_HOST_BYTES, DEFAULT_OPTIMAL_RANK, CacheGeometry
from trtllm_lora.shape import EngineShape
from trtllm_lora.yaml_lines import Problem, read_yaml

SCHEMA = 1
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
KV_ALGOS = {"auto": None, "fp8": "FP8", "int8": "INT8"}
"""`engine.kv_cache_dtype` -> `quantization.kv_cache_quant_algo` of config.json."""
QUANT_ALGOS: dict[str, str | None] = {
    "none": None,
    "fp8": "FP8",
    "int8_weight_only": "W8A16",
    "int4_weight_only": "W4A16",
    "int4_awq": "W4A16_AWQ",
    "fp8_rowwise": "FP8_PER_CHANNEL_PER_TOKEN",
    "smoothquant": "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
}
"""Word of a profile -> `quantization.quant_algo` of TensorRT-LLM. The last two are known in order to be refused."""


class ProfileError(ContractError):
    """A profile that cannot be used; the message has one line for each problem."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def parse_bytes(value: object) -> object:
    """`4GiB`, `512 MiB` or a number of bytes; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return _as_number(value)
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([KMGT]i?B|B)?", value.strip())
    if not found or (found[2] or "") not in _UNITS:
        raise ValueError(f"{value[:40]!r} is not a size: write 4GiB, 512MiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def _as_text(value: object) -> object:
    if isinstance(value, float):
        raise ValueError(f"{value} was read as a number: write it in quotes, or with three parts (1.2.1)")
    return value


def _as_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number: write one")
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(gt=0)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_as_number)]
Fraction = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_as_number)]
Dtype = Literal["float32", "float16", "bfloat16"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Section):
    """The base model: where it is from, and the sizes that rules are checked with (compared with its config.json)."""

    id: Annotated[str, Field(min_length=1, description="Hugging Face id, such as meta-llama/Llama-3.1-8B-Instruct")]
    revision: Annotated[str, Field(min_length=1, description="commit of the model's repository, 40 hexadecimal digits")]
    tokenizer: Annotated[
        str | None, Field(description="directory of the tokenizer, relative to the profile; default: the model's own")
    ] = None
    architecture: Annotated[str, Field(description="`architectures[0]` of its config.json")]
    hidden_size: Positive
    intermediate_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_size: Annotated[Positive | None, Field(description="default: hidden_size / num_heads")] = None
    vocab_size: Positive
    max_positions: Annotated[Positive, Field(description="`max_position_embeddings`")]
    tied_embeddings: bool = False
    attention_bias: Annotated[bool, Field(description="q, k and v have a bias (Qwen2)")] = False
    num_experts: Annotated[int, Field(ge=0), BeforeValidator(_as_number)] = 0


class Engine(_Section):
    """What trtllm-build is told."""

    tensorrt_llm: Annotated[str, BeforeValidator(_as_text), Field(description="version that builds and serves it")] = (
        "1.2.1"
    )
    container: Annotated[
        str | None, Field(description="tritonserver:<yy.mm>-trtllm-python-py3 of NGC, without a registry")
    ] = None
    dtype: Dtype = "float16"
    quantization: Literal[
        "none", "fp8", "int8_weight_only", "int4_weight_only", "int4_awq", "fp8_rowwise", "smoothquant"
    ] = "none"
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    kv_cache_type: Literal["paged", "continuous", "disabled"] = "paged"
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    max_batch_size: Positive = 64
    max_input_len: Annotated[Positive | None, Field(description="default: max_seq_len - 1")] = None
    max_seq_len: Annotated[int, Field(ge=2, description="prompt and answer together"), BeforeValidator(_as_number)] = (
        4096
    )
    max_num_tokens: Annotated[Positive, Field(description="tokens of one step, over all requests")] = 8192


class Lora(_Section):
    """Which adapters the engine takes."""

    modules: Annotated[list[str], Field(min_length=1, description="TensorRT-LLM names, such as attn_q")]
    max_rank: Annotated[Positive, Field(description="--max_lora_rank")] = 64
    plugin_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    dora: Annotated[bool, Field(description="lora_config has 4 columns in every model")] = False


class Serving(_Section):
    """Memory of the served engine. Fractions left out are recommended by `lora-slots plan`."""

    gpu_memory: Annotated[Bytes | None, Field(description="memory of one GPU")] = None
    slots: Annotated[Positive, Field(description="adapters in the engine's working set at most")] = 8
    kv_cache_fraction: Annotated[Fraction | None, Field(description="kv_cache_free_gpu_mem_fraction")] = None
    lora_gpu_fraction: Annotated[Fraction | None, Field(description="lora_cache_gpu_memory_fraction")] = None
    lora_host_memory: Annotated[Bytes, Field(description="lora_cache_host_memory_bytes")] = DEFAULT_HOST_BYTES
    lora_optimal_rank: Annotated[Positive, Field(description="lora_cache_optimal_adapter_size")] = DEFAULT_OPTIMAL_RANK
    lora_max_rank: Annotated[
        Positive | None, Field(description="lora_cache_max_adapter_size; default: lora.max_rank")
    ] = None


class Text(_Section):
    """The text steps."""

    add_special_tokens: bool = True
    skip_special_tokens: bool = True


class EngineProfile(_Section):
    """One engine, from base model to cache sizes. Made by `load_profile`, which also checks the rules."""

    schema_version: Annotated[Literal[1], BeforeValidator(_as_number), Field(alias="schema")]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
    runtime: Annotated[
        Literal["tensorrt_llm", "reference"],
        Field(description="tensorrt_llm: a compiled engine on GPUs; reference: this project's engine on a CPU"),
    ] = "tensorrt_llm"
    model: Model
    engine: Engine
    lora: Lora
    serving: Serving = Serving()
    text: Text = Text()

    def shape(self) -> EngineShape:
        """The shape the built engine will have."""
        return shape_of(self.model, self.engine, self.lora)

    def geometry(self) -> CacheGeometry:
        """Page layout of its LoRA caches with the profile's parameters."""
        return CacheGeometry.of(
            self.shape(),
            optimal_rank=self.serving.lora_optimal_rank,
            max_rank=self.serving.lora_max_rank or self.lora.max_rank,
        )


SECTIONS: dict[str, type[_Section]] = {
    "model": Model,
    "engine": Engine,
    "lora": Lora,
    "serving": Serving,
    "text": Text,
}


def shape_of(model: Model, engine: Engine, lora: Lora) -> EngineShape:
    """The engine shape of three sections of a profile."""
    return EngineShape(
        version=engine.tensorrt_llm,
        dtype=engine.dtype,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size or max(1, model.hidden_size // model.num_heads),
        num_experts=model.num_experts,
        tp_size=engine.tensor_parallel,
        pp_size=engine.pipeline_parallel,
        quant_algo=QUANT_ALGOS[engine.quantization],
        lora_plugin=engine.dtype if lora.plugin_dtype == "auto" else lora.plugin_dtype,
        lora_modules=tuple(lora.modules),
        max_lora_rank=lora.max_rank,
        max_batch_size=engine.max_batch_size,
        max_seq_len=engine.max_seq_len,
        max_input_len=engine.max_input_len or 0,
    )


def load_profile(path: Path) -> EngineProfile:
    """Read and check a profile.

    Raises:
        ProfileError: every problem, with file and line. Warnings do not raise: `check_profile` has them.
    """
    profile, problems = check_profile(path)
    errors = [problem for problem in problems if not problem.warning]
    if errors or profile is None:
        raise ProfileError(errors)
    return profile


def check_profile(path: Path) -> tuple[EngineProfile | None, list[Problem]]:
    """A profile and everything that is to be said of it, in the order of lines; None if it cannot be used."""
    from trtllm_lora.profile_fields import field_problem
    from trtllm_lora.profile_rules import rule_problems

    document = read_yaml(path)
    if document.data is None:
        return None, document.problems
    problems, profile = list(document.problems), None
    try:
        profile = EngineProfile.model_validate(document.data)
    except ValidationError as error:
        problems += [field_problem(document, details) for details in error.errors()]
    wrong = {problem.where for problem in problems}
    problems += rule_problems(document, _good_values(document.data, wrong, path.parent))
    problems.sort(key=lambda problem: problem.line)
    return (None if any(not problem.warning for problem in problems) else profile), problems


def schema() -> dict[str, Any]:
    """JSON schema of a profile, for editors and other programs."""
    return EngineProfile.model_json_schema(by_alias=True)


def _good_values(data: Any, wrong: set[str], folder: Path) -> dict[str, Any]:
    """Dotted name -> value of every field that is right by itself, defaults included: what rules can be held to."""
    values: dict[str, Any] = {"folder": str(folder)}
    if "runtime" not in wrong:  # else every rule of either runtime would guess
        values["runtime"] = data.get("runtime", "tensorrt_llm")
    for section, cls in SECTIONS.items():
        given = data.get(section, {})
        given = given if isinstance(given, dict) else {}
        blank = cls.model_construct()
        for name, field in cls.model_fields.items():
            place = f"{section}.{name}"
            if name in given:
                if not any(each == place or each.startswith(f"{place}.") for each in wrong):
                    checked = cls.__pydantic_validator__.validate_assignment(blank.model_copy(), name, given[name])
                    values[place] = getattr(checked, name)
            elif not field.is_required():
                values[place] = field.get_default(call_default_factory=True)
    return values
