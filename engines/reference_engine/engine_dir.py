"""The engine directory: what `build_engine` writes and the engine opens.

config.json           as TensorRT-LLM writes it (version, pretrained_config, build_config)
rank0.safetensors     the fused weights (weights.py), the counterpart of rank0.engine
base                  symbolic link to the Hugging Face directory of the base (config and tokenizer)
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reference_engine.errors import EngineDirectoryError, UnsupportedModel
from reference_engine.llama_config import LlamaConfig
from reference_engine.weights import WEIGHTS_FILE, write_engine_weights
from trtllm_lora import LLAMA_MODULES, EngineShape, ShapeError
from trtllm_lora.shape import DTYPES, read_json

CONFIG_FILE = "config.json"
BASE_LINK = "base"
SUPPORTED_MODULES = (*LLAMA_MODULES, "attn_qkv", "mlp_gate_up")
"""LoRA modules that a Llama-family decoder has."""


@dataclass(frozen=True, slots=True)
class EngineDirectory:
    """An engine directory, opened and checked."""

    path: Path
    shape: EngineShape
    model: LlamaConfig

    @property
    def weights_file(self) -> Path:
        """The fused weights."""
        return self.path / WEIGHTS_FILE


def build_engine(
    base_dir: Path,
    out_dir: Path,
    *,
    lora_modules: Sequence[str] = LLAMA_MODULES,
    max_lora_rank: int = 64,
    dtype: str = "float32",
    max_batch_size: int = 16,
    max_seq_len: int = 2048,
    wrote: Callable[[int, int], object] | None = None,
) -> Path:
    """Write an engine directory for the base in `base_dir`; an engine already there is replaced in one step.

    `lora_modules` are TensorRT-LLM names (empty: an engine without LoRA); `max_seq_len` counts prompt and answer;
    `wrote(done, total)` counts tensors.

    Raises:
        UnsupportedModel: not a model this engine computes; modules or dtype it does not have; all reasons named.
        EngineDirectoryError: the base cannot be read or the directory cannot be written.
    """
    problems = [f"LoRA module {name} is not in a Llama-family engine" for name in lora_modules]
    problems = [text for text, name in zip(problems, lora_modules, strict=True) if name not in SUPPORTED_MODULES]
    if dtype not in DTYPES:
        problems.append(f"dtype {dtype} is none of {', '.join(DTYPES)}")
    problems += _attention_rule(lora_modules)
    model = LlamaConfig.read(base_dir, max_seq_len=max_seq_len)
    if "attn_dense" in lora_modules and model.num_heads * model.head_size != model.hidden_size:
        problems.append(
            f"attn_dense: {model.num_heads} heads of {model.head_size} are not the hidden size {model.hidden_size}, "
            "and the runtime would cut its rows in the wrong place"
        )
    if problems:
        raise UnsupportedModel("; ".join(problems))
    raw = read_json(base_dir / CONFIG_FILE)
    shape = EngineShape.from_hf_config(
        raw,
        dtype=dtype,
        lora_modules=lora_modules,
        max_lora_rank=max_lora_rank,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
    )
    config = shape.to_engine_config(raw["architectures"][0])
    config["build_config"]["max_num_tokens"] = max(256, max_batch_size)
    if not lora_modules:
        config["build_config"]["plugin_config"]["lora_plugin"] = None
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
        try:
            write_engine_weights(base_dir, model, dtype, temporary / WEIGHTS_FILE, wrote)
            (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            (temporary / BASE_LINK).symlink_to(base_dir.resolve())
            temporary.chmod(0o755)
            _swap(temporary, out_dir)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise EngineDirectoryError(f"{out_dir}: cannot be written: {error.strerror or error}") from None
    return out_dir


def open_engine(path: Path) -> EngineDirectory:
    """Open and check an engine directory (weights are checked when they are mapped).

    Raises:
        EngineDirectoryError: not an engine of the reference engine, or the base it links to is gone.
        UnsupportedModel: its base is not one this engine computes.
    """
    try:
        shape = EngineShape.from_engine_config(path)
    except ShapeError as error:
        raise EngineDirectoryError(str(error)) from None
    missing = [name for name in (WEIGHTS_FILE, BASE_LINK) if not (path / name).exists()]
    if missing:
        raise EngineDirectoryError(
            f"{path}: no {' and no '.join(missing)}; build it with reference_engine.build_engine"
        )
    if shape.tp_size * shape.pp_size != 1:
        raise EngineDirectoryError(
            f"{path}: built for {shape.tp_size * shape.pp_size} ranks, the reference engine is one"
        )
    model = LlamaConfig.read(path / BASE_LINK, max_seq_len=shape.max_seq_len)
    return EngineDirectory(path, shape, model)


def _attention_rule(modules: Sequence[str]) -> list[str]:
    """TensorRT-LLM's builder: attn_q, attn_k and attn_v are all enabled or all disabled (layers/attention.py)."""
    some = {"attn_q", "attn_k", "attn_v"} & set(modules)
    if some and len(some) < 3:
        return ["attn_q, attn_k and attn_v must be all enabled or all disabled in the engine"]
    return []


def _swap(temporary: Path, final: Path) -> None:
    """Put the new directory under its name; an old one is moved aside first and then removed."""
    if not final.exists():
        temporary.rename(final)
        return
    old = final.with_name(f".{final.name}-old-{os.getpid()}")
    final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old)
