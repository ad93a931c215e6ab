"""The `tensorrt_llm` model's input tensors -> requests of the engine.

Rules:
1. A tensor the CPU engine cannot honour is refused by name, never ignored. Beam-search settings that mean nothing with
   one beam (`len_penalty`, `early_stopping`, `beam_search_diversity_rate`) are as harmless here as in the runtime.
2. `lora_weights` and `lora_config` count only if `lora_task_id` is there (`getLoraConfigFromTensors`, utils.cc).
3. A Triton request of batch size B is B requests; every tensor has a leading dimension of B.

Names, types and flags: triton_repo/tensorrt_llm/config.pbtxt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from reference_engine.errors import RequestRefused
from reference_engine.lora_checks import check_lora_config
from reference_engine.request import GenerationRequest
from reference_engine.sampling import Sampling, Words
from trtllm_lora.request_rules import (
    COPIES_RULE,
    EMPTY_PROMPT,
    LENGTH_RULE,
    SAMPLING_RULES,
    Rule,
    assertion,
    broken,
    outside_vocabulary,
)

log = logging.getLogger(__name__)

Array = npt.NDArray[np.generic]
Tensors = Mapping[str, Array]

REFUSED = (
    "encoder_input_features",
    "encoder_output_lengths",
    "draft_input_ids",
    "decoder_input_ids",
    "decoder_input_lengths",
    "draft_logits",
    "draft_acceptance_threshold",
    "prompt_embedding_table",
    "prompt_table_extra_ids",
    "prompt_vocab_size",
    "cross_attention_mask",
    "mrope_rotary_cos_sin",
    "mrope_position_deltas",
    "context_phase_params",
    "skip_cross_attn_blocks",
    "retention_token_range_starts",
    "retention_token_range_ends",
    "retention_token_range_priorities",
    "retention_token_range_durations_ms",
    "retention_decode_priority",
    "retention_decode_duration_ms",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
)
"""Inputs of the contract that this engine does not honour."""

_EXECUTOR = "cpp/tensorrt_llm/executor/executorImpl.cpp"


def read_requests(
    tensors: Tensors, *, streaming_allowed: bool, exclude_input: bool, vocab_size: int
) -> list[GenerationRequest]:
    """Requests of one Triton request, in batch order.

    Args:
        streaming_allowed: whether the model is deployed decoupled.
        exclude_input: the model's `exclude_input_in_output` parameter.

    Raises:
        RequestRefused: with the backend's text, as it is sent to the client.
    """
    given = [name for name in REFUSED if name in tensors]
    if given:
        raise RequestRefused(f"Input tensor {', '.join(given)} is not supported by the reference engine")
    if "request_output_len" not in tensors:
        raise RequestRefused("request_output_len is not present in the request")
    if "input_ids" not in tensors:
        raise RequestRefused("input_ids is not present in the request")
    size = tensors["request_output_len"].shape[0]
    uneven = [name for name, tensor in tensors.items() if tensor.ndim == 0 or tensor.shape[0] != size]
    if uneven:
        raise RequestRefused(
            f"Input tensor {', '.join(uneven)} has another batch size than request_output_len ({size})"
        )
    if size > 1 and not streaming_allowed:
        raise RequestRefused(
            "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
        )
    if "lora_task_id" not in tensors and ("lora_weights" in tensors or "lora_config" in tensors):
        log.warning("lora_weights without lora_task_id are ignored: the base model answers")
    arrival = time.monotonic_ns()
    return [_request(_Row(tensors, row), streaming_allowed, exclude_input, vocab_size, arrival) for row in range(size)]


def check_request_type(value: object) -> None:
    """The request parameter `request_type`: half a request is refused, a word nobody knows is only logged (as there).

    Raises:
        RequestRefused: context_only or generation_only.
    """
    if value in ("context_only", "generation_only"):
        raise RequestRefused(f"Request parameter request_type {value} is not supported by the reference engine")
    if value not in (None, "context_and_generation"):
        log.warning("request_type %s is unknown: context_and_generation is assumed", value)


class _Row:
    """One row of a Triton request's batch, with typed access."""

    def __init__(self, tensors: Tensors, row: int) -> None:
        self._tensors, self._row = tensors, row

    def array(self, name: str) -> Array | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor[self._row]

    def scalar(self, name: str, default: float) -> float:
        value = self.array(name)
        if value is None:
            return default
        if value.size != 1:
            raise RequestRefused(f"failed to extract {name}: expected one value, found {value.size}")
        number: float = value.reshape(()).item()
        return number

    def ruled(self, rule: Rule, default: float = 0) -> float:
        """A number that must keep a rule if it is given."""
        value = self.scalar(rule.name, default)
        if rule.name in self._tensors:
            for text in broken({rule.name: value}, (rule,)):
                raise RequestRefused(text)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.scalar(name, default))

    def words(self, name: str) -> Words:
        """`[2, n]`: tokens of all words, and where each ends (filled up with -1)."""
        value = self.array(name)
        if value is None or value.size == 0:
            return ()
        if value.ndim != 2 or value.shape[0] != 2:
            raise RequestRefused(f"{name}: expected shape [2, n], found {list(value.shape)}")
        tokens, words, begin = value[0].tolist(), [], 0
        for end in value[1].tolist():
            if end < 0:
                break
            if not begin < end <= len(tokens):
                raise RequestRefused(f"{name}: offset {end} does not follow {begin} within {len(tokens)} tokens")
            words.append(tuple(tokens[begin:end]))
            begin = end
        return tuple(words)


def _request(
    row: _Row, streaming_allowed: bool, exclude_input: bool, vocab_size: int, arrival: int
) -> GenerationRequest:
    tokens = _prompt(row, vocab_size)
    max_new = int(row.ruled(LENGTH_RULE))
    if row.scalar("beam_width", 1) != 1:
        raise RequestRefused(
            f"Input tensor beam_width: {int(row.scalar('beam_width', 1))} is not supported by the "
            "reference engine, max_beam_width is 1"
        )
    streaming = row.flag("streaming")
    if streaming and not streaming_allowed:
        raise RequestRefused("Streaming is only supported if model is deployed using decoupled mode.")
    task, weights, config = _lora(row)
    copies = int(row.ruled(COPIES_RULE, 1))
    return GenerationRequest(
        token_ids=tokens,
        max_new_tokens=max_new,
        streaming=streaming,
        exclude_input=row.flag("exclude_input_in_output", exclude_input),
        sampling=_sampling(row, vocab_size),
        stop_words=_known(row.words("stop_words_list"), "stop_words_list", vocab_size),
        num_sequences=copies,
        task=task,
        lora_weights=weights,
        lora_config=config,
        wants_log_probs=row.flag("return_log_probs"),
        wants_context_logits=row.flag("return_context_logits"),
        wants_generation_logits=row.flag("return_generation_logits"),
        arrival_ns=arrival,
    )


def _prompt(row: _Row, vocab_size: int) -> tuple[int, ...]:
    ids = row.array("input_ids")
    length = int(row.scalar("input_lengths", 0 if ids is None else ids.size))
    if ids is None or length < 1 or ids.size == 0:
        raise RequestRefused(EMPTY_PROMPT)
    if length > ids.size:
        raise RequestRefused(f"input_lengths {length} exceeds the {ids.size} tokens of input_ids")
    tokens = tuple(ids.reshape(-1)[:length].tolist())
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RequestRefused(assertion(f"input_ids must be in the range [0, {vocab_size})", _EXECUTOR))
    return tokens


def _lora(row: _Row) -> tuple[int | None, Array | None, npt.NDArray[np.int32] | None]:
    task = row.array("lora_task_id")
    if task is None:
        return None, None, None
    if task.size != 1:
        raise RequestRefused("failed to extract lora task id")
    weights, config = row.array("lora_weights"), row.array("lora_config")
    check_lora_config(weights, config)
    return int(task.reshape(()).item()), weights, None if config is None else config.astype(np.int32, copy=False)


def _sampling(row: _Row, vocab_size: int) -> Sampling:
    bias = row.array("embedding_bias")
    if bias is not None and bias.size != vocab_size:
        raise RequestRefused(assertion(f"embedding_bias must have {vocab_size} values, found {bias.size}", _EXECUTOR))
    for rule in SAMPLING_RULES:
        row.ruled(rule)
    sampling = Sampling(
        temperature=row.scalar("temperature", 1.0),
        top_k=int(row.scalar("runtime_top_k", 0)),
        top_p=row.scalar("runtime_top_p", 0.0),
        top_p_min=row.scalar("runtime_top_p_min", 1e-6),
        top_p_decay=row.scalar("runtime_top_p_decay", 1.0),
        top_p_reset_id=int(row.scalar("runtime_top_p_reset_ids", -1)),
        seed=int(row.scalar("seed", 0)),
        repetition_penalty=row.scalar("repetition_penalty", 1.0),
        presence_penalty=row.scalar("presence_penalty", 0.0),
        frequency_penalty=row.scalar("frequency_penalty", 0.0),
        min_tokens=int(row.scalar("min_tokens", 0)),
        end_id=int(row.scalar("end_id", -1)),
        bad_words=_known(row.words("bad_words_list"), "bad_words_list", vocab_size),
        embedding_bias=None if bias is None else bias.reshape(-1).astype(np.float32),
    )
    if not -1 <= sampling.end_id < vocab_size:
        raise RequestRefused(outside_vocabulary(sampling.end_id, vocab_size))
    return sampling


def _known(words: Words, name: str, vocab_size: int) -> Words:
    for word in words:
        for token in word:
            if not 0 <= token < vocab_size:
                raise RequestRefused(f"{name}: token {token} is not in the vocabulary of {vocab_size}")
    return words
