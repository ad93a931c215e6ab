"""Do adapters that were converted for one engine serve on another? From both engines' config.json.

Each reason names the adapters that it stops: all of them, or those with a module, a rank, a fused row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtllm_lora.shape import EngineShape, read_json

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_size"),
    "num_experts",
)
_FUSED = ("attn_qkv", "mlp_gate_up")


def adapters_carry_over(first: Path, second: Path) -> list[str]:
    """Why bundles made for the first engine might not serve on the second; empty if all of them do.

    Raises:
        ShapeError: no engine's config.json in one of them.
    """
    old, new = EngineShape.from_engine_config(first), EngineShape.from_engine_config(second)
    return [*_engine(new), *_base(old, new, first, second), *_some(old, new)]


def _engine(new: EngineShape) -> Iterator[str]:
    """What stops every adapter, whatever the first engine was."""
    if not new.lora_enabled:
        modules = ", ".join(new.lora_modules) or "none"
        yield (
            f"all: the second runs no LoRA (lora_plugin {new.lora_plugin}, modules {modules}, max_lora_rank "
            f"{new.max_lora_rank}), and the base answers in silence; build it with --lora_plugin, "
            "--lora_target_modules and --max_lora_rank"
        )
    if new.plugin_differs:
        yield (
            f"all: the second's lora_plugin is {new.lora_plugin}, its dtype {new.dtype}: they are not applied, in "
            f"silence (tensorrtllm_backend#791); build it with --lora_plugin {new.dtype}"
        )
    if new.quantised_without_lora:
        yield f"all: the second's quantisation {new.quant_algo} runs no LoRA; build it with another"


def _base(old: EngineShape, new: EngineShape, first: Path, second: Path) -> Iterator[str]:
    if not old.lora_enabled:
        yield "all: the first runs no LoRA, so none was converted for it"
    if old.dtype != new.dtype:
        yield f"all: dtype {new.dtype}, was {old.dtype}: convert them again (`lora-slots convert --engine`)"
    was, now = _architecture(first), _architecture(second)
    differ = [f"architecture {now}, was {was}"] if was != now else []
    differ += [
        f"{name} {getattr(new, name)}, was {getattr(old, name)}"
        for name in _SIZES
        if getattr(old, name) != getattr(new, name)
    ]
    if differ:
        yield f"all: another base model ({'; '.join(differ)}): train them on it"


def _some(old: EngineShape, new: EngineShape) -> Iterator[str]:
    gone = [name for name in old.lora_modules if name not in new.lora_modules]
    if gone and new.lora_enabled:
        yield f"those with {', '.join(gone)}: no longer enabled, they are refused"
    if new.max_lora_rank < old.max_lora_rank and new.lora_enabled:
        yield f"those of a rank above {new.max_lora_rank} (max_lora_rank was {old.max_lora_rank}): they are refused"
    if "attn_dense" in new.lora_modules and not new.dense_is_square:
        size = new.num_heads * new.head_size
        yield (
            f"those with attn_dense: heads x head_size is {size}, hidden_size {new.hidden_size}, and the runtime cuts "
            "their rows in the wrong place"
        )
    fused = [name for name in _FUSED if name in new.lora_modules]
    if fused and old.tp_size != new.tp_size:
        yield (
            f"those with {' or '.join(fused)}: their rows are dealt out for tp {old.tp_size}, now {new.tp_size}; "
            "convert them again"
        )
    if new.pp_size > old.pp_size:
        yield f"those without a row in the layers of each of {new.pp_size} pipeline ranks (there were {old.pp_size})"


def _architecture(engine: Path) -> object:
    config = read_json(engine / "config.json" if engine.is_dir() else engine)
    return config["pretrained_config"].get("architecture")
