"""Merging an adapter into its base, by PEFT itself: the result is a Hugging Face directory for an engine of its own.

The only file of the product that imports torch, and only when an adapter is merged: `pip install 'lora-slots[merge]'`.

Rules: every tensor of the adapter is in the sum, or nothing is written. Beside the weights the new base has the files
of the old one as they are: what transformers writes of them today, TensorRT-LLM's own transformers reads otherwise.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from lora_slots.base_model.store import MANIFEST
from lora_slots.merge_checks import base_warnings, merge_problems
from lora_slots.refusals import Refused
from trtllm_lora.files import sha256_of
from trtllm_lora.shape import read_json

NOTE_FILE = "merged.lora-slots.json"
_CARRIED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Endings of a base's files that go with it: configs, tokenizer, code of its own."""
_OFF: tuple[object, ...] = (None, False, 0, "", "none", [], {})
Say = Callable[[str], object]


def merge_adapter(base: Path, adapter: Path, out: Path, *, dtype: str | None = None, say: Say = lambda _: None) -> Path:
    """Write `base` with `adapter` merged into its weights; nothing is at `out` until it is whole.

    `dtype` is the type of the written weights; default: the base's. The sum is made in float32 either way. `say` hears
    what a person should know of a merge that goes well.

    Raises:
        Refused: PEFT is not installed, `out` is taken, or the adapter is not of this base; every reason.
    """
    problems = merge_problems(base, adapter, out)
    if problems:
        raise Refused("\n".join(problems))
    for warning in base_warnings(base, adapter):
        say(warning)
    torch, peft, transformers = _libraries()
    kind = dtype or _dtype(base)
    merged = _merged(_loaded(base, torch, transformers), base, adapter, peft, say)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            made = Path(scratch) / "new"
            merged.to(getattr(torch, kind)).save_pretrained(str(made))
            _carry(base, made, kind)
            _note(made, base, adapter, kind)
            made.chmod(0o755)
            made.rename(out)
    except OSError as error:
        raise Refused(f"{out}: cannot be written: {error.strerror or error}") from None
    return out


def _loaded(base: Path, torch: Any, transformers: Any) -> Any:
    with _told(f"{base}: transformers does not load it"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(base), dtype=torch.float32, low_cpu_mem_usage=True, output_loading_info=True
        )
    lacking = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lacking:
        raise Refused(f"{base}: is not whole: weights are missing or of another shape, such as {_some(lacking)}")
    return model


def _merged(model: Any, base: Path, adapter: Path, peft: Any, say: Say) -> Any:
    with _told(f"{adapter}: PEFT does not merge it into {base}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found missing adapter keys")  # told below, as a refusal
        warnings.filterwarnings("ignore", "Unexpected keyword arguments")  # fields that are off, see _all_read
        _all_read(adapter, peft)
        wrapped = peft.PeftModel.from_pretrained(model, str(adapter))
        loaded = wrapped.load_adapter(str(adapter), wrapped.active_adapter)
        _all_loaded(adapter, loaded)
        weights = model.state_dict()
        before = {_plain(name): _hash(weights[name]) for name in weights if _plain(name) != name}
        merged = wrapped.merge_and_unload(safe_merge=True)
    weights = merged.state_dict()
    same = sorted(name for name in before if name in weights and _hash(weights[name]) == before[name])
    if len(same) == len(before):
        raise Refused(f"{adapter}: changes no weight of {base}: what was trained is not in it")
    if same:
        say(f"warning: {adapter}: {len(same)} of {len(before)} weights are as they were, such as {_some(same)}")
    _still_tied(merged, adapter, base)
    return merged


def _all_read(adapter: Path, peft: Any) -> None:
    """PEFT drops fields that it does not know with a warning; those that are off do no harm."""
    config = read_json(adapter / "adapter_config.json")
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(config.get("peft_type"))
    if kind is None:
        names = ", ".join(peft.PEFT_TYPE_TO_CONFIG_MAPPING)
        raise Refused(f"{adapter}: peft_type is {config.get('peft_type')!r:.80}; this PEFT has {names}")
    known = {field.name for field in fields(kind)}
    dropped = [name for name, value in config.items() if name not in known and value not in _OFF]
    if dropped:
        raise Refused(
            f"{adapter}: {kind.__name__} of PEFT {peft.__version__} has no {', '.join(dropped)}, "
            "which are on: take the PEFT that saved it, or correct peft_type"
        )


def _all_loaded(adapter: Path, loaded: Any) -> None:
    """PEFT says nothing of tensors that have no place in the model, and only warns of places without a tensor."""
    problems = []
    if loaded.unexpected_keys:
        problems.append(
            f"{adapter}: {len(loaded.unexpected_keys)} tensors have no place in the model, such as "
            f"{_some(loaded.unexpected_keys)}; keys as PEFT writes them begin with base_model.model. and name a module "
            "that the config targets"
        )
    if loaded.missing_keys:
        problems.append(
            f"{adapter}: no tensors for {len(loaded.missing_keys)} places that the config targets, such as "
            f"{_some(loaded.missing_keys)}; correct target_modules, or save the adapter again"
        )
    if problems:
        raise Refused("\n".join(problems))


def _plain(name: str) -> str:
    """Name in the base of a weight that PEFT wrapped; the same name of any other."""
    return name if name.endswith(".bias") else re.sub(r"\.(base_layer|original_module)(?=\.)", "", name)


def _hash(weight: Any) -> bytes:
    return hashlib.blake2b(weight.detach().contiguous().numpy().data, digest_size=16).digest()


def _still_tied(merged: Any, adapter: Path, base: Path) -> None:
    """One matrix in the file cannot be two: the embedding's would be taken for both."""
    if not merged.config.get_text_config().tie_word_embeddings:
        return
    into, out_of = merged.get_input_embeddings(), merged.get_output_embeddings()
    if out_of is not None and not bool((into.weight == out_of.weight).all()):
        raise Refused(
            f"{adapter}: changes embed_tokens and lm_head differently, and {base} has one matrix for both "
            "(tie_word_embeddings): untie it first, or train without them"
        )


def _carry(base: Path, made: Path, kind: str) -> None:
    """The base's own files beside the weights; what transformers made up of them goes."""
    mine = {file.name for file in base.iterdir() if file.is_file() and file.suffix in _CARRIED}
    mine -= {MANIFEST, NOTE_FILE, *(name for name in mine if name.endswith(".index.json"))}
    for file in made.iterdir():
        if file.suffix in _CARRIED and not file.name.endswith(".index.json"):
            file.unlink()
    for name in mine:
        shutil.copyfile(base / name, made / name)
    config = read_json(base / "config.json")
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) != kind:
        (made / "config.json").write_text(json.dumps(config | {key: kind}, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What a library of others raises, whatever it is, as one line."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 - their kinds are no contract: safetensors', pickle's, torch's
        raise Refused(f"{what}: {' '.join(str(error).split())[:600] or type(error).__name__}") from None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3])


def _libraries() -> tuple[Any, Any, Any]:
    try:
        import peft
        import torch
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise Refused(f"merging needs {error.name}: pip install 'lora-slots[merge]'") from None
    if not sys.stderr.isatty():
        quiet: Any = logging  # untyped
        quiet.disable_progress_bar()
    return torch, peft, transformers


def _dtype(base: Path) -> str:
    config = read_json(base / "config.json")
    found = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return found if found in ("float32", "float16", "bfloat16") else "float32"


def _note(made: Path, base: Path, adapter: Path, dtype: str) -> None:
    weights = next(iter(sorted(adapter.glob("adapter_model.*"))), adapter / "adapter_config.json")
    note = {"base": base.name, "adapter": adapter.name, "adapter_sha256": sha256_of(weights), "dtype": dtype}
    (made / NOTE_FILE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
