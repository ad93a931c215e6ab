"""The `tensorrt_llm` model behind Triton: parameters in, engine up, requests in, replies out. Knows no Triton types.

`triton_repo/tensorrt_llm/1/model.py` translates between this and Triton's Python backend and does nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from reference_engine.contract import Tensors, check_request_type, read_requests
from reference_engine.decoder import BLOCK_TOKENS, Decoder
from reference_engine.engine import Engine, Limits
from reference_engine.engine_dir import EngineDirectory, open_engine
from reference_engine.errors import RequestRefused
from reference_engine.kv_blocks import BlockPool
from reference_engine.lora_start import start_lora
from reference_engine.outbox import Outbox
from reference_engine.settings import Settings
from reference_engine.ticket import Reply, Ticket, Wanted

log = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 2**30
"""Bound of the KV cache if `max_tokens_in_paged_kv_cache` does not say; memory is taken as it is used."""


class Backend:
    """One model instance. `submit` may be called from any thread."""

    def __init__(self, settings: Settings) -> None:
        """Open the engine directory, compile, and start the loop.

        Raises:
            EngineDirectoryError, UnsupportedModel, StartupRefused: the model load fails with this text.
        """
        engine = open_engine(Path(settings.engine_dir))
        self._settings, self._shape = settings, engine.shape
        blocks = _num_blocks(engine, settings)
        decoder = Decoder(engine, num_blocks=blocks, threads=settings.num_threads)
        pool = BlockPool(blocks, BLOCK_TOKENS, reuse=settings.kv_cache_reuse)
        limits = Limits(
            max_batch_size=engine.shape.max_batch_size,
            max_input_len=engine.shape.max_input_len,
            max_seq_len=engine.shape.max_seq_len,
            max_queue_size=settings.max_queue_size,
        )
        store = start_lora(engine.shape, settings)
        self._open: dict[Ticket, tuple[str, tuple[int, ...], Callable[[], bool]]] = {}
        self._outbox = Outbox(self._look_for_cancelled, settings.cancellation_check_s)
        self._engine = Engine(engine.shape, decoder, pool, store, limits, self._outbox)

    def submit(
        self,
        tensors: Tensors,
        request_id: str,
        outputs: frozenset[str],
        send: Callable[[Reply], None],
        is_cancelled: Callable[[], bool],
        parameters: Mapping[str, object] | None = None,
    ) -> None:
        """Take a Triton request; replies come through `send`, the last one with `final` set, errors included.

        `parameters` are Triton's request parameters, of which the contract knows `request_type`.
        """
        try:
            check_request_type((parameters or {}).get("request_type"))
            if _flag(tensors, "stop"):
                self._stop(request_id)
                send(Reply(final=True))
                return
            requests = read_requests(
                tensors,
                streaming_allowed=self._settings.decoupled,
                exclude_input=self._settings.exclude_input,
                vocab_size=self._shape.vocab_size,
            )
        except RequestRefused as error:
            send(Reply(error=str(error), final=True))
            return
        wanted = Wanted(
            outputs,
            perf_metrics=_flag(tensors, "return_perf_metrics"),
            log_probs=requests[0].wants_log_probs,
            num_input_tokens=_flag(tensors, "return_num_input_tokens"),
            num_output_tokens=_flag(tensors, "return_num_output_tokens"),
            sequence_index=requests[0].num_sequences > 1,
            batch_index=len(requests) > 1,
        )
        ticket = Ticket(wanted, sum(request.num_sequences for request in requests), send)
        numbers = tuple(
            self._engine.submit(request, ticket.listener(row, len(request.token_ids), request.num_sequences))
            for row, request in enumerate(requests)
        )
        self._open[ticket] = (request_id, numbers, is_cancelled)

    def close(self) -> None:
        """End everything that runs, tell it, and stop."""
        self._engine.close()
        self._outbox.close()

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestRefused("Trying to stop a request but request ID is not provided")
        for known, numbers, _ in list(self._open.values()):
            if known == request_id:
                for number in numbers:
                    self._engine.cancel(number)

    def _look_for_cancelled(self) -> None:
        """Called on the outbox thread every `cancellation_check_period_ms`."""
        for ticket, (_, numbers, is_cancelled) in list(self._open.items()):
            if ticket.done:
                del self._open[ticket]
            elif not ticket.cancelled and is_cancelled():
                ticket.cancelled = True
                for number in numbers:
                    self._engine.cancel(number)


def _flag(tensors: Tensors, name: str) -> bool:
    tensor = tensors.get(name)
    return tensor is not None and bool(np.any(tensor))


def _num_blocks(engine: EngineDirectory, settings: Settings) -> int:
    model = engine.model
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_size * 4
    tokens = settings.max_kv_tokens
    if tokens is None:
        wanted = engine.shape.max_batch_size * engine.shape.max_seq_len
        tokens = max(min(wanted, DEFAULT_KV_BYTES // token_bytes), engine.shape.max_seq_len)
    blocks = -(-tokens // BLOCK_TOKENS)
    log.info("KV cache: %d blocks of %d tokens, %d bytes", blocks, BLOCK_TOKENS, blocks * BLOCK_TOKENS * token_bytes)
    return blocks
