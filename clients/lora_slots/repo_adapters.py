"""Rules of `repo check` about adapters on disk and task ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lora_slots.repo_files import OPEN_DIM, Finding, Repository
from trtllm_lora import MAX_TASK_ID
from trtllm_lora.arrays import load_array
from trtllm_lora.bundle import CONFIG_FILE, WEIGHTS_FILE
from trtllm_lora.tensors import STORAGE

Check = Callable[[Repository], Iterator[Finding]]
MESSAGE_BYTES = 2**31 - 1
"""Largest protobuf message."""


def _columns(repository: Repository) -> Iterator[Finding]:
    """B#750: stock configs declare 3 columns, the converter has written 4 since DoRA."""
    declared = {}
    for model in repository.on_the_path():
        tensor = model.tensor("lora_config")
        if tensor is not None and list(tensor.dims)[:1] == [-1] and tensor.dims[-1] != OPEN_DIM:
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
                yield Finding(model.file, model.line("lora_config"), "bundle-columns", what, fix)


def _bundle_columns(repository: Repository) -> Iterator[tuple[Path, int]]:
    engine = repository.tensorrt_llm
    prefetch = engine.parameter("lora_prefetch_dir") if engine else None
    for folder in (*_bundle_folders(repository), *([Path(prefetch)] if prefetch else [])):
        for file in _arrays(folder, CONFIG_FILE):
            table = _header(file)
            if table is not None and table.ndim == 3:
                yield file, int(table.shape[2])


def _bundle_folders(repository: Repository) -> list[Path]:
    """Where the adapters lie that will be sent: what was given, and what the router's registry stands beside."""
    router = repository.models.get("lora_router")
    registry = router.parameter("registry") if router else None
    given = [repository.bundles] if repository.bundles else []
    return given + ([Path(registry).parent / "bundles"] if registry else [])


def _arrays(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"*/{name}")) if folder.is_dir() else []


def _header(file: Path) -> Any:
    """The array, mapped; None if it is none, which is for a bundle's own check to tell, or the prefetch rule."""
    array, _ = load_array(file)
    return array if isinstance(array, np.ndarray) else None


def _bundles(repository: Repository) -> Iterator[Finding]:
    """T#2434, B#718: what the engine, or the wire, refuses of every request."""
    model, engine = repository.tensorrt_llm, repository.engine
    if model is None:
        return
    line = model.line("lora_weights")
    for folder in _bundle_folders(repository):
        for file in _arrays(folder, WEIGHTS_FILE):
            weights = _header(file)
            if weights is None:
                yield _unreadable(model.file, line, file)
                continue
            if engine is not None and weights.dtype not in _on_disk(engine.dtype):
                what = f"{file.parent.name}: weights are {weights.dtype}, the engine's dtype is {engine.dtype} (T#2434)"
                yield Finding(model.file, line, "bundle-type", what, f"convert with --dtype {engine.dtype}")
            if "lora_router" not in repository.models and weights.nbytes >= MESSAGE_BYTES:
                size = f"{weights.nbytes / 2**30:.1f} GiB"
                what = f"{file.parent.name}: weights of {size}, and a gRPC message ends at 2 GiB (B#718)"
                fix = "send them through shared memory (lora_router does), or prefetch them"
                yield Finding(model.file, line, "bundle-size", what, fix)
        for file in _arrays(folder, CONFIG_FILE):
            table = _header(file)
            if table is None:
                yield _unreadable(model.file, line, file)
            elif table.dtype != np.int32 or table.ndim != 3 or table.shape[0] != 1 or table.shape[2] not in (3, 4):
                what = f"{file.parent.name}: lora_config is {table.dtype} {list(table.shape)}: every request is refused"
                fix = "convert the adapter again: it has to be int32 [1, rows, 3 or 4]"
                yield Finding(model.file, model.line("lora_config"), "bundle-config", what, fix)


def _unreadable(config: str, line: int, file: Path) -> Finding:
    what = f"{file.parent.name}: {file.name} is not a readable array"
    return Finding(config, line, "bundle-array", what, "convert the adapter again")


def _on_disk(dtype: str) -> tuple[Any, ...]:
    """Types that an engine dtype has in files: numpy knows no bfloat16, so it is two nameless bytes there."""
    return (STORAGE[dtype], np.dtype("V2")) if dtype == "bfloat16" else (STORAGE[dtype],)


def _prefetch(repository: Repository) -> Iterator[Finding]:
    """B#718, B#791: a prefetch directory fails in silence in many ways."""
    model, engine = repository.tensorrt_llm, repository.engine
    text = model.parameter("lora_prefetch_dir") if model else None
    if model is None or text is None:
        return

    def finding(rule: str, what: str, fix: str) -> Finding:
        return Finding(model.file, model.line("lora_prefetch_dir"), rule, what, fix)

    if engine is not None and engine.dtype == "bfloat16":
        what = "lora_prefetch_dir on a bfloat16 engine: the runtime cannot read bfloat16 .npy files ('|V2')"
        fix = "leave it out and send adapters in requests (a slot manager does), or build for float16"
        yield finding("prefetch-bfloat16", what, fix)
    if model.is_python and "lora_prefetch_dir" in model.code:
        what = "NVIDIA's python model reads lora_prefetch_dir as a number and fails"
        yield finding("prefetch-python", what, "use backend tensorrtllm")
    folder = Path(text)
    if not folder.is_dir():
        what = f"lora_prefetch_dir {text} does not exist, which the runtime passes over in silence"
        yield finding("prefetch-missing", what, "correct it")
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            for rule, what, fix in _prefetch_folder(path, engine.dtype if engine else None):
                yield finding(rule, f"lora_prefetch_dir/{path.name}: {what}", fix)


def _prefetch_folder(path: Path, dtype: str | None) -> Iterator[tuple[str, str, str]]:
    ids = f"name it with a number from 1 to {MAX_TASK_ID}"
    if not (path.name.isascii() and path.name.isdigit()):
        yield "prefetch-name", "is not a task id, so it is skipped", ids
    elif int(path.name) == 0:
        yield "prefetch-zero", "task id 0 means `no adapter` to the stock clients", ids
    elif int(path.name) > MAX_TASK_ID:
        what = "is read as int32 and overflows: the engine does not start"
        yield "prefetch-overflow", what, f"use at most {MAX_TASK_ID}"
    missing = [name for name in (WEIGHTS_FILE, CONFIG_FILE) if not (path / name).is_file()]
    if missing:
        yield (
            "prefetch-files",
            f"has no {' and no '.join(missing)}",
            "convert the adapter into it (`lora-slots convert`)",
        )
        return
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        if _header(path / name) is None:
            yield "prefetch-array", f"{name} is not a readable array", "convert the adapter again"
    weights = _header(path / WEIGHTS_FILE)
    if weights is not None and dtype in ("float16", "float32") and weights.dtype != STORAGE[dtype]:
        yield (
            "prefetch-type",
            f"weights are {weights.dtype}, the engine's dtype is {dtype}: the adapter is not applied, silently (B#791)",
            f"convert with --dtype {dtype}",
        )


def _zero_ids(repository: Repository) -> Iterator[Finding]:
    """A warm-up request with zeros is a request for task 0."""
    for model in repository.models.values():
        for warmup in model.config.model_warmup:
            if "lora_task_id" not in warmup.inputs:
                continue
            sent = warmup.inputs["lora_task_id"]
            file = model.folder / "warmup" / sent.input_data_file if sent.input_data_file else None
            if file is not None and not file.is_file():
                what, fix = f"warm-up {warmup.name!r} has no file {file}", "write the adapter's id there, 8 bytes"
                yield Finding(model.file, model.line_of(sent.input_data_file), "warmup-file", what, fix)
            elif sent.zero_data or (file is not None and not any(file.read_bytes()[:8])):
                what = f"warm-up {warmup.name!r} sends lora_task_id 0, which stock clients take for `no adapter`"
                fix = f"give input_data_file with the adapter's id, 1 to {MAX_TASK_ID}"
                yield Finding(model.file, model.line_of("model_warmup"), "zero-task-id", what, fix)


CHECKS: tuple[Check, ...] = (_columns, _bundles, _prefetch, _zero_ids)
