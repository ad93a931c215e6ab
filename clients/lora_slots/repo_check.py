"""`repo check`: what goes wrong with LoRA model repositories, told before a server does. Works on anybody's repository.

Each check is a function over the repository; its findings name rules, which repo_rules.py explains. Sources are users'
threads: B is tensorrtllm_backend, T is TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lora_slots import repo_adapters, repo_engine, repo_ensemble, repo_models
from lora_slots.repo_files import OPEN_DIM, WIRE, Finding, ModelFiles, Repository, read_repository
from lora_slots.repo_parameters import is_share, is_whole, value_problem
from lora_slots.repository import CACHE_PARAMETERS, template_folder
from trtllm_lora import CacheGeometry, ContractError

_KEPT_AS_TEXT = ("gpt_model_path", "tokenizer_dir", "gpt_model_type", "lora_prefetch_dir")
_SHARES = {"kv_cache_free_gpu_mem_fraction": 0.9, "lora_cache_gpu_memory_fraction": 0.02}
"""Shares of the memory, which the plan sizes, and what is in force without them."""
_OURS = re.compile(r"from (adapter_slots|reference_engine|lora_slots)\b")
"""Models of this project, which carry bfloat16 (the router by binds, the reference engine by DLPack)."""
_CORE = ("input_ids", "input_lengths", "request_output_len", "output_ids", "sequence_length")
"""Tensors without which no request can be made, or no answer read."""
_RENAMED = {"min_length": "min_tokens", "random_seed": "seed"}
Check = Callable[[Repository], Iterator[Finding]]


def check_repository(root: Path, engine: Path | None = None, bundles: Path | None = None) -> list[Finding]:
    """Everything wrong with a repository, by file and line; empty if nothing is.

    Raises:
        Refused: no repository there. ShapeError: `engine` is given and is none.
    """
    repository = read_repository(root, engine, bundles)
    found = list(repository.findings)
    for check in (*CHECKS, *repo_engine.CHECKS, *repo_models.CHECKS, *repo_adapters.CHECKS, *repo_ensemble.CHECKS):
        found += check(repository)
    return sorted(set(found), key=lambda each: (each.file, each.line, each.rule))


def _type_name(value: int) -> str:
    from tritonclient.grpc import model_config_pb2

    return str(model_config_pb2.DataType.Name(value))


def _placeholders(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        if "${" in model.config.backend:
            what = f"backend {model.config.backend} is not filled"
            yield Finding(model.file, model.line_of("backend:"), "placeholder", what, "write tensorrtllm")
        open_keys = [key for key, entry in model.config.parameters.items() if "${" in entry.string_value]
        for key in (key for key in open_keys if key in _KEPT_AS_TEXT):
            what = f"{key} is the text {model.config.parameters[key].string_value}"
            yield Finding(model.file, model.line(key), "placeholder-text", what, "fill it, or leave the parameter out")
        for key in (key for key in open_keys if key in _SHARES):
            what = f"{key} is not filled, so its default {_SHARES[key]} is in force"
            fix = "fill it; `lora-slots plan` says with what"
            yield Finding(model.file, model.line(key), "placeholder-default", what, fix, warning=True)
        others = sorted((model.line(key), key) for key in open_keys if key not in (*_KEPT_AS_TEXT, *_SHARES))
        if others:
            names = ", ".join(key for _, key in others)
            what = f"not filled, so their defaults are in force, with warnings in the log: {names}"
            yield Finding(
                model.file, others[0][0], "placeholder-default", what, "leave these parameters out", warning=True
            )


def _files(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        if model.config.name and model.config.name != model.name:
            what = f"the model is named {model.config.name}, its folder {model.name}: Triton refuses it"
            yield Finding(model.file, model.line_of("name:"), "model-name", what, f"write {model.name}")
        versions = [path for path in model.folder.iterdir() if path.is_dir() and path.name.isdigit()]
        if not versions:
            yield Finding(
                model.file, 1, "no-version", "no version folder: Triton finds no version to load", "make a folder 1"
            )
        elif model.is_python and not any((path / "model.py").is_file() for path in versions):
            what = "the python backend finds no model.py"
            yield Finding(
                model.file, model.line_of("backend:"), "no-model-py", what, f"put one into {model.folder / '1'}"
            )


def _tensors(repository: Repository) -> Iterator[Finding]:
    """Inputs and outputs against the ones of the 1.2 line."""
    model = repository.tensorrt_llm
    if model is None:
        what = "no model tensorrt_llm: the ensemble and the clients look for this name"
        yield Finding(str(repository.root), 1, "no-tensorrt-llm", what, "render one with `lora-slots repo render`")
        return
    stock = _stock("tensorrt_llm")
    for old, new in _RENAMED.items():
        if model.tensor(old) is not None:
            yield Finding(model.file, model.line(old), "renamed-tensor", f"{old} was renamed in 1.x", f"write {new}")
    for kind, mine, theirs in (
        ("input", model.config.input, stock.input),
        ("output", model.config.output, stock.output),
    ):
        have = {tensor.name: tensor for tensor in mine}
        for tensor in theirs:
            found = have.get(tensor.name)
            lora = tensor.name.startswith("lora_")
            if found is None:
                core = tensor.name in _CORE
                means = ": LoRA requests are refused by Triton" if lora else ": no request is answered" if core else ""
                what = f"{kind} {tensor.name} is missing{means}"
                fix = f"add {tensor.name} {repository.wire_type(tensor)} {list(tensor.dims)}"
                yield Finding(model.file, 1, "tensor-missing", what, fix, not lora and not core)
            else:
                yield from _tensor(model, kind, found, tensor)


def _tensor(model: ModelFiles, kind: str, found: Any, stock: Any) -> Iterator[Finding]:
    variable = stock.name == "lora_weights" or stock.name.endswith(("logits", "features", "table"))
    variable = variable or model.is_open(found)
    if found.data_type != stock.data_type and not variable:
        what = f"{kind} {stock.name} is {_type_name(found.data_type)}"
        yield Finding(model.file, model.line(stock.name), "tensor-type", what, f"write {_type_name(stock.data_type)}")
    columns = (stock.name == "lora_config" and list(found.dims) == [-1, 4]) or OPEN_DIM in found.dims
    if list(found.dims) != list(stock.dims) and not columns:
        what = f"{kind} {stock.name} has dims {list(found.dims)}"
        yield Finding(model.file, model.line(stock.name), "tensor-dims", what, f"write {list(stock.dims)}")
    if stock.name == "lora_task_id" and stock.HasField("reshape") and not found.HasField("reshape"):
        what = "lora_task_id has no reshape: the backend gets [1] and fails to extract a scalar"
        yield Finding(model.file, model.line(stock.name), "task-id-reshape", what, "add reshape { shape: [ ] }")


def _stock(name: str) -> Any:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    text = (template_folder() / name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def _weights_type(repository: Repository) -> Iterator[Finding]:
    """B#403, B#671, T#2434: the runtime refuses weights of another dtype than the engine's."""
    engine = repository.engine
    for model in repository.on_the_path():
        tensor = model.tensor("lora_weights")
        if tensor is None:
            fix = f"add lora_weights {WIRE[engine.dtype] if engine else 'in the dtype of the engine'} [-1, -1]"
            yield Finding(model.file, 1, "lora-pair", "lora_config without lora_weights", fix)
            continue
        found = _type_name(tensor.data_type)
        if engine is not None and found != WIRE[engine.dtype] and not model.is_open(tensor):
            what = (
                f"lora_weights is {found}, the engine's dtype is {engine.dtype}: no adapter can be sent (B#671, T#2434)"
            )
            yield Finding(model.file, model.line("lora_weights"), "lora-type", what, f"write {WIRE[engine.dtype]}")
        copies = "as_numpy" in model.code and not _OURS.search(model.code)
        if engine is not None and engine.dtype == "bfloat16" and copies:
            what = "bfloat16 adapters cannot pass this model.py, which copies tensors through numpy (B#671)"
            fix = "send them to tensorrt_llm directly, or serve the C++ backend through an ensemble"
            yield Finding(model.file, model.line("lora_weights"), "lora-numpy", what, fix)


def _cache(repository: Repository) -> Iterator[Finding]:
    """B#559, B#560, T#1562: cache sizes with which an engine does not start, or holds fewer adapters than believed."""
    model, engine = repository.tensorrt_llm, repository.engine
    if model is None:
        return
    if model.parameter("lora_cache_gpu_memory_fraction") is None and not model.is_python:
        what = "lora_cache_gpu_memory_fraction is unset: 0.02 is in force, although the log says 0.05"
        yield Finding(model.file, 1, "cache-fraction", what, "set it; `lora-slots plan` says to what", warning=True)
    for key in _SHARES:
        text = model.parameter(key)
        if text is not None and not is_share(text):
            what = f"{key} is {text[:40]!r}, no share of the memory"
            yield Finding(model.file, model.line(key), "cache-number", what, "write a number above 0 and below 1")
    if engine is None or not engine.lora_enabled:
        return
    sizes: dict[str, int] = {}
    for key, default in (
        ("lora_cache_optimal_adapter_size", 8),
        ("lora_cache_max_adapter_size", 64),
        ("lora_cache_host_memory_bytes", 2**30),
    ):
        text = model.parameter(key)
        if text is not None and not is_whole(text):
            what = f"{key} is {text[:40]!r}, no number: the default {default} is used"
            yield Finding(model.file, model.line(key), "cache-number", what, "write a whole number")
        sizes[key] = int(text) if text and is_whole(text) else default
    optimal, largest, host = sizes.values()
    if largest < engine.max_lora_rank:
        what = f"lora_cache_max_adapter_size {largest} is below the engine's max_lora_rank {engine.max_lora_rank}"
        line = model.line("lora_cache_max_adapter_size")
        yield Finding(model.file, line, "cache-rank", what, f"write {engine.max_lora_rank}")
    try:
        CacheGeometry.of(engine, optimal_rank=optimal, max_rank=largest).num_pages(host)
    except ContractError as error:
        line = model.line("lora_cache_host_memory_bytes")
        yield Finding(
            model.file, line, "cache-memory", f"the engine would not start: {error}", "raise it (`lora-slots plan`)"
        )
    router = repository.models.get("lora_router")
    for key in sizes:
        mine, theirs = (router.parameter(key) if router else None), model.parameter(key)
        if router is not None and (mine or "") != (theirs or ""):
            what = (
                f"{key} is {mine or 'unset'} here and {theirs or 'unset'} in tensorrt_llm: the slot manager miscounts"
            )
            yield Finding(router.file, router.line(key), "cache-mirror", what, "write the same in both")


def _serving(repository: Repository) -> Iterator[Finding]:
    model = repository.tensorrt_llm
    if model is None:
        return
    if str(model.parameter("gpt_model_type")).lower() == "v1":
        what = "gpt_model_type V1 does not feed LoRA tensors (B#511)"
        yield Finding(model.file, model.line("gpt_model_type"), "batching-v1", what, "write inflight_fused_batching")
    if not model.config.model_transaction_policy.decoupled:
        streams = _streams(repository)
        what = "not decoupled: streaming is refused" + (f", and {streams} streams" if streams else "")
        fix = "write decoupled: true"
        yield Finding(model.file, model.line_of("decoupled"), "not-decoupled", what, fix, warning=not streams)
    told_elsewhere = ("gpt_model_type", *_SHARES, *CACHE_PARAMETERS)
    for key in (key for key in model.config.parameters if key not in told_elsewhere):
        text = model.parameter(key)
        problem = value_problem(key, text) if text is not None else None
        if problem:
            yield Finding(model.file, model.line(key), "parameter-value", *problem)
    for group in model.config.instance_group:
        if group.count > 1:
            what = f"{group.count} instances: each has a LoRA cache of its own, and an adapter is in one of them only"
            yield Finding(model.file, model.line_of("count"), "instances", what, "write count: 1")
    router = repository.models.get("lora_router")
    if router is not None and [group.count for group in router.config.instance_group] != [1]:
        what = "lora_router must be one instance: two would be two slot managers for one engine"
        yield Finding(router.file, router.line_of("count"), "router-instances", what, "write count: 1")


def _streams(repository: Repository) -> str:
    """A model beside the engine's that is there for streams, if there is one; else ""."""
    others = (model for name, model in repository.models.items() if name != "tensorrt_llm")
    return next((model.name for model in others if model.config.model_transaction_policy.decoupled), "")


CHECKS: tuple[Check, ...] = (_placeholders, _files, _tensors, _weights_type, _cache, _serving)
