"""A PEFT adapter directory: adapter_config.json and one file of tensors.

PEFT takes adapter_model.safetensors before adapter_model.bin, and reads no other name and no shards. The `.bin` is
read without running anything in it (torch_zip.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peft_to_trtllm.errors import InputError
from peft_to_trtllm.file_hash import open_regular
from peft_to_trtllm.report import Findings
from peft_to_trtllm.strict_json import JsonProblem, parse_object
from peft_to_trtllm.tensor_file import FileProblem, TensorFile, open_safetensors

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
_CONFIG_LIMIT = 16 << 20

_LOOK_ALIKES = {
    "adapters.safetensors": "an MLX adapter: factors transposed, another scale; convert it to PEFT first",
    "adapter_0.pt": "a torchtune adapter of its own format; save it with adapter_model.safetensors (PEFT format)",
    "adapter_model.safetensors.index.json": "a sharded adapter, which PEFT does not read either; save it in one file",
    "pytorch_lora_weights.safetensors": "a diffusers LoRA, not a PEFT adapter of a language model",
    "model_config.yaml": "a NeMo checkpoint; export it to PEFT",
    "model.safetensors": "a whole model, not an adapter",
    "model.safetensors.index.json": "a whole model, not an adapter",
    "pytorch_model.bin": "a whole model, not an adapter",
}


class Adapter(NamedTuple):
    """An open adapter: its config as parsed, its tensors by name."""

    path: Path
    config: Mapping[str, Any]
    config_sha256: str
    file: TensorFile

    @property
    def name(self) -> str:
        """Name of the directory: how the adapter is called where nobody names it."""
        return self.path.resolve().name


def open_adapter(path: Path, problems: Findings) -> Adapter | None:
    """Open a directory; None if it cannot be read as an adapter, with every reason in `problems`.

    Raises:
        InputError: the directory is not there, or the disk refuses.
    """
    try:
        names = {item.name for item in path.iterdir()}
    except NotADirectoryError:
        _look_alike_file(path, problems)
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; an adapter is a directory with {CONFIG}") from None
    config, digest = _read_config(path, names, problems)
    file = _open_tensors(path, names, problems)
    if config is None or file is None:
        if file:
            file.close()
        return None
    return Adapter(path, config, digest, file)


def _read_config(path: Path, names: set[str], problems: Findings) -> tuple[dict[str, Any] | None, str]:
    if CONFIG not in names:
        problems.add("adapter-files", str(path / CONFIG), "missing", _advice(names))
        return None, ""
    try:
        with os.fdopen(open_regular(path / CONFIG), "rb") as source:
            data = source.read(_CONFIG_LIMIT + 1)
        return parse_object(data, limit=_CONFIG_LIMIT), hashlib.sha256(data).hexdigest()
    except JsonProblem as problem:
        problems.add("corrupt-file", str(path / CONFIG), str(problem), "one JSON object as PEFT writes it")
        return None, ""
    except OSError as error:
        raise InputError(f"{path / CONFIG}: {error.strerror or error}") from None


def _open_tensors(path: Path, names: set[str], problems: Findings) -> TensorFile | None:
    name = next((name for name in (SAFETENSORS, PICKLE) if name in names), None)
    if name is None:
        problems.add(
            "adapter-files", str(path / SAFETENSORS), "missing, and no adapter_model.bin either", _advice(names)
        )
        return None
    try:
        if name == SAFETENSORS:
            return open_safetensors(path / name)
        from peft_to_trtllm.torch_zip import open_torch_zip

        return open_torch_zip(path / name)
    except FileProblem as problem:
        advice = "copy or save the adapter again; a safetensors file written by PEFT passes"
        problems.add(problem.rule, str(path / name), str(problem), advice)
        return None
    except OSError as error:
        raise InputError(f"{path / name}: {error.strerror or error}") from None


def _advice(names: set[str]) -> str:
    for name, meaning in _LOOK_ALIKES.items():
        if name in names:
            return f"{name} is here: {meaning}"
    if any(name.endswith(".nemo") for name in names):
        return "a .nemo file is here: a NeMo adapter (fused qkv, no alpha); export it to PEFT"
    if any(name.startswith("adapter_model-") for name in names):
        return _LOOK_ALIKES["adapter_model.safetensors.index.json"]
    return f"a PEFT adapter is a directory with {CONFIG} and {SAFETENSORS}"


def _look_alike_file(path: Path, problems: Findings) -> None:
    wanted = f"a PEFT adapter is a directory with {CONFIG} and {SAFETENSORS}; give the directory"
    if path.suffix == ".nemo":
        wanted = "a .nemo file is a NeMo adapter (fused qkv, no alpha); export it to PEFT"
    problems.add("adapter-files", str(path), "a file, not a directory", wanted)
