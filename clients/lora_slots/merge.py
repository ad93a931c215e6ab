"""Merging an adapter into its base, by PEFT itself: the result is a Hugging Face directory for an engine of its own.

The only file of the product that imports torch, and only when an adapter is merged: `pip install 'lora-slots[merge]'`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from lora_slots.refusals import Refused
from trtllm_lora.files import sha256_of
from trtllm_lora.shape import read_json

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
NOTE_FILE = "merged.lora-slots.json"


def merge_adapter(base: Path, adapter: Path, out: Path, *, dtype: str | None = None) -> Path:
    """Write `base` with `adapter` merged into its weights; nothing is at `out` until it is whole.

    `dtype` is the type of the written weights; default: the base's. The sum is made in float32 either way.

    Raises:
        Refused: PEFT is not installed, `out` is taken, or the adapter is not of this base; every reason.
    """
    problems = _problems(base, adapter, out)
    if problems:
        raise Refused("\n".join(problems))
    torch, peft, transformers = _libraries()
    kind = dtype or _dtype(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32, low_cpu_mem_usage=True)
    try:
        wrapped = peft.PeftModel.from_pretrained(model, str(adapter))
        merged = wrapped.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise Refused(f"{adapter}: PEFT does not merge it into {base}: {' '.join(str(error).split())[:600]}") from None
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "new"
        merged.to(getattr(torch, kind)).save_pretrained(str(made))
        for name in TEXT_FILES:
            if (base / name).is_file():
                shutil.copyfile(base / name, made / name)
        _note(made, base, adapter, kind)
        made.chmod(0o755)
        made.rename(out)
    return out


def _problems(base: Path, adapter: Path, out: Path) -> list[str]:
    problems = []
    if not (base / "config.json").is_file():
        problems.append(f"{base}: no config.json: not a Hugging Face directory")
    if not (adapter / "adapter_config.json").is_file():
        problems.append(f"{adapter}: no adapter_config.json: not a PEFT adapter (a bundle cannot be merged)")
    if out.exists():
        problems.append(f"{out}: is there already; left alone")
    return problems


def _libraries() -> tuple[Any, Any, Any]:
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        raise Refused(f"merging needs {error.name}: pip install 'lora-slots[merge]'") from None
    return torch, peft, transformers


def _dtype(base: Path) -> str:
    config = read_json(base / "config.json")
    found = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return found if found in ("float32", "float16", "bfloat16") else "float32"


def _note(made: Path, base: Path, adapter: Path, dtype: str) -> None:
    import json

    weights = next(iter(sorted(adapter.glob("adapter_model.*"))), adapter / "adapter_config.json")
    note = {"base": base.name, "adapter": adapter.name, "adapter_sha256": sha256_of(weights), "dtype": dtype}
    (made / NOTE_FILE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
