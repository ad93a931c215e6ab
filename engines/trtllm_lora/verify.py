"""Is a built engine what its profile says? From `config.json` and the names of files alone, anywhere.

Source of the keys: `tensorrt_llm/builder.py` (`EngineConfig.to_dict`) and `gptJsonConfig.cpp`, which reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lora.profile import KV_ALGOS, EngineProfile
from trtllm_lora.shape import EngineShape, read_json
from trtllm_lora.yaml_lines import read_yaml

_FIELDS = (
    ("dtype", "pretrained_config.dtype", "engine.dtype"),
    ("vocab_size", "pretrained_config.vocab_size", "model.vocab_size"),
    ("hidden_size", "pretrained_config.hidden_size", "model.hidden_size"),
    ("intermediate_size", "pretrained_config.intermediate_size", "model.intermediate_size"),
    ("num_layers", "pretrained_config.num_hidden_layers", "model.num_layers"),
    ("num_heads", "pretrained_config.num_attention_heads", "model.num_heads"),
    ("num_kv_heads", "pretrained_config.num_key_value_heads", "model.num_kv_heads"),
    ("head_size", "pretrained_config.head_size", "model.head_size"),
    ("num_experts", "pretrained_config.moe.num_experts", "model.num_experts"),
    ("tp_size", "pretrained_config.mapping.tp_size", "engine.tensor_parallel"),
    ("pp_size", "pretrained_config.mapping.pp_size", "engine.pipeline_parallel"),
    ("quant_algo", "pretrained_config.quantization.quant_algo", "engine.quantization"),
    ("lora_plugin", "build_config.plugin_config.lora_plugin", "lora.plugin_dtype"),
    ("max_lora_rank", "build_config.lora_config.max_lora_rank", "lora.max_rank"),
    ("max_batch_size", "build_config.max_batch_size", "engine.max_batch_size"),
    ("max_seq_len", "build_config.max_seq_len", "engine.max_seq_len"),
    ("max_beam_width", "build_config.max_beam_width", ""),
)
_NEEDED = ("remove_input_padding", "use_paged_context_fmha")
"""Switches of the plugins without which requests are not batched in flight, or their blocks not used again."""
_SAME_VERSION = re.compile(r"((\.post|[+-]).*)?")
"""What may follow a version that is still the same one: 1.2.1.post1, 1.2.1+cu13; not the 0 of 1.2.10."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key in which two engines, or an engine and its profile, differ."""

    key: str
    found: Any
    wanted: Any
    what: str = ""
    """What it means, where that is not plain."""
    place: str = ""
    """Where a profile says what is wanted, dotted; "" where none does."""

    def __str__(self) -> str:
        return f"{self.key}: {self.found!r}, not {self.wanted!r}" + (f" ({self.what})" if self.what else "")


def verify_engine(engine: Path, profile: EngineProfile) -> list[Difference]:
    """Every way in which an engine directory is not what the profile says; empty if it is.

    Raises:
        ShapeError: no engine's config.json there.
    """
    shape, wanted = EngineShape.from_engine_config(engine), profile.shape()
    config = read_json(engine / "config.json" if engine.is_dir() else engine)
    found = [
        Difference(key, getattr(shape, name), getattr(wanted, name), place=place)
        for name, key, place in _FIELDS
        if getattr(shape, name) != getattr(wanted, name)
    ]
    if not (shape.version.startswith(wanted.version) and _SAME_VERSION.fullmatch(shape.version[len(wanted.version) :])):
        what = "an engine loads only in the version that built it"
        found.append(Difference("version", shape.version, wanted.version, what, "engine.tensorrt_llm"))
    if set(shape.lora_modules) != set(wanted.lora_modules):
        key = "build_config.lora_config.lora_target_modules"
        modules = sorted(shape.lora_modules), sorted(wanted.lora_modules)
        found.append(Difference(key, *modules, place="lora.modules"))
    architecture = config["pretrained_config"].get("architecture")
    if architecture != profile.model.architecture:
        key, asked = "pretrained_config.architecture", profile.model.architecture
        found.insert(0, Difference(key, architecture, asked, "another base model", "model.architecture"))
    found += _build(config["build_config"], profile)
    algo = (config["pretrained_config"].get("quantization") or {}).get("kv_cache_quant_algo")
    if algo != KV_ALGOS[profile.engine.kv_cache_dtype]:
        key = "pretrained_config.quantization.kv_cache_quant_algo"
        found.append(Difference(key, algo, KV_ALGOS[profile.engine.kv_cache_dtype], place="engine.kv_cache_dtype"))
    if engine.is_dir():
        found += _files(engine, profile)
    return found


def tell(differences: Iterable[Difference], engine: Path, profile: Path, *, under: str = "") -> list[str]:
    """Differences as lines for a person: where the engine says it, where the profile does, and what helps.

    `under` is the key of `profile` below which the profile stands, such as that of a manifest.
    """
    file = engine / "config.json" if engine.is_dir() else engine
    text, document = file.read_text(encoding="utf-8"), read_yaml(profile)
    instead = "build the engine anew" + ("" if under else f" (`lora-slots engine build {profile}`)")
    lines = []
    for each in differences:
        place, tail = "", ""
        if each.place:
            where = (*([under] if under else []), *each.place.split("."))
            place = f", {profile}:{document.line(where)} ({each.place})"
            tail = "" if under else ", or write there what it is"
        lines.append(f"{file}:{_line(text, each.key)}: {each}{place}; {instead}{tail}")
    return lines


def _line(text: str, key: str) -> int:
    """Line of a dotted key in a JSON text, or of what is there of it."""
    at = 0
    for word in key.split("."):
        at = max(at, text.find(json.dumps(word), at))
    return text.count("\n", 0, at) + 1


def _build(build: Mapping[str, Any], profile: EngineProfile) -> Iterator[Difference]:
    kind = str(build.get("kv_cache_type", "PAGED")).rpartition(".")[2].upper()
    if kind != profile.engine.kv_cache_type.upper():
        wanted_kind = profile.engine.kv_cache_type.upper()
        yield Difference("build_config.kv_cache_type", kind, wanted_kind, place="engine.kv_cache_type")
    tokens = build.get("max_num_tokens")
    if profile.runtime == "tensorrt_llm" and tokens is not None and tokens != profile.engine.max_num_tokens:
        wanted_tokens = profile.engine.max_num_tokens
        yield Difference("build_config.max_num_tokens", tokens, wanted_tokens, place="engine.max_num_tokens")
    wanted = profile.engine.max_input_len or profile.engine.max_seq_len - 1
    given = build.get("max_input_len")
    if given is not None and given != wanted:
        yield Difference("build_config.max_input_len", given, wanted, place="engine.max_input_len")
    for name in _NEEDED:
        if (build.get("plugin_config") or {}).get(name) is False:
            yield Difference(f"build_config.plugin_config.{name}", False, True)
    folders = (build.get("lora_config") or {}).get("lora_dir") or []
    if folders:
        what = "built with --lora_dir: that adapter's embeddings and output layer may have replaced the base's"
        yield Difference("build_config.lora_config.lora_dir", folders, [], what)


def _files(engine: Path, profile: EngineProfile) -> Iterator[Difference]:
    ranks = profile.engine.tensor_parallel * profile.engine.pipeline_parallel
    suffix = "engine" if profile.runtime == "tensorrt_llm" else "safetensors"
    wanted = {f"rank{rank}.{suffix}" for rank in range(ranks)}
    there = {file.name for file in engine.glob(f"rank*.{suffix}") if "managed" not in file.name}
    if there != wanted:
        yield Difference("files", sorted(there), sorted(wanted), "one file for each rank")


def diff_engines(first: Path, second: Path) -> list[Difference]:
    """Every key of two engines' config.json that differs; `found` is the second's, `wanted` the first's.

    Raises:
        ShapeError: no engine's config.json in one of them.
    """
    for engine in (first, second):
        EngineShape.from_engine_config(engine)
    before, after = (
        dict(_flat(read_json(engine / "config.json" if engine.is_dir() else engine))) for engine in (first, second)
    )
    return [
        Difference(key, after.get(key), before.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _flat(each, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
