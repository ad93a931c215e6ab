"""The model's `parameters` in config.pbtxt, read as the C++ backend reads them.

Rules: an unfilled `${...}` or an unparsable number falls to the default with a warning, as there; a value that would
change answers and that this engine cannot honour is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from reference_engine.errors import StartupRefused
from trtllm_lora.geometry import DEFAULT_HOST_BYTES, DEFAULT_MAX_RANK, DEFAULT_OPTIMAL_RANK

log = logging.getLogger(__name__)

BATCHING = ("inflight_fused_batching", "inflight_batching")
THREADS = "REFERENCE_ENGINE_THREADS"
"""Environment variable: computing threads of every engine that is started with it."""
DEVICE_FRACTION = 0.02
"""Effective when unset: the log and the documentation of the backend say 0.05 (peftCacheManagerConfig.h)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator can set of a model instance."""

    engine_dir: str
    decoupled: bool = True
    max_queue_size: int = 0
    exclude_input: bool = False
    kv_cache_reuse: bool = True
    max_kv_tokens: int | None = None
    cancellation_check_s: float = 0.1
    optimal_rank: int = DEFAULT_OPTIMAL_RANK
    max_rank: int = DEFAULT_MAX_RANK
    host_bytes: int = DEFAULT_HOST_BYTES
    device_fraction: float = DEVICE_FRACTION
    prefetch_dir: Path | None = None
    num_threads: int | None = None
    """Ours alone (`num_threads`, else the variable `THREADS`): computing threads; unset, one per processor of the
    process. A container's share of the processors (a CPU quota) is not seen by that count."""

    @classmethod
    def from_model_config(
        cls, config: Mapping[str, Any], environment: Mapping[str, str] = MappingProxyType({})
    ) -> Settings:
        """Read Triton's model configuration (the JSON form a Python backend is given) and the process's environment.

        Raises:
            StartupRefused: no engine directory, or parameters this engine cannot honour; all named.
        """
        read = _Parameters(config.get("parameters", {}))
        problems = _problems(read)
        engine_dir = read.text("gpt_model_path")
        if engine_dir is None:
            problems.append("gpt_model_path is not set")
        threads = environment.get(THREADS, "")
        if threads and not (threads.isascii() and threads.isdigit() and 0 < int(threads) < 1024):
            problems.append(f"{THREADS}={threads} is no number of threads")
        if problems:
            raise StartupRefused("; ".join(problems))
        queue = config.get("dynamic_batching", {}).get("default_queue_policy", {})
        prefetch = read.text("lora_prefetch_dir")
        return cls(
            engine_dir=engine_dir or "",
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            max_queue_size=int(queue.get("max_queue_size", 0)),
            exclude_input=read.flag("exclude_input_in_output", False),
            kv_cache_reuse=read.flag("enable_kv_cache_reuse", True),
            max_kv_tokens=read.whole("max_tokens_in_paged_kv_cache"),
            cancellation_check_s=(read.whole("cancellation_check_period_ms") or 100) / 1000,
            optimal_rank=read.whole("lora_cache_optimal_adapter_size") or DEFAULT_OPTIMAL_RANK,
            max_rank=read.whole("lora_cache_max_adapter_size") or DEFAULT_MAX_RANK,
            host_bytes=read.whole("lora_cache_host_memory_bytes") or DEFAULT_HOST_BYTES,
            device_fraction=read.fraction("lora_cache_gpu_memory_fraction", DEVICE_FRACTION),
            prefetch_dir=Path(prefetch) if prefetch else None,
            num_threads=read.whole("num_threads") or (int(threads) if threads else None),
        )


class _Parameters:
    """String values with the C++ backend's fall-back to defaults."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._values = {key: str(entry.get("string_value", "")) for key, entry in parameters.items()}

    def text(self, key: str) -> str | None:
        value = self._values.get(key, "")
        return None if value == "" or value.startswith("${") else value

    def whole(self, key: str) -> int | None:
        value = self._number(key)
        return None if value is None else int(value)

    def fraction(self, key: str, default: float) -> float:
        value = self._number(key)
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.text(key)
        return default if value is None else value.lower() in ("true", "yes", "1", "t")

    def _number(self, key: str) -> float | None:
        value = self.text(key)
        if value is None:
            return None
        try:
            return float(value)
        except ValueError:
            log.warning("%s is not a number: %s; the default is used", key, value)
            return None


def _problems(read: _Parameters) -> list[str]:
    batching = read.text("gpt_model_type") or BATCHING[0]
    problems = []
    if batching.lower() == "v1":
        problems.append("gpt_model_type V1 does not feed LoRA tensors; use inflight_fused_batching")
    elif batching not in BATCHING:
        problems.append("Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching.")
    refused: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
        ("max_beam_width", read.text("max_beam_width"), ("1",)),
        ("batch_scheduler_policy", read.text("batch_scheduler_policy"), ("guaranteed_no_evict",)),
        ("decoding_mode", read.text("decoding_mode"), ("top_k", "top_p", "top_k_top_p")),
        ("encoder_model_path", read.text("encoder_model_path"), ()),
        ("max_attention_window_size", read.text("max_attention_window_size"), ()),
        ("sink_token_length", read.text("sink_token_length"), ()),
        ("medusa_choices", read.text("medusa_choices"), ()),
        ("eagle_choices", read.text("eagle_choices"), ()),
        ("participant_ids", read.text("participant_ids"), ()),
    )
    for key, value, allowed in refused:
        if value is not None and value not in allowed:
            hint = f" ({', '.join(allowed)} is)" if allowed else ""
            problems.append(f"{key} {value} is not supported by the reference engine{hint}")
    return problems
