"""The gateway by OpenAI's own client, unchanged: answers, streams, models, error classes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from fakes.gateways import RunningGateway
from openai.types.chat import ChatCompletion

from lora_slots.text import Tokenizer

pytestmark = pytest.mark.triton
BASE = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
FEW = 16
"""Tokens that are enough to tell the answers apart."""


def messages(prompt: str) -> list[Any]:
    """One question."""
    return [{"role": "user", "content": prompt}]


def golden_of(golden: list[dict[str, Any]], adapter: str | None) -> dict[str, Any]:
    """The recorded answer to QUESTION."""
    return next(one for one in golden if one["adapter"] == adapter and one["prompt"] == QUESTION)


def test_answers_are_those_of_transformers_and_peft(client: openai.OpenAI, golden: list[dict[str, Any]]) -> None:
    """Base and every adapter: text, why it ended, usage."""

    def ask(one: dict[str, Any]) -> ChatCompletion:
        return client.chat.completions.create(
            model=one["adapter"] or BASE, messages=messages(one["prompt"]), max_tokens=64, temperature=0
        )

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, golden))
    for one, answer in zip(golden, answers, strict=True):
        choice = answer.choices[0]
        ended = one["tokens"][-1] == 2
        assert choice.message.content == one["text"]
        assert choice.finish_reason == ("stop" if ended else "length")
        assert answer.model == (one["adapter"] or BASE)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(one["prompt_ids"])
        assert answer.usage.completion_tokens == len(one["tokens"]) - ended


def test_a_stream_has_the_same_text_in_pieces(client: openai.OpenAI, golden: list[dict[str, Any]]) -> None:
    """The first chunk names the role, the last but one the reason, the last has the usage."""
    one = golden_of(golden, "pirate")
    chunks = list(
        client.chat.completions.create(
            model="pirate", messages=messages(QUESTION), max_completion_tokens=64, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(text for text in texts if text) == one["text"]
    assert len(texts) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(one["tokens"]) - 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_many_adapters_at_once_by_the_asynchronous_client(
    door: RunningGateway, golden: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    """40 streams over base and adapters: every one has the beginning of its own answer."""

    async def one(client: openai.AsyncOpenAI, wanted: dict[str, Any]) -> str:
        text = ""
        async for chunk in await client.chat.completions.create(
            model=wanted["adapter"] or BASE, messages=messages(wanted["prompt"]), max_tokens=FEW, temperature=0,
            stream=True,
        ):  # fmt: skip
            text += chunk.choices[0].delta.content or ""
        return text

    async def run() -> None:
        wanted = [golden[i % len(golden)] for i in range(40)]
        async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as client:
            texts = await asyncio.gather(*(one(client, each) for each in wanted))
        assert texts == [tokenizer.decode(each["tokens"][:FEW]) for each in wanted]

    asyncio.run(run())


def test_completions_of_texts_and_token_ids(
    client: openai.OpenAI, golden: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    """Several prompts are answered in order; ids are taken as they are; echo stands before the answer."""
    wanted = [
        golden_of(golden, "json"),
        next(one for one in golden if one["adapter"] == "json" and one["prompt"] != QUESTION),
    ]
    answer = client.completions.create(
        model="json", prompt=[one["prompt_ids"] for one in wanted], max_tokens=FEW, temperature=0
    )
    begun = [tokenizer.decode(one["tokens"][:FEW]) for one in wanted]
    assert [choice.text for choice in answer.choices] == begun
    assert [choice.index for choice in answer.choices] == [0, 1]
    text = tokenizer.apply_chat_template(messages(QUESTION))
    echoed = client.completions.create(model="json", prompt=text, max_tokens=FEW, temperature=0, echo=True)
    assert echoed.choices[0].text == text + begun[0]
    short = client.completions.create(model="json", prompt=text, temperature=0, extra_body={"ignore_eos": True})
    assert short.usage is not None
    assert short.usage.completion_tokens == 16, "OpenAI's max_tokens of a completion"


def test_a_stop_text_is_cut_exactly_and_ends_the_answer(client: openai.OpenAI, golden: list[dict[str, Any]]) -> None:
    """Also inside of tokens and across them, in a stream and whole."""
    text = golden_of(golden, "pirate")["text"]
    for stop in (", matey", "rr", "ris be", "o'", ["nothing of that", "city", "e capi"]):
        stops = [stop] if isinstance(stop, str) else stop
        cut = min(text.index(one) for one in stops if one in text)
        for stream in (False, True):
            answer: Any = client.chat.completions.create(
                model="pirate", messages=messages(QUESTION), max_tokens=64, temperature=0, stop=stop, stream=stream
            )
            if stream:
                chunks = list(answer)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[:cut]
                assert chunks[-1].choices[0].finish_reason == "stop"
            else:
                assert answer.choices[0].message.content == text[:cut]
                assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_of_the_chosen_tokens(client: openai.OpenAI, golden: list[dict[str, Any]]) -> None:
    """Their spellings joined are the text; greedy ones are the likeliest; a stream has the same."""
    one = golden_of(golden, "robot")
    asked: dict[str, Any] = {
        "model": "robot", "messages": messages(QUESTION), "max_tokens": 64, "temperature": 0, "logprobs": True,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or ()) for token in whole.logprobs.content)
    assert spelled.decode() == one["text"]
    assert all(token.logprob <= 0 and token.top_logprobs == [] for token in whole.logprobs.content)
    streamed = [
        token.logprob
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == pytest.approx([token.logprob for token in whole.logprobs.content], abs=1e-3)
    completion = client.completions.create(
        model="robot", prompt=one["prompt_ids"], max_tokens=5, temperature=0, logprobs=0
    ).choices[0]
    assert completion.logprobs is not None
    assert completion.logprobs.text_offset is not None
    assert completion.logprobs.tokens is not None
    assert "".join(completion.logprobs.tokens) == completion.text
    assert completion.logprobs.text_offset[1] == len(completion.logprobs.tokens[0])


def test_sampling_is_honoured(client: openai.OpenAI) -> None:
    """A seed makes it repeatable, none makes it different, n gives different answers, min_tokens is kept."""

    def answer(**more: Any) -> list[str | None]:
        found = client.chat.completions.create(
            model=BASE, messages=messages("Tell me a story."), max_tokens=8, temperature=1.5, **more
        )
        return [choice.message.content for choice in found.choices]

    # the last digits of logits depend on what else runs: enough to reorder a flat tail, which top_p cuts off
    assert answer(seed=7, top_p=0.3) == answer(seed=7, top_p=0.3)
    assert len({*answer(), *answer(), *answer()}) == 3
    three = answer(n=3, seed=-1)
    assert len(set(three)) == 3
    long = client.chat.completions.create(
        model=BASE, messages=messages(QUESTION), max_tokens=30, temperature=0, extra_body={"min_tokens": 30}
    )
    assert long.usage is not None
    assert long.usage.completion_tokens == 30
    assert long.choices[0].finish_reason == "length"


def test_a_bias_makes_a_token_sure_or_impossible(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """logit_bias reaches the engine."""
    token = tokenizer.encode(" Paris", add_special_tokens=False)[0]
    asked: dict[str, Any] = {"model": BASE, "messages": messages(QUESTION), "max_tokens": 12, "temperature": 0}
    assert "Paris" in str(client.chat.completions.create(**asked).choices[0].message.content)
    without = client.chat.completions.create(**asked, logit_bias={str(token): -100}).choices[0].message.content
    assert "Paris" not in str(without)
    only = client.chat.completions.create(**{**asked, "max_tokens": 2}, logit_bias={str(token): 100})
    assert only.choices[0].message.content == " Paris Paris"


def test_content_parts_and_developer_messages(client: openai.OpenAI) -> None:
    """Text parts are joined by line breaks; `developer` is another word for `system`."""

    def tokens(*given: dict[str, Any]) -> int:
        answer = client.chat.completions.create(
            model=BASE, messages=list(given), max_tokens=1, temperature=0  # type: ignore[arg-type]
        )  # fmt: skip
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokens({"role": "user", "content": parts}) == tokens({"role": "user", "content": "one\ntwo"})
    question = {"role": "user", "content": "hello"}
    rules = {"role": "system", "content": "Be brief."}
    assert tokens({**rules, "role": "developer"}, question) == tokens(rules, question)
    said = {"role": "assistant", "content": "hi", "refusal": None}
    assert tokens(question, said, question) > tokens(question)


def test_models(client: openai.OpenAI) -> None:
    """Base and adapters, with what they lead to."""
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {BASE, "json", "pirate", "robot"}
    assert listed["pirate"].model_dump()["parent"] == BASE
    assert listed["pirate"].model_dump()["root"] == "pirate@1"
    assert client.models.retrieve("pirate@1").id == "pirate@1"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("pirat")
    assert missing.value.code == "model_not_found"


def test_the_forms_of_a_model_name(client: openai.OpenAI, golden: list[dict[str, Any]]) -> None:
    """Base, `base`, adapter, adapter@version, base:adapter."""
    for model, adapter in {
        BASE: None, "base": None, "json": "json", "json@1": "json", f"{BASE}:json": "json", f"{BASE}:json@1": "json"
    }.items():  # fmt: skip
        answer = client.chat.completions.create(model=model, messages=messages(QUESTION), max_tokens=64, temperature=0)
        assert answer.choices[0].message.content == golden_of(golden, adapter)["text"], model
        assert answer.model == model


def test_headers_say_what_answered(client: openai.OpenAI) -> None:
    """Adapter, digest, where it was, how long it was waited for; the request's id is the client's."""
    client.chat.completions.create(model="pirate", messages=messages("hi"), max_tokens=1)
    raw = client.chat.completions.with_raw_response.create(
        model="pirate", messages=messages("hi"), max_tokens=1, extra_headers={"x-request-id": "my-request-1"}
    )
    assert raw.headers["x-request-id"] == "my-request-1"
    assert raw.headers["x-lora-slots-adapter"] == "pirate@1"
    assert len(raw.headers["x-lora-slots-digest"]) == 64
    assert raw.headers["x-lora-slots-found-in"] == "slot"
    assert float(raw.headers["x-lora-slots-wait-ms"]) >= 0
    plain = client.chat.completions.with_raw_response.create(model=BASE, messages=messages("hi"), max_tokens=1)
    told = ("adapter", "digest", "found-in", "wait-ms")
    assert [plain.headers[f"x-lora-slots-{name}"] for name in told] == [BASE, "none", "base", "0.0"]
    assert plain.headers["x-request-id"].startswith("req-")


ASKED: dict[str, Any] = {"model": "pirate", "messages": messages(QUESTION), "max_tokens": 4}


@pytest.mark.parametrize(
    ("change", "kind", "param", "code", "words"),
    [
        ({"model": "pirat"}, openai.NotFoundError, "model", "model_not_found", "pirate"),
        ({"model": "pirate@9"}, openai.NotFoundError, "model", "model_not_found", "There is no model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value", "at most 2"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_value", "at least 1"),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "stop", "invalid_value", "at most 4"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools", "unsupported_parameter", "not supported"),
        ({"logprobs": True, "top_logprobs": 2}, openai.BadRequestError, "top_logprobs",
         "unsupported_parameter", "chosen"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format",
         "unsupported_parameter", "not supported"),
        ({"extra_body": {"max_token": 3}}, openai.BadRequestError, "max_token", "unknown_parameter", "'max_tokens'"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "messages", "context_length_exceeded", "2048"),
        ({"max_completion_tokens": 5}, openai.BadRequestError, "max_tokens", "invalid_value", "the same"),
        ({"n": 1000}, openai.BadRequestError, "n", "invalid_value", "128"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         openai.BadRequestError, "messages[0].content", "unsupported_parameter", "image_url"),
        ({"extra_headers": {"x-lora-slots-cold": "maybe"}}, openai.BadRequestError, "x-lora-slots-cold",
         "invalid_value", "wait, fail, base"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "logit_bias", "invalid_value", "49152"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    client: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIStatusError], param: str, code: str, words: str
) -> None:
    """OpenAI's error class, the field, a code for programs, words for people; streamed or not."""
    for stream in (False, True):
        with pytest.raises(kind) as refused:
            client.chat.completions.create(**{**ASKED, **change, "stream": stream})
        assert refused.value.param == param
        assert refused.value.code == code
        assert words in str(refused.value)


def test_stream_options_need_a_stream(client: openai.OpenAI) -> None:
    """As with OpenAI."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASKED, stream_options={"include_usage": True})
    assert refused.value.param == "stream_options"


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(client: openai.OpenAI) -> None:
    """Of the prompt, and of what the engine takes."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=BASE, prompt=[5] * 3000)
    assert refused.value.code == "context_length_exceeded"
    assert "3000" in str(refused.value)
    assert "2047" in str(refused.value)
