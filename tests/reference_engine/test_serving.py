"""Requests and replies: streaming, ends, cancelling, several answers, limits, bad input beside good streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference_engine.contract import REFUSED

PROMPT = [5, 6, 7, 8]
METRICS = frozenset(
    {
        "output_ids",
        "sequence_length",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "last_token_time_ns",
        "kv_cache_alloc_new_blocks",
        "kv_cache_reused_blocks",
        "kv_cache_alloc_total_blocks",
        "acceptance_rate",
        "total_draft_tokens",
        "num_input_tokens",
        "num_output_tokens",
    }
)


def test_streaming_sends_each_token_and_final_rides_on_the_last(client: Any) -> None:
    """One reply a token, [1,1,1]; only the last is final."""
    answer = client.ask(PROMPT, 6).answer()
    assert [r.final for r in answer.replies] == [False] * 5 + [True]
    assert [o.shape for o in answer.output("output_ids")] == [(1, 1, 1)] * 6
    assert [o.tolist() for o in answer.output("sequence_length")] == [[[1]]] * 6


def test_without_streaming_one_reply_carries_prompt_and_answer(client: Any) -> None:
    """`exclude_input_in_output` leaves the prompt out."""
    streamed = client.tokens(PROMPT, 6)
    whole = client.ask(PROMPT, 6, streaming=False).answer()
    assert len(whole.replies) == 1
    assert PROMPT + streamed == whole.tokens
    assert streamed == client.tokens(PROMPT, 6, streaming=False, exclude_input_in_output=True)


def test_end_id_ends_the_answer_and_is_not_part_of_it(client: Any) -> None:
    """The reply that ends by `end_id` has no token; `min_tokens` forbids the end id before."""
    plain = client.tokens(PROMPT, 8)
    end = plain[3]
    first = plain.index(end)
    answer = client.ask(PROMPT, 8, end_id=end).answer()
    assert plain[:first] == answer.tokens
    assert answer.output("output_ids")[-1].shape == (1, 1, 0)
    longer = client.tokens(PROMPT, 8, end_id=end, min_tokens=6)
    assert len(longer) >= 6
    assert end not in longer[:6]


def test_stop_words_end_the_answer_and_are_part_of_it(client: Any) -> None:
    """`[2, n]`: tokens, and where each word ends."""
    plain = client.tokens(PROMPT, 8)
    words = np.array([[[250, plain[2], plain[3]], [1, 3, -1]]], np.int32)
    assert plain[:4] == client.tokens(PROMPT, 8, stop_words_list=words)


def test_bad_words_never_appear(client: Any) -> None:
    """A word of one token is forbidden always, of two after its first."""
    plain = client.tokens(PROMPT, 8)
    one = np.array([[[plain[0]], [1]]], np.int32)
    assert plain[0] not in client.tokens(PROMPT, 8, bad_words_list=one)
    two = np.array([[[plain[0], plain[1]], [2, -1]]], np.int32)
    other = client.tokens(PROMPT, 8, bad_words_list=two)
    assert plain[0] == other[0]
    assert plain[1] != other[1]


def test_sampling_repeats_with_its_seed(client: Any) -> None:
    """Same seed, same answer; another seed, another; top_k 1 and temperature 0 are greedy."""
    sampled = [
        client.tokens(PROMPT, 20, temperature=2.0, runtime_top_k=50, seed=np.array([s], np.uint64)) for s in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    greedy = client.tokens(PROMPT, 20)
    assert greedy == client.tokens(PROMPT, 20, runtime_top_k=1, temperature=0.5)
    assert greedy == client.tokens(PROMPT, 20, runtime_top_p=0.9, temperature=0.0)


def test_penalties_change_the_answer(client: Any) -> None:
    """A large presence penalty lets no token come twice."""
    answer = client.tokens(PROMPT, 30, presence_penalty=1000.0)
    assert len(set(answer + PROMPT)) == len(answer + PROMPT)


def test_embedding_bias_moves_the_choice(client: Any) -> None:
    """A bias of +1000 on one token makes the answer."""
    bias = np.zeros((1, 256), np.float32)
    bias[0, 99] = 1000
    assert client.tokens(PROMPT, 4, embedding_bias=bias) == [99] * 4


def test_log_probs_are_those_of_the_tokens(client: Any) -> None:
    """Log-probabilities follow from the generation logits; the sum is cumulative over replies."""
    names = frozenset({"output_ids", "output_log_probs", "cum_log_probs", "generation_logits"})
    answer = client.ask(PROMPT, 5, outputs=names, return_log_probs=True, return_generation_logits=True).answer()
    logits = np.concatenate([o[0, 0] for o in answer.output("generation_logits")]).astype(np.float64)
    expected = [row[t] - np.log(np.exp(row).sum()) for row, t in zip(logits, answer.tokens, strict=True)]
    got = np.concatenate([o.ravel() for o in answer.output("output_log_probs")])
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    np.testing.assert_allclose(answer.output("cum_log_probs")[-1], [[sum(expected)]], rtol=1e-4)


def test_perf_metrics_only_when_asked_and_last_token_time_only_at_the_end(client: Any) -> None:
    """`last_token_time_ns` is zero until the final reply; without the switch nothing of it is built."""
    answer = client.ask(
        PROMPT,
        4,
        outputs=METRICS,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    ).answer()
    last = [o.item() for o in answer.output("last_token_time_ns")]
    assert [t > 0 for t in last] == [False, False, False, True]
    assert set(answer.replies[-1].outputs) == METRICS
    arrival, scheduled, first = (
        answer.output(name)[-1].item() for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
    )
    assert arrival <= scheduled <= first <= last[-1]
    assert answer.output("num_input_tokens")[-1].ravel().tolist() == [4]
    assert answer.output("num_output_tokens")[-1].ravel().tolist() == [4]
    assert {"output_ids", "sequence_length"} == set(client.ask(PROMPT, 1, outputs=METRICS).answer().replies[0].outputs)


def test_only_requested_outputs_are_built(client: Any) -> None:
    """An ensemble that maps one output gets one."""
    answer = client.ask(PROMPT, 2, outputs=frozenset({"sequence_length"})).answer()
    assert [{"sequence_length"}] * 2 == [set(r.outputs) for r in answer.replies]


def test_return_sequences_are_told_apart(client: Any) -> None:
    """Three answers with three seeds, told apart by `sequence_index`, one final reply."""
    names = frozenset({"output_ids", "sequence_length", "sequence_index"})
    answer = client.ask(
        PROMPT, 6, streaming=False, outputs=names, num_return_sequences=3, temperature=3.0, runtime_top_k=100
    ).answer()
    assert sorted(o.item() for o in answer.output("sequence_index")) == [0, 1, 2]
    assert [r.final for r in answer.replies] == [False, False, True]
    assert len({tuple(o.ravel().tolist()) for o in answer.output("output_ids")}) == 3


def test_a_batch_of_prompts_is_split(client: Any) -> None:
    """Two prompts of different length in one request; replies name their row."""
    outputs = frozenset({"output_ids", "sequence_length", "batch_index"})
    answer = client.ask(
        PROMPT,
        1,
        outputs=outputs,
        streaming=np.array([False, False]),
        input_ids=np.array([[5, 6, 7, 8], [9, 10, 0, 0]], np.int32),
        input_lengths=np.array([4, 2], np.int32),
        request_output_len=np.array([5, 3], np.int32),
    ).answer()
    rows = {r.outputs["batch_index"].item(): r.outputs["output_ids"].ravel().tolist() for r in answer.replies}
    assert rows[0] == PROMPT + client.tokens(PROMPT, 5)
    assert rows[1] == [9, 10, *client.tokens([9, 10], 3)]
    assert sum(r.final for r in answer.replies) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_cpu_cannot_honour_is_refused_by_name(name: str, client: Any) -> None:
    """No input of the contract is ignored."""
    error = client.ask(PROMPT, 1, **{name: np.zeros((1, 1), np.int32)}).answer().error
    assert error == f"Input tensor {name} is not supported by the reference engine"


@pytest.mark.parametrize("kind", ["context_only", "generation_only", "context_and_generation", "no_such"])
def test_half_a_request_is_refused(kind: str, client: Any, asked: Any) -> None:
    """Disaggregated serving is refused by name; an unknown `request_type` is only logged, as in the backend."""
    tensors = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": np.array([4], np.int32),
        "request_output_len": np.array([2], np.int32),
    }
    client.backend.submit(tensors, "", METRICS, asked.queue.put, lambda: False, {"request_type": kind})
    refused = f"Request parameter request_type {kind} is not supported by the reference engine"
    assert asked.answer().error == (refused if kind.endswith("_only") else None)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "beam": ({"beam_width": 4}, "beam_width: 4 is not supported"),
    "no tokens": ({"input_lengths": 0}, "Assertion failed: !mInputTokenIds.empty()"),
    "length": ({"input_lengths": 9}, "input_lengths 9 exceeds the 4 tokens"),
    "output": ({"request_output_len": 0}, "Assertion failed: mMaxNewTokens > 0"),
    "token": ({"input_ids": np.array([[5, 256]], np.int32), "input_lengths": 2}, "in the range [0, 256)"),
    "temperature": ({"temperature": -1.0}, "temperature -1.0 is below 0"),
    "top_p": ({"runtime_top_p": 1.5}, "outside of [0, 1]"),
    "nan": ({"temperature": float("nan")}, "temperature nan"),
    "penalty": ({"repetition_penalty": 0.0}, "is not above 0"),
    "end id": ({"end_id": 256}, "end_id 256 is not in the vocabulary"),
    "words": ({"stop_words_list": np.array([[[1, 2], [5, -1]]], np.int32)}, "offset 5"),
    "word token": ({"bad_words_list": np.array([[[999], [1]]], np.int32)}, "token 999"),
    "bias": ({"embedding_bias": np.zeros((1, 3), np.float32)}, "must have 256 values"),
    "sequences": ({"num_return_sequences": 0}, "numReturnSequences > 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_poison_request_among_streams_disturbs_nobody(case: str, client: Any, prompts: Any) -> None:
    """Bad values get a text that names them, beside fifteen streams that go on."""
    tensors, text = BAD[case]
    alone = [client.tokens(prompt, 12) for prompt in prompts(3)]
    asked = [client.ask(prompts(3)[i % 3], 12) for i in range(15)]
    assert text in client.ask(PROMPT, 4, **tensors).answer().error
    assert [alone[i % 3] for i in range(15)] == [request.answer().tokens for request in asked]


def test_a_prompt_beyond_the_engine_is_refused(client: Any) -> None:
    """Too long a prompt is refused; too long an answer is cut to the engine's length."""
    assert "Prompt length (256) exceeds maximum input length (255)" in client.ask([5] * 256, 4).answer().error
    assert len(client.tokens([5] * 250, 100)) == 6


def test_a_small_kv_cache_makes_requests_wait(serve: Any, prompts: Any) -> None:
    """Room for one request at a time: all are answered; one that can never fit is refused."""
    client = serve(max_kv_tokens=96)
    alone = [client.tokens(prompt, 40) for prompt in prompts(4)]
    asked = [client.ask(prompt, 40) for prompt in prompts(4)]
    assert alone == [request.answer().tokens for request in asked]
    assert "exceed the paged KV cache of 96 tokens" in client.ask(PROMPT, 200).answer().error


def test_kv_blocks_are_used_again_for_the_same_adapter_only(client: Any, make_adapter: Any) -> None:
    """The same prompt finds its blocks; under another adapter it does not, and answers stay right."""
    prompt = list(range(3, 103))
    outputs = METRICS
    client.tokens(PROMPT, 1, task=1, adapter=make_adapter(1))

    def ask(**more: Any) -> tuple[int, list[int]]:
        answer = client.ask(prompt, 6, outputs=outputs, return_perf_metrics=True, **more).answer()
        return answer.output("kv_cache_reused_blocks")[0].item(), answer.tokens

    first, second, lora, again = ask(), ask(), ask(task=1), ask(task=1)
    assert [first[0], second[0], lora[0], again[0]] == [0, 3, 0, 3]
    assert first[1] == second[1]
    assert lora[1] == again[1] != first[1]


def test_queue_bound_refuses_when_full(serve: Any) -> None:
    """Beyond `max_queue_size` waiting requests the runtime says try again later."""
    client = serve(max_queue_size=2, max_kv_tokens=256)
    running = client.ask(PROMPT, 250)
    waiting = [client.ask(PROMPT, 240) for _ in range(2)]
    refused = client.ask(PROMPT, 240).answer().error
    assert refused.endswith("Maximum queue size of 2 has been reached, please try again later")
    assert running.answer().error is None
    assert [request.answer().error for request in waiting] == [None, None]


def test_stop_ends_the_request_of_that_id(client: Any) -> None:
    """`stop` with a request id ends it: the stopped one gets its last word, the stopping one an empty final reply."""
    running = client.ask(PROMPT, 250, request_id="a")
    other = client.ask(PROMPT, 250, request_id="b")
    running.queue.get(timeout=30)
    stopped = client.ask(PROMPT, 1, request_id="a", stop=True).answer()
    assert [(r.outputs, r.final) for r in stopped.replies] == [(None, True)]
    assert len(running.answer().tokens) < 249
    assert len(other.answer().tokens) == 250


def test_stop_without_an_id_is_refused(client: Any) -> None:
    """The backend's text."""
    error = client.ask(PROMPT, 1, stop=True).answer().error
    assert error == "Trying to stop a request but request ID is not provided"


def test_a_client_that_went_away_frees_its_place(serve: Any) -> None:
    """A cancelled client gets the final flag alone and its request stops, waiting or running."""
    client = serve(max_kv_tokens=256, cancellation_check_s=0.01)
    running, waiting = client.ask(PROMPT, 250), client.ask(PROMPT, 250)
    waiting.cancelled = True
    last = waiting.answer().replies[-1]
    assert (last.outputs, last.final) == (None, True)
    running.cancelled = True
    answer = running.answer()
    assert answer.replies[-1].final
    assert client.ask(PROMPT, 4).answer().error is None


def test_closing_tells_everyone(serve: Any) -> None:
    """What runs and waits when the engine closes hears a last word."""
    client = serve(max_kv_tokens=256)
    asked = [client.ask(PROMPT, 250) for _ in range(3)]
    asked[0].queue.get(timeout=30)
    client.backend.close()
    assert all(request.answer().replies[-1].final for request in asked)


def test_streaming_needs_a_decoupled_model(serve: Any) -> None:
    """Both texts of the backend about decoupled mode."""
    client = serve(decoupled=False)
    text = "Streaming is only supported if model is deployed using decoupled mode."
    assert text == client.ask(PROMPT, 1).answer().error
    two: dict[str, Any] = {name: np.array([4, 4], np.int32) for name in ("input_lengths", "request_output_len")}
    two["streaming"] = np.array([False, False])
    error = client.ask(PROMPT, 1, input_ids=np.array([PROMPT, PROMPT], np.int32), **two).answer().error
    assert error == "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy"
    assert len(client.tokens(PROMPT, 3, streaming=False)) == 7
