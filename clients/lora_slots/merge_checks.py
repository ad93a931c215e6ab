"""What speaks against a merge before it begins: an adapter that is not of this base, a base that is not whole.

The converter judges the adapter first (`peft_to_trtllm.inspect`): PEFT passes over what does not fit, with a warning or
without. What a bundle cannot carry and a merge can, such as a trained embedding, stands against no merge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft_to_trtllm import ConversionError, inspect
from peft_to_trtllm.report import RULES_PAGE
from trtllm_lora import ContractError
from trtllm_lora.shape import read_json

_ONLY_OF_BUNDLES = frozenset(
    {
        *("bias", "modules-to-save", "trainable-tokens", "embedding-lora", "kasa", "dora", "peft-type", "tower"),
        *("experts", "no-module", "unknown-module", "base-needed", "attn-dense", "range"),
    }
)
"""Rules of the converter about what `lora_weights` can say; PEFT merges more, and is held to what it loaded."""


def merge_problems(base: Path, adapter: Path, out: Path) -> list[str]:
    """Every reason against merging, as far as files tell; empty if there is none."""
    problems = []
    if out.exists() or out.is_symlink():
        problems.append(f"{out}: is there already; left alone")
    whole = [_base_problems(base), _adapter_problems(adapter)]
    problems += [problem for found in whole for problem in found]
    return problems if any(whole) else problems + _judgement(base, adapter)


def base_warnings(base: Path, adapter: Path) -> list[str]:
    """What the adapter says of its base, where that is not what this base is called."""
    told = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(told, str) or not told.strip("/"):
        return []
    config = read_json(base / "config.json")
    place = base.resolve()
    names = {base.name, place.name, _last(str(config.get("_name_or_path") or ""))}
    names |= {part.rpartition("--")[2] for part in place.parts if part.startswith("models--")}  # Hugging Face's cache
    if _last(told).casefold() in {name.casefold() for name in names} or Path(told).resolve() == place:
        return []
    return [
        f"warning: {adapter} was trained on {told!r:.200}, says its config; it is merged into {base}: are they one?"
    ]


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _base_problems(base: Path) -> list[str]:
    file = base / "config.json"
    if not file.is_file():
        return [f"{base}: no config.json: not a Hugging Face directory"]
    try:
        config: Any = read_json(file)
    except ContractError as error:
        return [str(error)]
    if not isinstance(config, dict):
        return [f"{file}: is no JSON object: not a model's config.json"]
    if config.get("quantization_config"):
        return [f"{file}: the base is quantised (quantization_config): merge into the one that it was made from"]
    return []


def _adapter_problems(adapter: Path) -> list[str]:
    if (adapter / "adapter_config.json").is_file():
        return []
    return [f"{adapter}: no adapter_config.json: not a PEFT adapter (a bundle cannot be merged)"]


def _judgement(base: Path, adapter: Path) -> list[str]:
    """The converter's reasons that stand against a merge too, a line each."""
    try:
        found = inspect(adapter, base=base, dtype="float32").problems
    except ConversionError as error:
        return [str(error)]
    passed_over = _ONLY_OF_BUNDLES
    if passed_over & found.counts.keys():
        passed_over |= {"no-tensors"}  # none for a bundle
    return [
        f"{adapter}: {each.where}: {each.found}; {each.wanted} [{RULES_PAGE}#{each.rule}]"
        for each in found.kept
        if each.rule not in passed_over
    ]
