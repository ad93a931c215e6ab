"""Values of `tensorrt_llm`'s parameters, as the C++ backend reads them, and those that a person sets by hand.

The backend takes its default for a number that it cannot read, and says so in a log that nobody reads; here it is told
before. Source: `model_instance_state.cc` of tensorrtllm_backend 1.2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

from adapter_slots.settings import Settings, SettingsError
from lora_slots.refusals import Refused
from lora_slots.repository import CACHE_PARAMETERS, template_parameters

Problem = tuple[str, str]
"""(what is wrong with a value, what to write)."""
BATCHING = ("inflight_fused_batching", "inflight_batching")
_MODELS = ("tensorrt_llm", "lora_router")
_WHOLE = re.compile(r"\s*[0-9]{1,18}\s*")
_FLAGS = ("true", "false", "yes", "no", "t", "f", "1", "0")
_CHOICES = {
    "gpt_model_type": BATCHING,
    "batch_scheduler_policy": ("guaranteed_no_evict", "max_utilization"),
    "decoding_mode": (
        *("top_k_top_p", "top_k", "top_p", "beam_search"),
        *("medusa", "redrafter", "lookahead", "eagle"),
    ),
    "guided_decoding_backend": ("xgrammar",),
    "FORCE_CPU_ONLY_INPUT_TENSORS": ("no", "yes"),
}
_KINDS = {
    "positive": (
        *CACHE_PARAMETERS,
        *("max_beam_width", "max_tokens_in_paged_kv_cache", "num_nodes", "num_threads"),
        *("lookahead_window_size", "lookahead_ngram_size"),
    ),
    "whole": (
        *("sink_token_length", "kv_cache_host_memory_bytes", "cuda_graph_cache_size", "recv_poll_period_ms"),
        *("cancellation_check_period_ms", "stats_check_period_ms", "lookahead_verification_set_size"),
        *("iter_stats_max_iterations", "request_stats_max_iterations"),
    ),
    "share": ("kv_cache_free_gpu_mem_fraction", "lora_cache_gpu_memory_fraction", "cross_kv_cache_fraction"),
    "part": ("gpu_weights_percent",),
    "flag": (
        *("kv_cache_onboard_blocks", "enable_kv_cache_reuse", "exclude_input_in_output", "normalize_log_probs"),
        *("enable_chunked_context", "speculative_decoding_fast_logits", "enable_context_fmha_fp32_acc"),
        *("multi_block_mode", "cuda_graph_mode"),
    ),
}
_KIND_OF = {key: kind for kind, keys in _KINDS.items() for key in keys}


def is_whole(text: str) -> bool:
    """Whether the backend reads it as a whole number."""
    return _WHOLE.fullmatch(text) is not None


def is_share(text: str) -> bool:
    """Whether it is a number above 0 and below 1."""
    return 0 < _number(text) < 1


_GOOD: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "positive": (lambda text: is_whole(text) and int(text) > 0, "a whole number of at least 1"),
    "whole": (is_whole, "a whole number"),
    "share": (is_share, "a number above 0 and below 1"),
    "part": (lambda text: 0 < _number(text) <= 1, "a number above 0, and 1 at most"),
    "flag": (lambda text: text.strip().lower() in _FLAGS, "true or false"),
}


def value_problem(key: str, value: str) -> Problem | None:
    """What is wrong with a value of a parameter of `tensorrt_llm`; None if nothing is, or nothing is known of it."""
    if key == "gpt_model_type" and value.lower() == "v1":
        return f"{key} {value} does not feed LoRA tensors (tensorrtllm_backend#511)", f"write {BATCHING[0]}"
    if key in _CHOICES and value not in _CHOICES[key]:
        allowed = _CHOICES[key]
        near = difflib.get_close_matches(value, allowed, n=1)
        return f"{key} {value[:80]!r} is none of {', '.join(allowed)}", f"write {near[0] if near else allowed[0]}"
    if key not in _KIND_OF:
        return None
    good, wanted = _GOOD[_KIND_OF[key]]
    return None if good(value) else (f"{key} is {value[:80]!r}, which the backend cannot use", f"write {wanted}")


def own_parameters(words: list[str]) -> dict[str, dict[str, str]]:
    """Model -> its parameters that were set by hand, `KEY=VALUE` or `lora_router.KEY=VALUE`.

    Raises:
        Refused: words of another form, names that the model has not, values that it cannot use; all of them.
    """
    found: dict[str, dict[str, str]] = {model: {} for model in _MODELS}
    wrong = []
    for word in words:
        key, equals, value = word.partition("=")
        model, _, name = key.strip().rpartition(".")
        if equals and name and (model or "tensorrt_llm") in found:
            found[model or "tensorrt_llm"][name] = value
        else:
            wrong.append(f"--set {word}: write KEY=VALUE, or lora_router.KEY=VALUE")
    for model, parameters in found.items():
        wrong += _problems(model, parameters)
    if wrong:
        raise Refused("\n".join(wrong))
    return found


def _problems(model: str, parameters: Mapping[str, str]) -> list[str]:
    known, wrong, named = template_parameters(model), [], dict[str, str]()
    for key, value in sorted(parameters.items()):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            wrong.append(f"{model} has no parameter {key}; {_instead(near, known)}")
        elif "${" in value:
            wrong.append(f"{model}: {key} is {value!r}, a placeholder; write its value")
        elif value.strip():  # else it is not given, and has its default
            named[key] = value
    if model == "lora_router":
        return wrong + _router_problems(named)
    told = [problem for key, value in named.items() if (problem := value_problem(key, value))]
    return wrong + [f"{model}: {what}; {write}" for what, write in told]


def _instead(near: list[str], known: list[str]) -> str:
    return f"write {near[0]}" if near else f"it has {', '.join(known)}"


def _router_problems(parameters: Mapping[str, str]) -> list[str]:
    """By the settings' own reader, which a server starts with."""
    try:
        Settings.parse({"engine_dir": "-", "registry": "-", "engine_url": "-", **parameters})
    except SettingsError as error:
        return [f"lora_router: {problem}" for problem in error.problems]
    return []


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
