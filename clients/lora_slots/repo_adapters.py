"""Rules of `repo check` about adapters on disk, task ids and the ensemble's wiring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lora_slots.repo_files import Finding, ModelFiles, Repository
from trtllm_lora import MAX_TASK_ID
from trtllm_lora.bundle import CONFIG_FILE, WEIGHTS_FILE
from trtllm_lora.tensors import STORAGE

Rule = Callable[[Repository], Iterator[Finding]]


def _columns(repository: Repository) -> Iterator[Finding]:
    """B#750: stock configs declare 3 columns, the converter has written 4 since DoRA."""
    declared = {}
    for model in repository.on_the_path():
        tensor = model.tensor("lora_config")
        if tensor is not None and list(tensor.dims)[:1] == [-1]:
            declared[model.name] = tensor.dims[-1]
    if len(set(declared.values())) > 1:
        for name, columns in declared.items():
            model = repository.models[name]
            others = ", ".join(f"{other} has {n}" for other, n in declared.items() if n != columns)
            what = f"lora_config has {columns} columns here, {others}"
            yield Finding(model.file, model.line("lora_config"), "lora-columns", what, "write the same in every model")
    on_disk = {columns: file for file, columns in _bundle_columns(repository)}
    for columns, file in sorted(on_disk.items()):
        for name, allowed in declared.items():
            if columns != allowed:
                model = repository.models[name]
                why = "DoRA, or NVIDIA's converter since 0.18" if columns == 4 else "plain LoRA"
                what = (
                    f"lora_config has dims [-1, {allowed}], and {file.parent.name} has {columns} columns ({why}; B#750)"
                )
                fix = f"write [-1, {columns}] in every model on the path, and keep one form of bundles"
                yield Finding(model.file, model.line("lora_config"), "lora-columns", what, fix)


def _bundle_columns(repository: Repository) -> Iterator[tuple[Path, int]]:
    folders = [repository.bundles] if repository.bundles else []
    router, engine = repository.models.get("lora_router"), repository.tensorrt_llm
    registry = router.parameter("registry") if router else None
    prefetch = engine.parameter("lora_prefetch_dir") if engine else None
    folders += [Path(registry).parent / "bundles"] if registry and "://" not in registry else []
    folders += [Path(prefetch)] if prefetch else []
    for folder in folders:
        for file in sorted(folder.glob(f"*/{CONFIG_FILE}")) if folder.is_dir() else ():
            try:
                table = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError):
                continue  # not an array: the prefetch rule tells it, and a bundle's own check
            if table.ndim == 3:
                yield file, int(table.shape[2])


def _prefetch(repository: Repository) -> Iterator[Finding]:
    """B#718, B#791: a prefetch directory fails in silence in five ways."""
    model, engine = repository.tensorrt_llm, repository.engine
    text = model.parameter("lora_prefetch_dir") if model else None
    if model is None or text is None:
        return

    def finding(what: str, fix: str) -> Finding:
        return Finding(model.file, model.line("lora_prefetch_dir"), "prefetch", what, fix)

    if engine is not None and engine.dtype == "bfloat16":
        what = "lora_prefetch_dir on a bfloat16 engine: the runtime cannot read bfloat16 .npy files ('|V2')"
        yield finding(what, "leave it out and send adapters in requests (a slot manager does), or build for float16")
    if model.is_python and "lora_prefetch_dir" in model.code:
        yield finding("NVIDIA's python model reads lora_prefetch_dir as a number and fails", "use backend tensorrtllm")
    folder = Path(text)
    if not folder.is_dir():
        yield finding(
            f"lora_prefetch_dir {text} does not exist, which the runtime passes over in silence", "correct it"
        )
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            for what, fix in _prefetch_folder(path, engine.dtype if engine else None):
                yield finding(f"lora_prefetch_dir/{path.name}: {what}", fix)


def _prefetch_folder(path: Path, dtype: str | None) -> Iterator[tuple[str, str]]:
    if not (path.name.isascii() and path.name.isdigit()):
        yield "is not a task id, so it is skipped", f"name it with a number from 1 to {MAX_TASK_ID}"
    elif int(path.name) == 0:
        yield "task id 0 means `no adapter` to the stock clients", f"name it with a number from 1 to {MAX_TASK_ID}"
    elif int(path.name) > MAX_TASK_ID:
        yield "is read as int32 and overflows: the engine does not start", f"use at most {MAX_TASK_ID}"
    missing = [name for name in (WEIGHTS_FILE, CONFIG_FILE) if not (path / name).is_file()]
    if missing:
        yield f"has no {' and no '.join(missing)}", "convert the adapter into it (`lora-slots convert`)"
        return
    try:
        found = np.load(path / WEIGHTS_FILE, mmap_mode="r", allow_pickle=False).dtype
    except (OSError, ValueError, EOFError) as error:
        yield f"{WEIGHTS_FILE} is not a readable array: {error}", "convert the adapter again"
        return
    if dtype in ("float16", "float32") and found != STORAGE[dtype]:
        yield (
            f"weights are {found}, the engine's dtype is {dtype}: the adapter is not applied, silently (B#791)",
            f"convert with --dtype {dtype}",
        )


def _zero_ids(repository: Repository) -> Iterator[Finding]:
    """A warm-up request with zeros is a request for task 0."""
    for model in repository.models.values():
        for warmup in model.config.model_warmup:
            if "lora_task_id" in warmup.inputs and warmup.inputs["lora_task_id"].zero_data:
                what = f"warm-up {warmup.name!r} sends lora_task_id 0, which stock clients take for `no adapter`"
                fix = f"give input_data_file with the adapter's id, 1 to {MAX_TASK_ID}"
                yield Finding(model.file, model.line_of("model_warmup"), "zero-task-id", what, fix)


def _wiring(repository: Repository) -> Iterator[Finding]:
    """The ensemble's maps: models and tensors that exist, required inputs that are fed, equal types on both ends."""
    for model in repository.models.values():
        if model.config.WhichOneof("scheduling_choice") == "ensemble_scheduling":
            types = {
                tensor.name: (tensor.data_type, f"the ensemble's input {tensor.name}") for tensor in model.config.input
            }
            for step in model.config.ensemble_scheduling.step:
                yield from _step(repository, model, step, types)
            yield from _lora_through(model)


def _step(repository: Repository, model: ModelFiles, step: Any, types: dict[str, tuple[int, str]]) -> Iterator[Finding]:
    line = model.line_of(f'"{step.model_name}"')
    other = repository.models.get(step.model_name)
    if other is None:
        what = f"step {step.model_name} is no model of this repository"
        yield Finding(model.file, line, "ensemble", what, f"add the folder {step.model_name}")
        return
    for name, source in step.input_map.items():
        tensor = other.tensor(name)
        if tensor is None:
            what = f"{step.model_name} has no input {name}"
            yield Finding(model.file, line, "ensemble", what, "correct the input_map")
        elif source not in types:
            what = f"{source}, wanted by {step.model_name}, is given by no earlier step and no input"
            yield Finding(model.file, line, "ensemble", what, "correct the input_map")
        elif types[source][0] != tensor.data_type:
            what = (
                f"{name} of {step.model_name} and {types[source][1]} have different types: Triton refuses the ensemble"
            )
            yield Finding(model.file, line, "ensemble", what, f"make both the same (see {other.file})")
    for tensor in other.config.input:
        if not tensor.optional and tensor.name not in step.input_map:
            what = f"{step.model_name} needs {tensor.name}, and nothing feeds it"
            yield Finding(model.file, line, "ensemble", what, "add it to the input_map")
    for name, target in step.output_map.items():
        tensor = other.output(name)
        if tensor is None:
            what = f"{step.model_name} has no output {name}"
            yield Finding(model.file, line, "ensemble", what, "correct the output_map")
        else:
            types[target] = (tensor.data_type, f"{name} of {step.model_name}")


def _lora_through(model: ModelFiles) -> Iterator[Finding]:
    """B#406: LoRA tensors that stop half way are answered by the base, without an error."""
    for step in model.config.ensemble_scheduling.step:
        if step.model_name == "tensorrt_llm":
            fed = set(step.input_map)
            if fed & {"lora_weights", "lora_config"} and "lora_task_id" not in fed:
                what = (
                    "lora_weights reach tensorrt_llm without lora_task_id: they are ignored, the base answers (B#413)"
                )
                yield Finding(model.file, model.line_of('"tensorrt_llm"'), "ensemble", what, "map lora_task_id too")
            elif "lora_task_id" not in fed:
                what = "lora_task_id does not reach tensorrt_llm: every adapter is answered by the base (B#406)"
                yield Finding(model.file, model.line_of('"tensorrt_llm"'), "ensemble", what, "map lora_task_id")


RULES: tuple[Rule, ...] = (_columns, _prefetch, _zero_ids, _wiring)
