"""Rules of `repo check` about what a model says of itself: backend, batches, parameters that it needs to run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from lora_slots.repo_files import Finding, ModelFiles, Repository

Check = Callable[[Repository], Iterator[Finding]]
_BACKENDS = (
    *("python", "tensorrtllm", "tensorrt", "onnxruntime", "pytorch", "tensorflow", "openvino", "dali", "fil", "vllm"),
    *("identity", "repeat", "square"),
)
"""Backends that Triton's images bring; anybody may have others."""
_ALLOWED = {"tensorrt_llm": ("tensorrtllm", "python")} | dict.fromkeys(
    ("preprocessing", "lora_router", "postprocessing"), ("python",)
)
_NEEDED = {
    "tensorrt_llm": ("gpt_model_path",),
    "preprocessing": ("tokenizer_dir",),
    "postprocessing": ("tokenizer_dir",),
    "lora_router": ("engine_dir", "registry", "engine_url"),
}
"""Model -> parameters that have no default."""
_BATCHING = ("inflight_fused_batching", "inflight_batching", "V1", "v1")
LORA_INPUTS = ("lora_task_id", "lora_weights", "lora_config")


def _backends(repository: Repository) -> Iterator[Finding]:
    for model in repository.models.values():
        named, line = str(model.config.backend), model.line_of("backend:")
        allowed = _ALLOWED.get(model.name, _BACKENDS)
        if named in allowed or "${" in named or (not named and model.config.platform):
            continue
        near = difflib.get_close_matches(named, allowed, n=1) or list(allowed[:1]) * (model.name in _ALLOWED)
        if not named:
            fix = f'write backend: "{near[0] if near else "python"}"'
            yield Finding(model.file, 1, "backend", "has no backend: Triton cannot load it", fix)
        elif near:
            yield Finding(model.file, line, "backend", f"no backend {named[:80]} for {model.name}", f"write {near[0]}")


def _batches(repository: Repository) -> Iterator[Finding]:
    model = repository.tensorrt_llm
    if model is not None and model.config.max_batch_size < 1:
        size = model.config.max_batch_size
        what = f"max_batch_size {size}: tensors then have no batch dimension, and every request's has one"
        batch = repository.engine.max_batch_size if repository.engine else 64
        yield Finding(
            model.file, model.line_of("max_batch_size"), "no-batch", what, f"write {batch}, as the engine has"
        )


def _parameters(repository: Repository) -> Iterator[Finding]:
    for name, keys in _NEEDED.items():
        model = repository.models.get(name)
        for key in keys if model is not None else ():
            if model is not None and not _text(model, key):
                what = f"{key} is missing, without which {name} does not start"
                fix = f"add the parameter {key}"
                emptied = name == "lora_router" and key in model.config.parameters  # on purpose: see migration.md
                if emptied:
                    what = f"{key} is empty: it has to come from the environment (LORA_SLOTS_{key.upper()})"
                    fix = "write it, unless the server's environment says it"
                yield Finding(model.file, model.line(key), "parameter-missing", what, fix, warning=emptied)
    model = repository.tensorrt_llm
    kind = model.parameter("gpt_model_type") if model else None
    if model is not None and kind is not None and kind not in _BATCHING:
        what = f"gpt_model_type {kind[:80]!r} is none of {', '.join(_BATCHING[:3])}: the model does not load"
        yield Finding(model.file, model.line("gpt_model_type"), "batching-type", what, f"write {_BATCHING[0]}")


def _text(model: ModelFiles, key: str) -> str:
    """A parameter as it stands, placeholders too, which have rules of their own."""
    return str(model.config.parameters[key].string_value) if key in model.config.parameters else ""


def _ensemble(repository: Repository) -> Iterator[Finding]:
    models = repository.models.values()
    leads = any(model.config.WhichOneof("scheduling_choice") == "ensemble_scheduling" for model in models)
    broken = {finding.file for finding in repository.findings if finding.rule == "not-a-config"}
    hidden = str(repository.root / "ensemble" / "config.pbtxt") in broken
    if leads or hidden or repository.tensorrt_llm is None or "tensorrt_llm_bls" in repository.models:
        return
    text_steps = bool({"preprocessing", "postprocessing"} & set(repository.models))
    what = "no ensemble: nothing leads a text through the models, clients can only send token ids to tensorrt_llm"
    fix = "render one with `lora-slots repo render`"
    yield Finding(str(repository.root), 1, "no-ensemble", what, fix, warning=not text_steps)


def _optional(repository: Repository) -> Iterator[Finding]:
    for model in repository.on_the_path():
        for name in LORA_INPUTS:
            tensor = model.tensor(name)
            if tensor is not None and not tensor.optional:
                what = (
                    f"input {name} is not optional: requests for the base, or by task id alone, are refused by Triton"
                )
                yield Finding(model.file, model.line(name), "tensor-optional", what, "add optional: true")


CHECKS: tuple[Check, ...] = (_backends, _batches, _parameters, _ensemble, _optional)
