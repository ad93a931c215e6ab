"""What a compiled engine accepts, read from its `config.json` (no engine, no GPU needed).

Source: `cpp/tensorrt_llm/runtime/gptJsonConfig.cpp` and `tensorrt_llm/builder.py` (`EngineConfig`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lora.errors import ShapeError
from trtllm_lora.modules import LLAMA_MODULES, MODULES
from trtllm_lora.request_rules import RequestLimits

DTYPES = ("float32", "float16", "bfloat16")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NO_LORA_QUANT = ("SQ", "SMOOTH", "FP8_ROWWISE", "FP8_PER_CHANNEL")
ENGINE_VERSION = "1.2.1"
"""Last TensorRT-LLM release line with compiled engines (NGC 26.04-26.07)."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The facts of one engine that decide which adapters fit it."""

    version: str
    """TensorRT-LLM version that built the engine."""
    dtype: str
    """`pretrained_config.dtype`: the dtype `lora_weights` must have."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_experts: int
    tp_size: int
    pp_size: int
    quant_algo: str | None
    lora_plugin: str | None
    """`plugin_config.lora_plugin`; None means LoRA is off and every LoRA request is answered by the base."""
    lora_modules: tuple[str, ...]
    """Enabled modules, TensorRT-LLM names, in the engine's order."""
    max_lora_rank: int
    max_batch_size: int
    max_seq_len: int
    max_input_len: int = 0
    """Tokens of a prompt at most; 0: one less than `max_seq_len`."""
    max_beam_width: int = 1

    def __post_init__(self) -> None:
        if not self.max_input_len:
            object.__setattr__(self, "max_input_len", self.max_seq_len - 1)
        problems = [
            f"{name} must be a positive whole number, found {value!r:.60}"
            for name, value in (
                ("hidden_size", self.hidden_size),
                ("intermediate_size", self.intermediate_size),
                ("num_hidden_layers", self.num_layers),
                ("num_attention_heads", self.num_heads),
                ("num_key_value_heads", self.num_kv_heads),
                ("head_size", self.head_size),
                ("tp_size", self.tp_size),
                ("pp_size", self.pp_size),
            )
            if type(value) is not int or value < 1
        ]
        if self.dtype not in DTYPES:
            problems.append(f"dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}")
        unknown = [name for name in self.lora_modules if name not in MODULES]
        if unknown:
            problems.append(f"unknown LoRA modules {', '.join(unknown)}; known: {', '.join(MODULES)}")
        if problems:
            raise ShapeError("engine config: " + "; ".join(problems))

    @property
    def lora_enabled(self) -> bool:
        """Whether the runtime builds a LoRA cache at all (gptJsonConfig.cpp: plugin, modules and rank > 0)."""
        return self.lora_plugin is not None and bool(self.lora_modules) and self.max_lora_rank > 0

    @property
    def plugin_differs(self) -> bool:
        """Whether lora_plugin has another type than the engine: adapters are then not applied (B#791)."""
        return self.lora_plugin not in (None, "auto", self.dtype)

    @property
    def quantised_without_lora(self) -> bool:
        """Whether its quantisation runs no LoRA: SmoothQuant and row-wise FP8 (#2603, #2604)."""
        return any(word in (self.quant_algo or "").upper() for word in _NO_LORA_QUANT)

    @property
    def dense_is_square(self) -> bool:
        """Whether heads x head_size is the hidden size, as the runtime takes it to be for attn_dense."""
        return self.num_heads * self.head_size == self.hidden_size

    @property
    def request_limits(self) -> RequestLimits:
        """What a request may ask of the engine."""
        return RequestLimits(self.vocab_size, self.max_input_len, self.max_seq_len, self.max_beam_width)

    @classmethod
    def from_engine_config(cls, path: Path) -> EngineShape:
        """Read an engine directory, or its `config.json`.

        Raises:
            ShapeError: missing or unreadable file, missing keys (all named), impossible values.
        """
        file = path / "config.json" if path.is_dir() else path
        read = _Reader(read_json(file))
        pretrained, build = read.part(read.root, "pretrained_config"), read.part(read.root, "build_config")
        mapping, moe = read.part(pretrained, "mapping", None), read.part(pretrained, "moe", None)
        plugin, lora = read.part(build, "plugin_config"), read.part(build, "lora_config", None)
        quantization = read.part(pretrained, "quantization", None)
        hidden, heads = read.whole(pretrained, "hidden_size"), read.whole(pretrained, "num_attention_heads")
        facts: dict[str, Any] = {
            "version": str(read.root.get("version", "unknown")),
            "dtype": read.text(pretrained, "dtype", ""),
            "vocab_size": read.whole(pretrained, "vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": read.whole(pretrained, "intermediate_size", 0) or 4 * hidden,
            "num_layers": read.whole(pretrained, "num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": read.whole(pretrained, "num_key_value_heads", 0) or heads,
            "head_size": read.whole(pretrained, "head_size", 0) or hidden // max(heads, 1),
            "num_experts": read.whole(moe, "num_experts", 0),
            "tp_size": read.whole(mapping, "tp_size", 1),
            "pp_size": read.whole(mapping, "pp_size", 1),
            "quant_algo": read.text(quantization, "quant_algo", None),
            "lora_plugin": read.text(plugin, "lora_plugin", None),
            "lora_modules": read.texts(lora, "lora_target_modules"),
            "max_lora_rank": read.whole(lora, "max_lora_rank", 0),
            "max_batch_size": read.whole(build, "max_batch_size", 0) or 1,
            "max_seq_len": read.whole(build, "max_seq_len", 0),
            "max_input_len": read.whole(build, "max_input_len", 0),
            "max_beam_width": read.whole(build, "max_beam_width", 0) or 1,
        }
        if read.problems:
            raise ShapeError(
                f"{file}: {'; '.join(read.problems)} (an engine's config.json has version, pretrained_config and "
                "build_config)"
            )
        return cls(**facts)

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        dtype: str,
        lora_modules: Sequence[str] = LLAMA_MODULES,
        max_lora_rank: int = 64,
        max_batch_size: int = 64,
        max_seq_len: int = 2048,
    ) -> EngineShape:
        """The shape an engine of this Hugging Face `config.json` would have (one rank, no quantisation).

        Raises:
            ShapeError: the config lacks sizes.
        """
        keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
        missing = [key for key in keys if not isinstance(config.get(key), int)]
        if missing:
            raise ShapeError(f"base config.json lacks {', '.join(missing)}")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            version=ENGINE_VERSION,
            dtype=dtype,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or hidden // heads,
            num_experts=config.get("num_local_experts") or 0,
            tp_size=1,
            pp_size=1,
            quant_algo=None,
            lora_plugin=dtype,
            lora_modules=tuple(lora_modules),
            max_lora_rank=max_lora_rank,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
        )

    def to_engine_config(self, architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
        """The `config.json` of an engine of this shape, with the keys the C++ runtime reads."""
        return {
            "version": self.version,
            "pretrained_config": {
                "architecture": architecture,
                "dtype": self.dtype,
                "logits_dtype": "float32",
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_size": self.head_size,
                "moe": {"num_experts": self.num_experts},
                "mapping": {
                    "world_size": self.tp_size * self.pp_size,
                    "tp_size": self.tp_size,
                    "pp_size": self.pp_size,
                },
                "quantization": {"quant_algo": self.quant_algo, "kv_cache_quant_algo": None},
            },
            "build_config": {
                "max_batch_size": self.max_batch_size,
                "max_seq_len": self.max_seq_len,
                "max_input_len": self.max_input_len,
                "max_beam_width": self.max_beam_width,
                "kv_cache_type": "PAGED",
                "lora_config": {
                    "lora_dir": [],
                    "lora_ckpt_source": "hf",
                    "max_lora_rank": self.max_lora_rank,
                    "lora_target_modules": list(self.lora_modules),
                    "trtllm_modules_to_hf_modules": {},
                },
                "plugin_config": {"dtype": self.dtype, "lora_plugin": self.lora_plugin},
            },
        }


class _Reader:
    """Typed access to the fields of an engine's config.json; every wrong one is noted, none ends the reading."""

    def __init__(self, config: Any) -> None:
        self.problems: list[str] = []
        self.root = self._object(config, "the file")

    def part(self, parent: Mapping[str, Any], name: str, *default: None) -> Mapping[str, Any]:
        """An object within one; missing or null is a problem unless a default is given."""
        if parent.get(name) is None and default:
            return {}
        if name not in parent:
            self.problems.append(f"no {name}")
            return {}
        return self._object(parent[name], name)

    def whole(self, part: Mapping[str, Any], name: str, *default: int) -> int:
        """A whole number, not negative; missing or null is the default, if there is one."""
        value = part.get(name)
        if value is None and default:
            return default[0]
        if type(value) is int and 0 <= value < 1 << 31:
            return value
        self.problems.append(f"{name} must be a whole number, found {value!r:.60}")
        return 0

    def text(self, part: Mapping[str, Any], name: str, default: str | None) -> Any:
        """A text, or the default where it is missing or null."""
        value = part.get(name)
        if value is None or isinstance(value, str):
            return default if value is None else value
        self.problems.append(f"{name} must be a text, found {value!r:.60}")
        return default

    def texts(self, part: Mapping[str, Any], name: str) -> tuple[str, ...]:
        """A list of texts; missing or null is an empty one."""
        value = part.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.problems.append(f"{name} must be a list of names, found {value!r:.60}")
        return ()

    def _object(self, value: Any, name: str) -> Mapping[str, Any]:
        if isinstance(value, dict):
            return value
        self.problems.append(f"{name} must be an object, found {value!r:.60}")
        return {}


def read_json(file: Path) -> Any:
    """Parse a JSON file; its problems become one-line `ShapeError`s."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ShapeError(f"{file}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ShapeError(f"{file}: not readable as JSON: {error}") from None
