"""A request as the engine's loop knows it: checked, one prompt, no Triton in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from reference_engine.lora_pages import Stored
from reference_engine.sampling import Sampling, Words
from trtllm_lora.tensors import Array, IntArray


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and what is wanted of it. A Triton request of batch size B becomes B of these."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    streaming: bool = False
    exclude_input: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    stop_words: Words = ()
    num_sequences: int = 1
    task: int | None = None
    """`lora_task_id`; None for the base model."""
    lora_weights: Array | None = None
    """[rows, width], as pushed with the request."""
    lora_config: IntArray | None = None
    """[rows, 3 or 4]."""
    lora_staged: Stored | None = None
    """The same weights, copied into pages already."""
    wants_log_probs: bool = False
    wants_context_logits: bool = False
    wants_generation_logits: bool = False
    arrival_ns: int = 0
