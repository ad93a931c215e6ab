"""Tokens: streaming, ends, sampling, log-probabilities, several answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.triton

N = 8


def test_streaming_sends_a_token_at_a_time(server: Any, prompt: list[int]) -> None:
    """Rule: streaming responses carry new tokens only, sequence_length counts them."""
    answer = server.answer(prompt, N)
    assert len(answer.tokens) == N
    assert [ids.shape for ids in answer.values("output_ids")] == [(1, 1, 1)] * N
    assert [int(length.item()) for length in answer.values("sequence_length")] == [1] * N


def test_final_rides_on_the_last_response(server: Any, prompt: list[int]) -> None:
    """Rule: one final flag, and no empty response behind the last token."""
    answer = server.answer(prompt, N)
    assert answer.finals == 1
    assert len(answer.results) == N


def test_without_streaming_one_response(server: Any, prompt: list[int]) -> None:
    """Rule: without streaming exactly one response, with the prompt in front."""
    answer = server.answer(prompt, N, streaming=False)
    assert len(answer.results) == 1
    assert answer.tokens[: len(prompt)] == prompt
    assert answer.values("sequence_length")[0].item() == len(prompt) + N


def test_streaming_defaults_to_off(server: Any, prompt: list[int]) -> None:
    """Rule: `streaming` absent means off."""
    assert len(server.answer(prompt, N, streaming=None).results) == 1


def test_both_ways_give_the_same_tokens(server: Any, prompt: list[int]) -> None:
    """Rule: streaming changes delivery, not tokens."""
    assert server.tokens(prompt, N, streaming=False)[len(prompt) :] == server.tokens(prompt, N)


def test_exclude_input_in_output(server: Any, prompt: list[int]) -> None:
    """Rule: exclude_input_in_output drops the prompt."""
    assert server.tokens(prompt, N, streaming=False, exclude_input_in_output=True) == server.tokens(prompt, N)


def test_request_id_comes_back(server: Any, prompt: list[int]) -> None:
    """Rule: a response carries its request's id."""
    result = server.answer(prompt, 1, request_id="my-id").results[0]
    assert result.get_response().id == "my-id"


def test_only_asked_outputs_come(server: Any, prompt: list[int]) -> None:
    """Rule: a client gets the outputs it asks for."""
    result = server.answer(prompt, 1, outputs=["output_ids", "sequence_length"]).results[0]
    assert {output.name for output in result.get_response().outputs} == {"output_ids", "sequence_length"}


def test_greedy_is_repeatable(server: Any, prompt: list[int]) -> None:
    """Rule: without top-k and top-p the most probable token is taken."""
    assert server.tokens(prompt, N) == server.tokens(prompt, N)


def test_top_k_one_is_greedy(server: Any, prompt: list[int]) -> None:
    """Rule: top-k 1 is greedy at any temperature."""
    assert server.tokens(prompt, N, runtime_top_k=1, temperature=0.7) == server.tokens(prompt, N)


def test_tiny_top_p_is_greedy(server: Any, prompt: list[int]) -> None:
    """Rule: the most probable token is always in the nucleus."""
    assert server.tokens(prompt, N, runtime_top_p=1e-6) == server.tokens(prompt, N)


def test_seed_repeats(server: Any, prompt: list[int]) -> None:
    """Rule: the same seed gives the same sample."""
    drawn = [server.tokens(prompt, N, runtime_top_k=50, temperature=5.0, seed=7) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_another_seed_differs(server: Any, prompt: list[int]) -> None:
    """Rule: seeds matter."""
    drawn = {tuple(server.tokens(prompt, N, runtime_top_k=50, temperature=5.0, seed=seed)) for seed in range(4)}
    assert len(drawn) > 1


def test_end_id_is_left_out(server: Any, prompt: list[int]) -> None:
    """Rule: sequence length counts only tokens to be output; the end id is not one."""
    plain = server.tokens(prompt, N)
    end = plain[N // 2]
    assert server.tokens(prompt, N, end_id=end) == plain[: plain.index(end)]


def test_end_id_gives_a_last_response_without_tokens(server: Any, prompt: list[int]) -> None:
    """Rule: in streaming the final response of an answer that met its end id is empty."""
    end = server.tokens(prompt, N)[N // 2]
    assert server.answer(prompt, N, end_id=end).values("output_ids")[-1].size == 0


def test_end_id_unset_is_minus_one(server: Any, prompt: list[int]) -> None:
    """Rule: end_id -1 is no end id."""
    assert server.tokens(prompt, N, end_id=-1) == server.tokens(prompt, N)


def test_min_tokens_defers_the_end(server: Any, prompt: list[int]) -> None:
    """Rule: below min_tokens the end id is not chosen."""
    plain = server.tokens(prompt, N)
    end = plain[1]
    assert len(server.tokens(prompt, N, end_id=end, min_tokens=5)) >= 5


def test_stop_word_ends_and_stays(server: Any, prompt: list[int]) -> None:
    """Rule: a stop word ends the answer and is part of it."""
    plain = server.tokens(prompt, N)
    words = np.array([[[plain[2], plain[3]], [2, -1]]], np.int32)
    assert server.tokens(prompt, N, stop_words_list=words) == plain[:4]


def test_several_stop_words(server: Any, prompt: list[int]) -> None:
    """Rule: words are cut by cumulative offsets; the first that appears counts."""
    plain = server.tokens(prompt, N)
    words = np.array([[[plain[5], plain[0], plain[1]], [1, 3, -1]]], np.int32)
    assert server.tokens(prompt, N, stop_words_list=words) == plain[:2]


def test_bad_word_of_one_token(server: Any, prompt: list[int]) -> None:
    """Rule: a bad word of one token never appears."""
    first = server.tokens(prompt, N)[0]
    words = np.array([[[first], [1]]], np.int32)
    assert first not in server.tokens(prompt, N, bad_words_list=words)


def test_bad_word_of_two_tokens(server: Any, prompt: list[int]) -> None:
    """Rule: of a longer bad word only the last token is forbidden, after the others."""
    plain = server.tokens(prompt, N)
    words = np.array([[plain[:2], [2, -1]]], np.int32)
    other = server.tokens(prompt, N, bad_words_list=words)
    assert other[0] == plain[0]
    assert other[1] != plain[1]


def test_presence_penalty(server: Any, prompt: list[int]) -> None:
    """Rule: a large presence penalty lets no token come twice."""
    tokens = server.tokens(prompt, 3 * N, presence_penalty=1000.0)
    assert len(set(tokens)) == len(tokens)


def test_frequency_penalty(server: Any, prompt: list[int]) -> None:
    """Rule: a large frequency penalty does as well."""
    tokens = server.tokens(prompt, 3 * N, frequency_penalty=1000.0)
    assert len(set(tokens)) == len(tokens)


def test_repetition_penalty_of_one_changes_nothing(server: Any, prompt: list[int]) -> None:
    """Rule: 1 is the neutral repetition penalty."""
    assert server.tokens(prompt, N, repetition_penalty=1.0) == server.tokens(prompt, N)


def test_embedding_bias(server: Any, prompt: list[int]) -> None:
    """Rule: the bias is added to the logits."""
    bias = np.zeros((1, server.shape.vocab_size), np.float32)
    bias[0, 42] = 10000
    assert server.tokens(prompt, 3, embedding_bias=bias) == [42] * 3


def test_log_probs(server: Any, prompt: list[int]) -> None:
    """Rule: one log-probability a token, the cumulative one is their sum."""
    answer = server.answer(prompt, N, streaming=False, return_log_probs=True)
    each = answer.values("output_log_probs")[0].ravel()
    assert each.size == N
    assert (each <= 0).all()
    np.testing.assert_allclose(answer.values("cum_log_probs")[0].ravel(), [each.sum()], rtol=1e-3)


def test_no_log_probs_unless_asked(server: Any, prompt: list[int]) -> None:
    """Rule: log-probabilities come behind their switch."""
    names = ["output_ids", "sequence_length", "cum_log_probs"]
    assert server.answer(prompt, 1, outputs=names).values("cum_log_probs") == []


def test_several_answers(server: Any, prompt: list[int]) -> None:
    """Rule: num_return_sequences answers are told apart by sequence_index."""
    answer = server.answer(prompt, N, streaming=False, num_return_sequences=3, runtime_top_k=50, temperature=5.0)
    assert sorted(int(i.item()) for i in answer.values("sequence_index")) == [0, 1, 2]
    assert answer.finals == 1


def test_a_batch_of_prompts(server: Any, prompt: list[int]) -> None:
    """Rule: a request of batch size 2 is split; batch_index tells the rows apart."""
    answer = server.answer(
        prompt,
        N,
        input_ids=np.array([prompt, [*reversed(prompt)]], np.int32),
        input_lengths=np.array([[len(prompt)], [len(prompt) - 1]], np.int32),
        request_output_len=np.array([[4], [2]], np.int32),
        streaming=np.array([[False], [False]]),
    )
    rows = {
        int(index.item()): ids.ravel().tolist()
        for index, ids in zip(answer.values("batch_index"), answer.values("output_ids"), strict=True)
    }
    assert rows[0][len(prompt) :] == server.tokens(prompt, 4)
    assert rows[1][len(prompt) - 1 :] == server.tokens([*reversed(prompt)][:-1], 2)


def test_many_streams_give_what_one_gives(server: Any, prompt: list[int]) -> None:
    """Rule: in-flight batching changes no tokens."""
    alone = [server.tokens([*prompt, i], 20) for i in range(4)]
    asked = [server.ask([*prompt, i % 4], 20) for i in range(16)]
    assert [alone[i % 4] for i in range(16)] == [request.answer().tokens for request in asked]


def test_an_answer_is_cut_at_the_engines_length(server: Any, prompt: list[int]) -> None:
    """Rule: prompt and answer together do not exceed max_seq_len."""
    long = prompt * ((server.shape.max_seq_len - 10) // len(prompt))
    room = server.shape.max_seq_len - len(long)
    assert len(server.tokens(long, room + 50)) == room


def test_context_logits(server: Any, prompt: list[int]) -> None:
    """Rule: context logits are [prompt, vocabulary], and the last row chooses the first token."""
    answer = server.answer(prompt, 1, streaming=False, return_context_logits=True)
    logits = answer.values("context_logits")[0]
    assert logits.shape[-2:] == (len(prompt), server.shape.vocab_size)
    assert int(logits.reshape(-1, server.shape.vocab_size)[-1].argmax()) == answer.tokens[-1]


def test_generation_logits(server: Any, prompt: list[int]) -> None:
    """Rule: generation logits choose the tokens."""
    answer = server.answer(prompt, 4, streaming=False, return_generation_logits=True)
    logits = answer.values("generation_logits")[0].reshape(-1, server.shape.vocab_size)
    assert logits.argmax(axis=1).tolist() == answer.tokens[-4:]
