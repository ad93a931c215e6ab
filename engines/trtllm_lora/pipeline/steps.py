"""The steps of a build and their keys: a step's key is the hash of its facts and of the keys before it.

    fetch (without --base)  ->  checkpoint  ->  engine (trtllm-build, verify, manifest)

A result lies in `<cache>/<step>-<key>/`. Equal inputs have equal keys, so a step whose result is there is not run.
Commands: TensorRT-LLM 1.2's own (`tensorrt_llm/commands/build.py`) and `pipeline/checkpoint.py` around its Python API.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lora.errors import ContractError
from trtllm_lora.files import replace_text, sha256_of
from trtllm_lora.profile import EngineProfile
from trtllm_lora.shape import read_json

PIPELINE = 1
"""Raised when the commands change meaning, so that old results are not taken for new ones."""
MEMO_FILE = "fingerprints.json"
_NOT_FETCHED = ("original/*", "*.pth", "*.gguf", "consolidated*")
"""Other copies of the weights. The image's `hf` (huggingface-hub below 1.0) counts the last `--exclude` alone, which
takes every word up to the next option: it stands once, and last."""
_BASE_KEYS = (
    ("hidden_size", "hidden_size"),
    ("intermediate_size", "intermediate_size"),
    ("num_layers", "num_hidden_layers"),
    ("num_heads", "num_attention_heads"),
    ("num_kv_heads", "num_key_value_heads"),
    ("vocab_size", "vocab_size"),
    ("max_positions", "max_position_embeddings"),
    ("tied_embeddings", "tie_word_embeddings"),
)


class BuildError(ContractError):
    """The build cannot begin: the base is missing, or is not what the profile says. One line for each problem."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command and what decides its result."""

    name: str
    argv: tuple[str, ...]
    """The command; `{out}` stands for the folder it writes."""
    facts: Mapping[str, Any]
    key: str
    folder: Path
    """Where its result lies once it is whole."""

    def command(self, out: Path) -> tuple[str, ...]:
        """The command that writes to `out`."""
        return tuple(str(out) if word == "{out}" else word for word in self.argv)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Steps in order; the last one's folder is the engine."""

    profile: EngineProfile
    steps: tuple[Step, ...]
    tokenizer: Path | None
    """Folder whose tokenizer goes into the engine directory; None if the engine has it already."""

    @property
    def engine(self) -> Step:
        """The step whose result is the engine directory."""
        return self.steps[-1]


def make_step(
    cache: Path, name: str, argv: Iterable[str | Path], facts: Mapping[str, Any], before: Step | None = None
) -> Step:
    """A step with its key and folder."""
    content = {"pipeline": PIPELINE, "step": name, "facts": facts, "before": before.key if before else None}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Step(name, tuple(map(str, argv)), facts, key, cache / f"{name}-{key}")


def plan_tensorrt_llm(
    profile: EngineProfile, cache: Path, base: Path | None, python: str = sys.executable
) -> BuildPlan:
    """Steps for a compiled engine; without `base` the model is fetched at the profile's revision.

    Raises:
        BuildError: the base is not the profile's.
    """
    steps: list[Step] = []
    model, engine = profile.model, profile.engine
    if base is None:
        facts: dict[str, Any] = {"id": model.id, "revision": model.revision}
        argv: tuple[str | Path, ...] = ("hf", "download", model.id, "--revision", model.revision)
        steps.append(make_step(cache, "fetch", (*argv, "--local-dir", "{out}", "--exclude", *_NOT_FETCHED), facts))
        source = steps[0].folder
    else:
        problems = base_problems(profile, base)
        if problems:
            raise BuildError("\n".join(problems))
        facts, source = {"base": fingerprint(base, cache / MEMO_FILE)}, base
    steps.append(_checkpoint(profile, cache, source, steps[-1] if steps else None, facts, python))
    flags = build_flags(profile)
    argv = ("trtllm-build", "--checkpoint_dir", steps[-1].folder, "--output_dir", "{out}", *flags)
    facts = {"flags": flags, "tensorrt_llm": engine.tensorrt_llm, "container": engine.container}
    steps.append(make_step(cache, "engine", argv, facts, steps[-1]))
    return BuildPlan(profile, tuple(steps), source)


def build_flags(profile: EngineProfile) -> list[str]:
    """`trtllm-build` flags of a profile, the LoRA ones as `commands/build.py` names them."""
    engine, lora = profile.engine, profile.lora
    plugin = engine.dtype if lora.plugin_dtype == "auto" else lora.plugin_dtype
    flags: list[str] = []
    for name, value in (
        ("max_batch_size", engine.max_batch_size),
        ("max_input_len", engine.max_input_len or engine.max_seq_len - 1),
        ("max_seq_len", engine.max_seq_len),
        ("max_num_tokens", engine.max_num_tokens),
        ("max_beam_width", 1),
        ("kv_cache_type", engine.kv_cache_type),
        ("remove_input_padding", "enable"),
        ("use_paged_context_fmha", "enable"),
        ("gemm_plugin", "auto"),
        ("gpt_attention_plugin", "auto"),
        ("lora_plugin", plugin),
        ("max_lora_rank", lora.max_rank),
        ("workers", engine.tensor_parallel * engine.pipeline_parallel),
    ):
        flags += [f"--{name}", str(value)]
    return [*flags, "--lora_target_modules", *lora.modules]


def _checkpoint(
    profile: EngineProfile, cache: Path, source: Path, before: Step | None, facts: Mapping[str, Any], python: str
) -> Step:
    engine = profile.engine
    options = {
        "dtype": engine.dtype,
        "tp": engine.tensor_parallel,
        "pp": engine.pipeline_parallel,
        "quantization": engine.quantization,
        "kv-cache-dtype": engine.kv_cache_dtype,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    program = (python, "-m", "trtllm_lora.pipeline.checkpoint")
    argv = [*program, "--model-dir", str(source), "--output-dir", "{out}", *words]
    return make_step(cache, "checkpoint", argv, {**facts, **options, "tensorrt_llm": engine.tensorrt_llm}, before)


def base_problems(profile: EngineProfile, base: Path) -> list[str]:
    """Why a Hugging Face directory is not the profile's base; empty if it is."""
    file = base / "config.json"
    try:
        config = read_json(file)
    except ContractError as error:
        return [str(error)]
    problems = []
    for name, key in _BASE_KEYS:
        wanted, found = getattr(profile.model, name), config.get(key)
        if found is None and name == "num_kv_heads":
            found = config.get("num_attention_heads")
        if found is not None and found != wanted:
            problems.append(f"{file}: {key} is {found}, the profile says model.{name} {wanted}")
    architecture = (config.get("architectures") or [None])[0]
    if architecture != profile.model.architecture:
        problems.append(f"{file}: architecture {architecture}, the profile says {profile.model.architecture}")
    head = config.get("head_dim") or config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
    if head != profile.shape().head_size:
        problems.append(f"{file}: heads of {head}, the profile says model.head_size {profile.shape().head_size}")
    if not any(base.glob("*.safetensors")):
        problems.append(f"{base}: no *.safetensors")
    rope = rope_problem(config) if profile.runtime == "tensorrt_llm" else None
    return [*problems, f"{file}: {rope}"] if rope else problems


def rope_problem(config: Mapping[str, Any]) -> str | None:
    """Why the rotary positions of a base's config.json would be read wrong where engines are compiled; None if not.

    The image's transformers (4.x) knows `rope_theta` and `rope_scaling` alone: of `rope_parameters`, as transformers 5
    writes them, it reads nothing and takes the default theta of 10000.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return None
    theta, kind = rope.get("rope_theta"), rope.get("rope_type", "default")
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    write = [f'"rope_theta": {json.dumps(theta)}'] if config.get("rope_theta") is None and theta is not None else []
    if kind != "default" and config.get("rope_scaling") is None:
        write.append(f'"rope_scaling": {json.dumps(rest)}')
    if config.get("rope_theta") is None and theta is None:  # one table for each kind of layer, or none at all
        write = ["rope_theta and rope_scaling as the base's publisher wrote them"]
    if not write:
        return None
    what = "has rope_parameters, of which TensorRT-LLM's transformers 4 reads nothing (theta would be 10000)"
    return f"{what}; write beside them {', '.join(write)}"


def fingerprint(base: Path, memo: Path) -> str:
    """sha256 over names and contents of a base's weights, config and tokenizer.

    Contents are hashed once: `memo` remembers them by path, size and time of change.
    """
    known = _remembered(memo)
    whole = hashlib.sha256()
    for file in sorted(path for path in base.iterdir() if path.suffix in (".json", ".safetensors", ".model")):
        stat = file.stat()
        stamp = f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        if stamp not in known:
            known[stamp] = sha256_of(file)
        whole.update(f"{file.name}\0{known[stamp]}\n".encode())
    memo.parent.mkdir(parents=True, exist_ok=True)
    replace_text(memo, json.dumps(known, indent=0, sort_keys=True))  # builds side by side share it
    return whole.hexdigest()


def _remembered(memo: Path) -> dict[str, str]:
    try:
        return {str(key): str(value) for key, value in json.loads(memo.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return {}  # not there, or not ours: it is made anew
