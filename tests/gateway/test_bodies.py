"""From a body to a job, without a server: nothing is passed over, and every refusal names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_slots.base_model import make_tiny_llama
from lora_slots.errors import ServerError, Unreachable
from lora_slots.gateway.bodies import ChatBody, CompletionBody, read_body
from lora_slots.gateway.errors import ApiError, from_engine, from_lease, without_paths
from lora_slots.gateway.jobs import EngineFacts, Job, chat_job, chat_text, completion_job
from lora_slots.text import Tokenizer

FACTS = EngineFacts(context=100, max_prompt=90, vocab_size=256)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer with a chat template."""
    return Tokenizer(make_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=1))


def chat(tokenizer: Tokenizer, **more: Any) -> Job:
    """The job of a conversation."""
    body = read_body(ChatBody, json.dumps({**CHAT, **more}).encode())
    return chat_job(body, tokenizer.encode(chat_text(body, tokenizer), add_special_tokens=False), tokenizer, FACTS, 7)


def refused(kind: type[ChatBody | CompletionBody], **fields: Any) -> ApiError:
    """The refusal of a body."""
    with pytest.raises(ApiError) as error:
        read_body(kind, json.dumps(fields).encode())
    return error.value


@given(field=st.sampled_from(sorted(ChatBody.model_fields)), value=JSON)
def test_any_value_of_any_field_is_taken_or_refused_by_its_name(field: str, value: Any) -> None:
    """There is no third way: nothing but ApiError comes out, and it names the field."""
    try:
        read_body(ChatBody, json.dumps({**CHAT, field: value}).encode("utf-8", "surrogatepass"))
    except ApiError as error:
        assert error.status == 400
        assert error.code == "invalid_json" or str(error.param).startswith(field)


@given(raw=st.binary(max_size=200))
def test_junk_is_refused(raw: bytes) -> None:
    """Whatever the bytes are."""
    with pytest.raises(ApiError):
        read_body(CompletionBody, raw)


def test_every_problem_is_told_at_once() -> None:
    """And the first one is `param`."""
    error = refused(ChatBody, model="m", messages=[], temperature="hot", nn=3)
    assert error.param == "temperature"
    assert all(
        word in str(error) for word in ("temperature: must be a number", "messages: needs", "'nn', did you mean 'n'")
    )


@pytest.mark.parametrize("field", ["tools", "functions", "response_format", "audio", "store", "reasoning_effort"])
def test_what_cannot_be_honoured_is_refused_and_its_neutral_value_taken(field: str) -> None:
    """`null` always, and what stands for 'as you do anyway'."""
    assert refused(ChatBody, **CHAT, **{field: "something"}).code == "unsupported_parameter"
    read_body(ChatBody, json.dumps({**CHAT, field: None}).encode())
    neutral = {
        "tools": [],
        "functions": [],
        "response_format": {"type": "text"},
        "store": False,
        "reasoning_effort": "none",
    }
    read_body(ChatBody, json.dumps({**CHAT, field: neutral.get(field)}).encode())


@pytest.mark.parametrize(
    ("field", "value", "wrong", "words"),
    [
        ("parallel_tool_calls", True, "yes", "must be true or false"),
        ("parallel_tool_calls", False, 1, "must be true or false"),
        ("safety_identifier", "user-7", 7, "must be a text"),
        ("prompt_cache_key", "key-7", "x" * 513, "at most 512 characters"),
        ("user", "somebody", ["a"], "must be a text"),
        ("metadata", {"a": "b"}, {"a": 1}, "metadata.a: must be a text"),
    ],
)
def test_fields_that_change_nothing_are_taken(field: str, value: Any, wrong: Any, words: str) -> None:
    """If they are of their type."""
    read_body(ChatBody, json.dumps({**CHAT, field: value}).encode())
    assert words in str(refused(ChatBody, **{**CHAT, field: wrong}))


def test_a_message_may_have_a_name() -> None:
    """Clients name who spoke; no template of ours looks at it."""
    said = {**CHAT["messages"][0], "name": "ann"}
    read_body(ChatBody, json.dumps({"model": "m", "messages": [said]}).encode())
    error = refused(ChatBody, model="m", messages=[{**said, "name": 7}])
    assert (error.param, str(error)) == ("messages[0].name", "messages[0].name: must be a text")


def test_sampling_fields_become_the_engines(tokenizer: Tokenizer) -> None:
    """OpenAI's defaults draw; temperature 0 or top_p 0 is greedy; a seed is any 64 bits."""
    drawn = chat(tokenizer).values
    assert (drawn["temperature"], drawn["runtime_top_p"], drawn["seed"]) == (1.0, 1.0, 7)
    assert "runtime_top_k" not in drawn
    for greedy in ({"temperature": 0}, {"top_p": 0}, {"temperature": 1e-9}):
        values = chat(tokenizer, **greedy).values
        assert values["runtime_top_k"] == 1
        assert not {"temperature", "runtime_top_p", "seed"} & set(values)
    assert chat(tokenizer, seed=-1).values["seed"] == 2**64 - 1
    assert chat(tokenizer, top_k=5, repetition_penalty=1.2).values["runtime_top_k"] == 5
    penalties = chat(tokenizer, presence_penalty=-1, frequency_penalty=0.5).values
    assert (penalties["presence_penalty"], penalties["frequency_penalty"]) == (-1, 0.5)


def test_lengths(tokenizer: Tokenizer) -> None:
    """A chat without max_tokens may fill the context; what does not fit is refused with every length."""
    prompt = chat(tokenizer).prompt_tokens
    assert chat(tokenizer).max_tokens == FACTS.context - prompt
    assert chat(tokenizer, max_tokens=5).values["request_output_len"] == 5
    with pytest.raises(ApiError) as error:
        chat(tokenizer, max_tokens=FACTS.context - prompt + 1)
    assert all(str(number) in str(error.value) for number in (prompt, FACTS.context - prompt + 1, FACTS.context))
    with pytest.raises(ApiError) as error:
        chat(tokenizer, messages=[{"role": "user", "content": "x" * 100}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(ApiError) as error:
        chat(tokenizer, max_tokens=3, min_tokens=4)
    assert error.value.param == "min_tokens"


def test_ends_biases_and_sequences(tokenizer: Tokenizer) -> None:
    """The engine's end id, the others as stop words of one token, a dense bias, n sequences."""
    end, *others = tokenizer.eos_ids
    job = chat(tokenizer, logit_bias={"5": -3, "7": 100}, n=4, stop="x")
    assert job.values["end_id"] == end
    assert ("stop_words_list" in job.arrays) == bool(others)
    bias = job.arrays["embedding_bias"]
    assert (bias.shape, str(bias.dtype), bias[0, 5], bias[0, 7], np.count_nonzero(bias)) == (
        (1, 256),
        "float32",
        -3,
        100,
        2,
    )
    assert (job.values["num_return_sequences"], job.stops) == (4, ("x",))
    assert "end_id" not in chat(tokenizer, ignore_eos=True).values
    with pytest.raises(ApiError) as error:
        chat(tokenizer, logit_bias={"256": 1})
    assert error.value.param == "logit_bias"


class TwoEnds(Tokenizer):
    """A tokenizer whose model has two end tokens, as Llama 3 has."""

    eos_ids = (2, 1)


def test_a_second_end_token_is_a_stop_word(tmp_path: Path) -> None:
    """In TensorRT-LLM's form: ids above, ends below."""
    job = chat(TwoEnds(make_tiny_llama(tmp_path, seed=1)))
    assert job.arrays["stop_words_list"].tolist() == [[[1], [1]]]
    assert job.end_ids == {1}


def test_prompts_of_completions(tokenizer: Tokenizer) -> None:
    """Texts and ids, one and many; an unknown id and an empty prompt are refused with their place."""

    def job(prompt: Any, **more: Any) -> Job:
        body = read_body(CompletionBody, json.dumps({"model": "m", "prompt": prompt, **more}).encode())
        ids = [tokenizer.encode(one) if isinstance(one, str) else one for one in body.prompt]
        return completion_job(body, ids, tokenizer, FACTS, 7)

    assert job("ab").prompts == job(["ab"]).prompts
    assert job([3, 4]).prompts == ((3, 4),)
    assert job([[3], [4, 5]]).prompts == ((3,), (4, 5))
    assert job("ab").max_tokens == 16
    for prompt, param in (([[3], [256]], "prompt[1]"), ("", "prompt"), (["a", ""], "prompt[1]")):
        with pytest.raises(ApiError) as error:
            job(prompt)
        assert error.value.param == param
    wrong: Any
    for wrong in ([], [[]], [1, "a"], [-1], [True], {}, None):
        assert refused(CompletionBody, model="m", prompt=wrong).param == "prompt"
    with pytest.raises(ApiError, match="best_of"):
        job("a", best_of=3)
    with pytest.raises(ApiError, match="echo"):
        job("a", echo=True, logprobs=0)
    assert job([[40, 41]], echo=True).echoes == (tokenizer.decode([40, 41]),)


def test_a_template_that_refuses_is_told(tmp_path: Path) -> None:
    """Its own words, and no path."""
    base = make_tiny_llama(tmp_path, seed=1)
    (base / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ApiError, match="roles must alternate") as error:
        chat(Tokenizer(base))
    assert str(tmp_path) not in str(error.value)
    assert error.value.param == "messages"


def test_no_path_of_the_server_reaches_a_client() -> None:
    """Paths and URLs go; fractions, dates and words with a slash stay."""
    for path in ("/var/lib/slots/bundles/5f0c", "s3://bucket/prefix", "/opt/x/"):
        told = from_lease(ServerError(f"pirate: cannot read {path}: broken", code="UNAVAILABLE"), "pirate")
        assert path not in str(told)
        assert "broken" in str(told)
    assert without_paths("1/2 tokens/s and/or") == "1/2 tokens/s and/or"


def test_what_the_engine_says_becomes_a_status() -> None:
    """Too long is the client's fault, a full queue passes, all else is the server's and tells nothing."""
    text = "Executor failed process requestId 3 … Prompt length (70) exceeds maximum input length (63)."
    assert (
        from_engine(ServerError(text, code="INTERNAL")).status,
        "70" in str(from_engine(ServerError(text, code="INTERNAL"))),
    ) == (400, True)
    assert from_engine(ServerError("Maximum queue size of 5 has been reached", code="INTERNAL")).status == 503
    broken = from_engine(ServerError("Assertion failed (/src/cpp/x.cpp:12)", code="INTERNAL"))
    assert (broken.status, "cpp" in str(broken)) == (500, False)
    assert from_engine(ServerError("no connection", code="UNAVAILABLE")).status == 503
    nobody = from_lease(Unreachable("no server answers at 10.0.0.1:8001"), "m")
    assert (nobody.status, nobody.code, "10.0.0.1" in str(nobody)) == (503, "engine_unavailable", False)
    ready = from_lease(ServerError("cold", code="UNAVAILABLE", retry_after_s=3.2), "m")
    assert (ready.status, int(ready.headers["retry-after"]) >= 3) == (503, True)
    assert from_lease(ServerError("rank 128 does not fit", code="INVALID_ARGUMENT"), "m").status == 422
    pinned = from_lease(ServerError("all 4 slots are pinned", code="RESOURCE_EXHAUSTED"), "m")
    assert (pinned.status, pinned.headers) == (429, {"x-should-retry": "false"})


@pytest.mark.parametrize("value", [0, 5e-324, 1e-3, 11])
def test_a_repetition_penalty_that_is_nothing_in_float32_is_refused_here(tokenizer: Tokenizer, value: float) -> None:
    """The engine takes float32: 5e-324 would be 0 there, which it refuses."""
    with pytest.raises(ApiError) as refused:
        chat(tokenizer, repetition_penalty=value)
    assert refused.value.param == "repetition_penalty"
