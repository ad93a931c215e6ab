"""Requests: metrics, stop, cancel, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.triton

TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")


def test_no_metrics_unless_asked(server: Any, prompt: list[int]) -> None:
    """Rule: timings come behind return_perf_metrics."""
    names = ["output_ids", "sequence_length", *TIMES]
    assert server.answer(prompt, 1, outputs=names).values("arrival_time_ns") == []


def test_times_are_in_order(server: Any, prompt: list[int]) -> None:
    """Rule: arrival, scheduled, first token, last token."""
    answer = server.answer(prompt, 4, return_perf_metrics=True)
    times = [int(answer.values(name)[-1].item()) for name in TIMES]
    assert times == sorted(times)
    assert times[0] > 0


def test_last_token_time_is_told_at_the_end(server: Any, prompt: list[int]) -> None:
    """Rule: last_token_time_ns is zero before the final response (llmRequest.h)."""
    answer = server.answer(prompt, 4, return_perf_metrics=True)
    assert [int(t.item()) > 0 for t in answer.values("last_token_time_ns")] == [False, False, False, True]


def test_token_counts(server: Any, prompt: list[int]) -> None:
    """Rule: num_input_tokens and num_output_tokens come behind their switches."""
    answer = server.answer(prompt, 4, return_num_input_tokens=True, return_num_output_tokens=True)
    assert int(answer.values("num_input_tokens")[-1].item()) == len(prompt)
    assert int(answer.values("num_output_tokens")[-1].item()) == 4


def test_speculative_counters_are_zero(server: Any, prompt: list[int]) -> None:
    """Rule: without draft tokens nothing is drafted."""
    answer = server.answer(prompt, 1, return_perf_metrics=True)
    assert int(answer.values("total_draft_tokens")[0].item()) == 0


def test_blocks_are_used_again(server: Any, prompt: list[int]) -> None:
    """Rule: a prompt seen before finds its full KV blocks (enable_kv_cache_reuse is on by default)."""
    long = [int(t) for t in np.random.default_rng().integers(3, 200, 140)]
    counts = [
        int(server.answer(long, 1, return_perf_metrics=True).values("kv_cache_reused_blocks")[-1].item())
        for _ in range(2)
    ]
    assert counts[0] == 0
    assert counts[1] > 0


def test_blocks_are_not_shared_between_adapters(
    server: Any, prompt: list[int], make_adapter: Any, new_task: Any
) -> None:
    """Rule: KV blocks are keyed by lora_task_id."""
    long = [int(t) for t in np.random.default_rng().integers(3, 200, 140)]
    server.answer(long, 1)
    answer = server.answer(long, 1, return_perf_metrics=True, lora_task_id=new_task(), **make_adapter(1))
    assert int(answer.values("kv_cache_reused_blocks")[-1].item()) == 0


def test_stop_by_request_id(server: Any, prompt: list[int]) -> None:
    """Rule: stop with the same request id cancels the request and is answered by an empty final response."""
    room = server.shape.max_seq_len - len(prompt)
    running = server.ask(prompt, room, request_id="to-stop")
    others = [server.ask(prompt, room) for _ in range(8)]  # a tiny engine alone would end before it is stopped
    running.first()
    stopping = server.answer(prompt, 1, request_id="to-stop", stop=True)
    assert (stopping.results, stopping.errors, stopping.finals) == ([], [], 1)
    stopped = running.answer()
    assert stopped.finals == 1
    assert len(stopped.tokens) < room - 1
    for other in others:
        other.goes_on()
        server.stop(other)


def test_stop_leaves_others_alone(server: Any, prompt: list[int]) -> None:
    """Rule: only the request of that id is stopped."""
    other = server.ask(prompt, 40, request_id="not-this")
    server.answer(prompt, 1, request_id="some-other", stop=True)
    assert len(other.answer().tokens) == 40


def test_stop_without_an_id(server: Any, prompt: list[int]) -> None:
    """Rule: the backend's text."""
    error = server.answer(prompt, 1, request_id="", stop=True).error
    assert "Trying to stop a request but request ID is not provided" in error


def test_cancel(server: Any, prompt: list[int]) -> None:
    """Rule: a client that goes away frees its place; others are served."""
    gone = [server.ask(prompt, 200) for _ in range(4)]
    for request in gone:
        request.first()
        request.cancel()
    assert len(server.tokens(prompt, 4)) == 4


def test_too_long_a_prompt(server: Any, prompt: list[int]) -> None:
    """Rule: the refusal names the prompt's length and the engine's."""
    length = server.shape.max_seq_len + 10
    error = server.answer([5] * length, 1).error
    assert f"Prompt length ({length}) exceeds maximum input length (" in error


def test_no_tokens_wanted(server: Any, prompt: list[int]) -> None:
    """Rule: request_output_len must be positive."""
    assert "mMaxNewTokens > 0" in server.answer(prompt, 0).error


def test_more_beams_than_the_engine(server: Any, prompt: list[int]) -> None:
    """Rule: a beam width beyond max_beam_width is refused."""
    assert "beam" in server.answer(prompt, 1, beam_width=4).error.lower()


def test_a_refused_request_disturbs_nobody(server: Any, prompt: list[int]) -> None:
    """Rule: errors belong to one request."""
    alone = server.tokens(prompt, 40)
    running = server.ask(prompt, 40)
    for _ in range(5):
        assert server.answer(prompt, 0).errors
    assert alone == running.answer().tokens
