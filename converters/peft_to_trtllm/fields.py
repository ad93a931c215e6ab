"""adapter_config.json: what each field does to the result, as one table.

Every field of every `LoraConfig` from PEFT 0.2 to 0.21 stands here with its verdict; a field that is not here is a
reason to refuse as soon as it is on, for each variant of LoRA was once an unknown field (and PEFT itself drops
those it does not know with a warning). Verdicts: docs/conversion-rules.md#fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from peft_to_trtllm.field_reader import FieldReader, short
from peft_to_trtllm.report import Findings

DEFAULT_ALPHA = 8
"""`lora_alpha` and `r` of a config that does not name them (PEFT 0.4 and later)."""


class BlockDiagonal(NamedTuple):
    """`use_bdlora`: which modules store A or B as the blocks of a block-diagonal matrix."""

    a_names: tuple[str, ...]
    b_names: tuple[str, ...]
    nblocks: int


class Settings(NamedTuple):
    """The fields that enter the arithmetic, checked."""

    r: int = DEFAULT_ALPHA
    lora_alpha: float = DEFAULT_ALPHA
    use_rslora: bool = False
    rank_pattern: Mapping[str, float] = MappingProxyType({})
    alpha_pattern: Mapping[str, float] = MappingProxyType({})
    use_dora: bool = False
    lora_bias: bool = False
    block_diagonal: BlockDiagonal | None = None
    qalora_group: int = 0
    """Group size of QALoRA, 0 where it is off."""
    base_model: str | None = None
    base_revision: str | None = None
    peft_version: str = ""


NO_EFFECT = frozenset(
    {
        "lora_dropout", "inference_mode", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
        "peft_version", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
        "monteclora_config", "runtime_config", "merge_weights", "megatron_core", "ensure_weight_tying",
        "target_parameters",
    }
)  # fmt: skip
"""Fields that change nothing at inference, or whose effect the tensors' shapes tell better."""

MUST_BE_OFF: Mapping[str, tuple[str, str]] = {
    "modules_to_save": (
        "modules-to-save",
        "whole trained matrices cannot travel in lora_weights; train without them, or merge them into the base",
    ),
    "trainable_token_indices": (
        "trainable-tokens",
        "replaced embedding rows cannot travel in lora_weights; merge these tokens into the base",
    ),
    "layer_replication": (
        "layer-replication",
        "the layers are numbered for an expanded model; build the engine from that model and clear the field",
    ),
    "alora_invocation_tokens": (
        "alora",
        "activated LoRA applies only after its invocation tokens; the engine applies an adapter to every token",
    ),
    "arrow_config": ("arrow", "Arrow routes between several adapters per token; the engine applies exactly one"),
    "kasa_config": (
        "kasa",
        "KaSA also removes singular parts of the base weight; merge the adapter into the base with PEFT",
    ),
    "megatron_config": ("megatron", "Megatron layers have keys of their own; export the adapter to Hugging Face names"),
    "enable_lora": (
        "enable-lora",
        "MergedLinear of PEFT 0.2 stores grouped factors that no later PEFT reads; retrain, or split them by hand",
    ),
}  # fmt: skip
"""Features that lora_weights cannot say: field -> (rule, advice)."""

VARIANTS = ("use_dora", "use_bdlora", "velora_config", "monteclora_config")
"""Ways to compute a layer of which PEFT takes one at a time; those that are refused anyhow are not here."""

PLAIN_INITS = frozenset({"gaussian", "orthogonal", "eva", "mica"})
MUTATING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_settings(config: Mapping[str, Any], *, has_base_weights: bool, problems: Findings) -> Settings:
    """Judge every field and return those that enter the arithmetic.

    Nothing is raised: what is wrong is added to `problems`, and the returned value is then only good for finding
    further problems.
    """
    if not _check_type(config, problems):
        return Settings()  # the fields are another method's: nothing more can be said of them
    reader = FieldReader(config, problems)
    for name, (rule, advice) in MUST_BE_OFF.items():
        if _is_on(config.get(name)):
            problems.add(rule, f"adapter_config.json {name}", f"{name} is {short(config[name])}", advice)
    _check_bias(config, problems)
    _check_variants(config, problems)
    _check_init(config.get("init_lora_weights"), problems)
    for name, value in config.items():
        if name not in KNOWN and _is_on(value):
            problems.add(
                "unknown-field",
                f"adapter_config.json {name}",
                f"a field this converter does not know is on: {name} is {short(value)}",
                "what it does to the weights is not known here; if it does nothing at inference, set it to null",
            )
    use_dora = reader.flag("use_dora")
    if use_dora and not has_base_weights:
        problems.add(
            "dora",
            "adapter_config.json use_dora",
            "DoRA rescales base weight + delta per output row",
            "give the base's weights with --base-weights so that the magnitude can be normalised, or merge the adapter",
        )
    return Settings(
        r=reader.whole("r", DEFAULT_ALPHA),
        lora_alpha=reader.number("lora_alpha", DEFAULT_ALPHA),
        use_rslora=reader.flag("use_rslora"),
        rank_pattern=reader.pattern("rank_pattern", whole=True),
        alpha_pattern=reader.pattern("alpha_pattern", whole=False),
        use_dora=use_dora,
        lora_bias=reader.flag("lora_bias"),
        block_diagonal=_block_diagonal(config.get("use_bdlora"), problems),
        qalora_group=reader.whole("qalora_group_size", 16) if reader.flag("use_qalora") else 0,
        base_model=_text(config.get("base_model_name_or_path")),
        base_revision=_text(config.get("revision")),
        peft_version=_text(config.get("peft_version")) or "",
    )


def _check_type(config: Mapping[str, Any], problems: Findings) -> bool:
    kind = config.get("peft_type")
    if kind == "LORA":
        return True
    if kind is None and ("fine_tune_type" in config or "lora_parameters" in config):
        found = "an MLX adapter (fine_tune_type, lora_parameters): its factors are transposed and its scale is another"
    else:
        found = "no peft_type" if kind is None else f"peft_type is {short(kind)}, not LORA"
    problems.add(
        "peft-type",
        "adapter_config.json peft_type",
        found,
        "only peft_type LORA can be converted; another method must be merged into the base, or retrained as LoRA",
    )
    return False


def _check_bias(config: Mapping[str, Any], problems: Findings) -> None:
    bias = config.get("bias", "none")
    if bias not in ("none", None):
        problems.add(
            "bias",
            "adapter_config.json bias",
            f"bias is {short(bias)}: biases of the base were trained",
            "lora_weights has no place for a bias; retrain with bias='none', or merge the adapter into the base",
        )


def _check_variants(config: Mapping[str, Any], problems: Findings) -> None:
    names = [name for name in VARIANTS if _is_on(config.get(name))]
    names += ["init_lora_weights"] * (config.get("init_lora_weights") == "mica")
    if len(names) > 1:
        found = f"{' and '.join(names)} are on: variants of LoRA that PEFT does not combine"
        problems.add("variants", "adapter_config.json", found, "the config as PEFT saved it")


def _check_init(init: Any, problems: Findings) -> None:
    if init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in PLAIN_INITS):
        return
    name = init.lower() if isinstance(init, str) else ""
    if name.startswith(MUTATING_INITS):
        found = f"init_lora_weights is {init!r}: training began from a modified base, the factors belong to that base"
        wanted = "save with path_initial_model_for_weight_conversion: PEFT then writes plain LoRA for the true base"
        problems.add("mutated-base", "adapter_config.json init_lora_weights", found, wanted)
        return
    problems.add(
        "unknown-field",
        "adapter_config.json init_lora_weights",
        f"init_lora_weights is {short(init)}, a start this converter does not know",
        "whether it modified the base is not known here; if it did not, set the field to true",
    )


def _block_diagonal(value: Any, problems: Findings) -> BlockDiagonal | None:
    if not _is_on(value):
        return None
    where = "adapter_config.json use_bdlora"
    known = {"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"}
    if not isinstance(value, dict) or not set(value) <= known:
        problems.add(
            "bd-lora", where, f"use_bdlora is {short(value)}", f"an object with only {', '.join(sorted(known))}"
        )
        return None
    nblocks = value.get("nblocks", 1)
    if type(nblocks) is not int or nblocks < 1:
        problems.add("bd-lora", where, f"nblocks is {short(nblocks)}", "a whole number, 1 or more")
        return None
    a_names = _names(value.get("target_modules_bd_a"), "use_bdlora target_modules_bd_a", problems)
    b_names = _names(value.get("target_modules_bd_b"), "use_bdlora target_modules_bd_b", problems)
    return BlockDiagonal(a_names, b_names, nblocks)


def _names(value: Any, name: str, problems: Findings) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    problems.add("field-type", f"adapter_config.json {name}", f"{name} is {short(value)}", "a list of names, or null")
    return ()


def _is_on(value: Any) -> bool:
    return value not in (None, False, 0, "", "none") and not (isinstance(value, list | dict) and not value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


_JUDGED: Mapping[str, Callable[..., Any]] = {
    "peft_type": _check_type,
    "bias": _check_bias,
    "init_lora_weights": _check_init,
    "use_bdlora": _block_diagonal,
    "use_qalora": FieldReader.flag,
    "qalora_group_size": FieldReader.whole,
    "r": FieldReader.whole,
    "lora_alpha": FieldReader.number,
    "use_rslora": FieldReader.flag,
    "use_dora": FieldReader.flag,
    "lora_bias": FieldReader.flag,
    "rank_pattern": FieldReader.pattern,
    "alpha_pattern": FieldReader.pattern,
}

KNOWN = NO_EFFECT | MUST_BE_OFF.keys() | _JUDGED.keys()
"""Every field with a verdict. `tests/converters/test_peft.py` holds it against the installed PEFT."""
