"""What the runtime asks of a request's numbers: one table for the engine and for who stands before it.

A request that the engine refuses never reaches the steps behind it, so whoever holds something for a request until its
end (a lease of an adapter) checks these rules first.

Source: `cpp/tensorrt_llm/executor/requestImpl.h`, `samplingConfig.cpp`; names are those of the engine's input tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

REQUEST_FILE = "cpp/tensorrt_llm/executor/requestImpl.h"
SAMPLING_FILE = "cpp/tensorrt_llm/executor/samplingConfig.cpp"


@dataclass(frozen=True, slots=True)
class Rule:
    """One number of a request and what must hold of it."""

    name: str
    """Input tensor."""
    holds: Callable[[float], bool]
    text: str
    """What the runtime says if it does not; `{value}` is what was found."""
    file: str = SAMPLING_FILE
    whole: bool = False
    """The tensor is of whole numbers."""


LENGTH_RULE = Rule("request_output_len", lambda v: v > 0, "mMaxNewTokens > 0", REQUEST_FILE, whole=True)
COPIES_RULE = Rule("num_return_sequences", lambda v: v > 0, "numReturnSequences > 0", REQUEST_FILE, whole=True)
SAMPLING_RULES = (
    Rule("temperature", lambda v: v >= 0, "temperature {value} is below 0"),
    Rule("runtime_top_k", lambda v: v >= 0, "runtime_top_k {value} is below 0", whole=True),
    Rule("runtime_top_p", lambda v: 0 <= v <= 1, "runtime_top_p {value} is outside of [0, 1]"),
    Rule("runtime_top_p_min", lambda v: 0 < v <= 1, "runtime_top_p_min {value} is outside of (0, 1]"),
    Rule("runtime_top_p_decay", lambda v: 0 < v <= 1, "runtime_top_p_decay {value} is outside of (0, 1]"),
    Rule("repetition_penalty", lambda v: v > 0, "repetition_penalty {value} is not above 0"),
    Rule("presence_penalty", math.isfinite, "presence_penalty {value} is not finite"),
    Rule("frequency_penalty", math.isfinite, "frequency_penalty {value} is not finite"),
    Rule("min_tokens", lambda v: v >= 0, "min_tokens {value} is below 0", whole=True),
)
RULES = (LENGTH_RULE, COPIES_RULE, *SAMPLING_RULES)
RULED = frozenset(rule.name for rule in RULES) | {"beam_width", "end_id"}
"""Input tensors whose numbers `problems` looks at."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What an engine takes, from its `config.json` (see EngineShape)."""

    vocab_size: int
    max_input_len: int
    """Tokens of a prompt."""
    max_seq_len: int
    """Tokens of prompt and answer; the runtime cuts a longer answer, and refuses no request for it."""
    max_beam_width: int = 1

    def new_tokens(self, prompt_len: int, asked: int) -> int:
        """Tokens an answer has at most."""
        return max(0, min(asked, self.max_seq_len - prompt_len))


def assertion(text: str, file: str) -> str:
    """The runtime's `TLLM_CHECK` form of a text; `file` is the runtime's source file."""
    return f"[TensorRT-LLM][ERROR] Assertion failed: {text} ({file})"


EMPTY_PROMPT = assertion("!mInputTokenIds.empty()", REQUEST_FILE)
"""The text for a request without tokens."""


def broken(values: Mapping[str, float], rules: Iterable[Rule] = RULES) -> Iterator[str]:
    """The runtime's text for every rule that one of `values` (input tensor -> number; absent: default) breaks."""
    for rule in rules:
        if rule.name in values:
            value = values[rule.name]
            if not rule.holds(value):
                yield assertion(rule.text.format(value=int(value) if rule.whole else value), rule.file)


def problems(values: Mapping[str, float], prompt_len: int, limits: RequestLimits) -> list[str]:
    """Everything an engine of these limits refuses in a request's numbers and lengths, the runtime's texts.

    Args:
        values: input tensor -> number; absent ones have the runtime's default, which breaks nothing.
        prompt_len: tokens of the prompt.
    """
    found = list(broken(values))
    if prompt_len < 1:
        found.append(EMPTY_PROMPT)
    if prompt_len > limits.max_input_len:
        found.append(too_long(prompt_len, limits.max_input_len))
    beams = values.get("beam_width", 1)
    if not 1 <= beams <= limits.max_beam_width:
        found.append(f"beam_width {int(beams)} is outside of [1, {limits.max_beam_width}], the engine's max_beam_width")
    end_id = values.get("end_id", -1)
    if not -1 <= end_id < limits.vocab_size:
        found.append(outside_vocabulary(int(end_id), limits.vocab_size))
    return found


def too_long(prompt_len: int, max_input_len: int) -> str:
    """The executor's text for a prompt beyond the engine (`llmRequest.h`)."""
    return f"Prompt length ({prompt_len}) exceeds maximum input length ({max_input_len})."


def outside_vocabulary(end_id: int, vocab_size: int) -> str:
    """The text for an `end_id` that is no token; -1 means none."""
    return assertion(f"end_id {end_id} is not in the vocabulary of {vocab_size}", SAMPLING_FILE)
