"""A checked body -> a Job: what is asked of the engine, and what is made of its answer. Pure but for the tokenizer.

OpenAI's meaning of the sampling fields in the engine's terms: `temperature` and `top_p` are 1 unless they are given, so
tokens are drawn unless `temperature` is 0; without a `seed` every request draws anew (the engine's own default is one
seed for all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_slots.gateway.bodies import ChatBody, CompletionBody, GenerationBody
from lora_slots.gateway.errors import context_too_long, invalid
from lora_slots.text import Tokenizer, TokenizerError

COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of a completion that names none."""
_TOGETHER = 65_536
"""Characters that are tokenised before the lengths are looked at."""
COLDEST = 1e-3
"""Temperatures below are greedy: dividing by them would leave float32."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What of the engine a request depends on."""

    context: int
    """Tokens of prompt and answer."""
    max_prompt: int
    """Tokens of a prompt."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready for the engine but for its adapter."""

    prompts: tuple[tuple[int, ...], ...]
    n: int
    """Answers per prompt."""
    max_tokens: int
    """Of one answer."""
    values: Mapping[str, float]
    """Engine inputs of one value (`door.INPUTS`)."""
    arrays: Mapping[str, NDArray[Any]]
    stops: tuple[str, ...]
    end_ids: frozenset[int]
    """Tokens that end an answer beside the engine's `end_id`; none of them is part of it."""
    log_probs: bool
    stream: bool
    include_usage: bool
    echoes: tuple[str, ...] = ()
    """Texts that stand before the answers, one per prompt; empty: none."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


def chat_text(body: ChatBody, tokenizer: Tokenizer) -> str:
    """The prompt of a conversation by the model's own template. Raises ApiError 400."""
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in body.messages
    ]
    try:
        return tokenizer.apply_chat_template(messages)
    except TokenizerError as error:
        cause = str(error.__cause__ or "it has none: use /v1/completions")
        raise invalid(f"messages: the model's chat template refuses them: {cause[:200]}", "messages") from None


def check_text(text: str, tokenizer: Tokenizer, facts: EngineFacts, param: str) -> None:
    """Refuse a text that cannot fit, before it is tokenised. Raises ApiError 400."""
    least = tokenizer.least_tokens(text)
    if least > facts.max_prompt:
        raise context_too_long(least, None, facts.max_prompt, param, at_least=True)


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, facts: EngineFacts) -> list[list[int]]:
    """The ids of prompts that are texts, until one does not fit. Raises ApiError 400."""
    for i, text in enumerate(texts):
        check_text(text, tokenizer, facts, _param(i, len(texts)))
    ids: list[list[int]] = []
    while len(ids) < len(texts):
        end, size = len(ids), 0
        while end < len(texts) and size < _TOGETHER:
            size += len(texts[end])
            end += 1
        for prompt in tokenizer.encode_batch(texts[len(ids) : end]):
            if len(prompt) > facts.max_prompt:
                raise context_too_long(len(prompt), None, facts.max_prompt, _param(len(ids), len(texts)))
            ids.append(prompt)
    return ids


def _param(index: int, count: int) -> str:
    return "prompt" if count == 1 else f"prompt[{index}]"


def chat_job(body: ChatBody, prompt: list[int], tokenizer: Tokenizer, facts: EngineFacts, seed: int) -> Job:
    """The job of a conversation whose text has the ids `prompt`. Raises ApiError 400."""
    given = body.max_completion_tokens or body.max_tokens
    if body.max_completion_tokens and body.max_tokens and body.max_completion_tokens != body.max_tokens:
        raise invalid("max_tokens and max_completion_tokens are the same thing: give one", "max_tokens")
    _check_length(len(prompt), given, facts, "messages")
    return _job(
        body,
        (tuple(prompt),),
        given or facts.context - len(prompt),
        tokenizer,
        facts,
        seed,
        log_probs=bool(body.logprobs),
    )


def completion_job(
    body: CompletionBody, prompts: Sequence[list[int]], tokenizer: Tokenizer, facts: EngineFacts, seed: int
) -> Job:
    """The job of prompts with the ids `prompts`. Raises ApiError 400."""
    n = body.n or 1
    if body.best_of not in (None, n):
        raise invalid("best_of: answers are not ranked here: leave it out, or give what n has", "best_of")
    if body.echo and body.logprobs is not None:
        raise invalid("echo: the engine gives no log-probabilities of the prompt: not together with logprobs", "echo")
    given = body.max_tokens or COMPLETION_TOKENS
    for i, prompt in enumerate(prompts):
        param = _param(i, len(prompts))
        if not prompt:
            raise invalid(f"{param}: is empty; the engine needs at least one token", param)
        if max(prompt) >= facts.vocab_size:
            raise invalid(f"{param}: {max(prompt)} is no token: the vocabulary has {facts.vocab_size}", param)
        _check_length(len(prompt), given, facts, param)
    echoed = body.prompt if body.echo else ()
    echoes = tuple(
        text if isinstance(text, str) else tokenizer.decode(text, skip_special_tokens=False) for text in echoed
    )
    return _job(
        body,
        tuple(tuple(prompt) for prompt in prompts),
        given,
        tokenizer,
        facts,
        seed,
        log_probs=body.logprobs is not None,
        echoes=echoes,
    )


def _check_length(prompt: int, answer: int | None, facts: EngineFacts, param: str) -> None:
    if prompt > facts.max_prompt:
        raise context_too_long(prompt, None, facts.max_prompt, param)
    if prompt + (answer or 1) > facts.context:
        raise context_too_long(prompt, answer, facts.context, param)


def _job(
    body: GenerationBody,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    tokenizer: Tokenizer,
    facts: EngineFacts,
    seed: int,
    *,
    log_probs: bool,
    echoes: tuple[str, ...] = (),
) -> Job:
    n = body.n or 1
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only together with stream", "stream_options")
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens: {body.min_tokens} is more than the {max_tokens} of max_tokens", "min_tokens")
    values = {"request_output_len": max_tokens, **_sampling(body, seed)}
    end_ids: frozenset[int] = frozenset()
    arrays: dict[str, NDArray[Any]] = {}
    if not body.ignore_eos:
        first, *others = tokenizer.eos_ids
        values["end_id"] = first
        end_ids = frozenset(others)
        if others:  # the engine has one end id; it can be told to stop at the others
            arrays["stop_words_list"] = np.array([[others, range(1, len(others) + 1)]], np.int32)
    if body.logit_bias:
        arrays["embedding_bias"] = _bias(body.logit_bias, facts.vocab_size)
    if n > 1:
        values["num_return_sequences"] = n
    if log_probs:
        values["return_log_probs"] = True
    return Job(
        prompts,
        n,
        max_tokens,
        values,
        arrays,
        body.stop,
        end_ids,
        log_probs,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        echoes=echoes,
    )


def _sampling(body: GenerationBody, seed: int) -> dict[str, float]:
    values: dict[str, float] = {}
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature < COLDEST or body.top_p == 0:
        values["runtime_top_k"] = 1
    else:
        values["temperature"] = temperature
        values["runtime_top_p"] = 1.0 if body.top_p is None else body.top_p
        if body.top_k is not None and body.top_k > 0:
            values["runtime_top_k"] = body.top_k
        values["seed"] = (seed if body.seed is None else body.seed) % 2**64
    others = {
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
    }
    return values | {name: given for name, given in others.items() if given is not None}


def _bias(biases: Mapping[int, float], vocab_size: int) -> NDArray[np.float32]:
    unknown = [token for token in biases if token >= vocab_size]
    if unknown:
        raise invalid(f"logit_bias: {unknown[0]} is no token: the vocabulary has {vocab_size}", "logit_bias")
    bias = np.zeros((1, vocab_size), np.float32)
    bias[0, list(biases)] = list(biases.values())
    return bias
