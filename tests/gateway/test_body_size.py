"""Bodies of too many parts are refused before anything looks at each part; what is only long is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_slots.gateway.bodies import ChatBody, CompletionBody, read_body
from lora_slots.gateway.body_size import MAX_CONTAINERS, MAX_KEYS, MAX_TEXTS, MAX_VALUES, path_of, read_document
from lora_slots.gateway.errors import ApiError

LONG = "x" * 20_000
"""Enough for a body to be counted."""
TEXT = st.text(alphabet='"\\[]{},:é日\n u0041', max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def refused(raw: bytes) -> ApiError:
    """The refusal of a body."""
    with pytest.raises(ApiError) as error:
        read_document(raw)
    assert error.value.status == 400
    return error.value


def many(item: str, count: int, before: str = '"messages":[', end: str = "]}") -> bytes:
    """A body with a list of `count` times the same."""
    return f'{{"user":"{LONG}",{before}{",".join([item] * count)}{end}'.encode()


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (many("{}", 900_000), "messages", f"{MAX_CONTAINERS:,} objects and lists"),
        (many("[]", MAX_CONTAINERS, '"a":1,"tools":['), "tools", f"{MAX_CONTAINERS:,} objects and lists"),
        (many('"a"', MAX_TEXTS, '"prompt":['), "prompt", f"{MAX_TEXTS:,} texts"),
        (many("1", MAX_VALUES, '"prompt":['), "prompt", f"{MAX_VALUES:,} values"),
        (many('{"role":"user","content":""}', 110_000), "messages", "up to here the body has more than"),
        (json.dumps({str(i): LONG[:99] for i in range(MAX_KEYS + 1)}).encode(), None, "the body: has 1,025 fields"),
        (json.dumps({str(i): 1 for i in range(300_000)}).encode(), None, "the body: has"),
        (
            json.dumps({"user": LONG, "m": [0, {"x": dict.fromkeys(map(str, range(MAX_KEYS + 1)))}]}).encode(),
            "m[1].x",
            "m[1].x: has 1,025 fields, and at most 1,024 are taken",
        ),
    ],
)
def test_too_many_parts_are_refused_with_the_field(raw: bytes, param: str | None, words: str) -> None:
    """And with what would be right."""
    error = refused(raw)
    assert (error.param, error.code) == (param, "invalid_value")
    assert words in str(error)


def test_as_many_as_may_be_are_taken() -> None:
    """One less than what is refused above."""
    fields = dict.fromkeys(map(str, range(MAX_KEYS)))
    assert read_document(json.dumps({"user": LONG, "x": fields}).encode())["x"] == fields
    assert len(read_document(many("[]", MAX_CONTAINERS - 2))["messages"]) == MAX_CONTAINERS - 2
    assert len(read_document(many('"a"', MAX_TEXTS - 3))["messages"]) == MAX_TEXTS - 3
    assert len(read_document(many("1", MAX_VALUES - 3))["messages"]) == MAX_VALUES - 3


@given(document=st.dictionaries(TEXT, JSON, max_size=4))
def test_a_long_body_is_read_as_any_other(document: dict[str, Any]) -> None:
    """What stands in texts counts as text, whatever it looks like; and the data is what json reads."""
    document["long"] = 'a "quoted" \\ [{,' * 20_000
    assert read_document(json.dumps(document).encode()) == document
    assert read_document(json.dumps(document, ensure_ascii=False).encode()) == document


@settings(max_examples=30)
@given(
    document=st.dictionaries(TEXT, JSON, max_size=4), key=TEXT.filter(lambda text: "\\" not in text and '"' not in text)
)
def test_what_is_too_much_is_found_behind_anything(document: dict[str, Any], key: str) -> None:
    """The field that is named is the one in which the count is exceeded."""
    document = {one: value for one, value in document.items() if one != key}
    raw = json.dumps({**document, "long": LONG, key: [[]] * MAX_CONTAINERS, "z": 1}).encode()
    assert str(refused(raw)).startswith(f"{path_of([key])}: " if key else "")


def test_what_is_no_json_is_told_so_however_long() -> None:
    """Before its parts are counted, and where; a list is no body."""
    broken = refused(b'{"model":"m",]' + b"{}," * 900_000)
    assert (broken.code, "line 1 column 14" in str(broken)) == ("invalid_json", True)
    assert refused(b"[" * 100_000).code == "invalid_json"
    assert refused(many("{}", 20_000, "", "")).code == "invalid_json"
    assert refused(b"[" + b"[]," * 900_000).code == "invalid_type"


def test_long_lists_have_one_error() -> None:
    """The first message that is wrong; of a thousand more nothing is made."""
    wrong = {"model": "m", "messages": [{"role": "user", "content": "a"}, *[{"role": "nobody"}] * 1000]}
    with pytest.raises(ApiError) as error:
        read_body(ChatBody, json.dumps(wrong).encode())
    assert error.value.param == "messages[1].role"
    assert str(error.value).count("messages[") == 2, "its role and its content"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "a"}] * 4097, "messages: takes at most 4096"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 4097}], "at most 4096 parts, found 4097"),
    ],
)
def test_messages_and_parts_are_counted(messages: list[Any], words: str) -> None:
    """4,096 of each."""
    with pytest.raises(ApiError, match=words) as error:
        read_body(ChatBody, json.dumps({"model": "m", "messages": messages}).encode())
    assert str(error.value.param).startswith("messages")


@pytest.mark.parametrize("prompt", [[True], [-1], [2**31], [1, [1]], [[1], []], [["a"]], [1.0]])
def test_only_token_ids_are_token_ids(prompt: Any) -> None:
    """Whole numbers of 31 bits, and no truth values."""
    with pytest.raises(ApiError, match="list of token ids"):
        read_body(CompletionBody, json.dumps({"model": "m", "prompt": prompt}).encode())
