"""gRPC in a stream's bytes, and Triton's responses in gRPC's messages."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from lora_slots.client_wire import is_final
from lora_slots.gateway.grpc_wire import LARGEST_MESSAGE, CallError, Messages, check_answer, check_end, message
from lora_slots.gateway.responses import Response, Responses, StreamError


@given(
    contents=st.lists(st.binary(max_size=40), max_size=8), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5)
)
def test_messages_do_not_depend_on_the_pieces(contents: list[bytes], sizes: list[int]) -> None:
    """One over several, several in one, empty ones."""
    data, cut = b"".join(map(message, contents)), Messages()
    found, i = [], 0
    while data:
        size = sizes[i % len(sizes)]
        found += cut.push(data[:size])
        data, i = data[size:], i + 1
    assert found == contents
    assert not cut.is_amid


@given(st.lists(st.binary(max_size=30), max_size=8))
def test_junk_is_refused_or_waited_for(junk: list[bytes]) -> None:
    """Never more than one message is kept."""
    cut = Messages()
    try:
        for piece in junk:
            cut.push(piece)
    except CallError as error:
        assert error.code in ("INTERNAL", "RESOURCE_EXHAUSTED")


def test_what_is_too_large_or_compressed_is_refused_before_it_has_come() -> None:
    """By its first five bytes."""
    with pytest.raises(CallError, match=str(LARGEST_MESSAGE + 1)):
        Messages().push(struct.pack(">BI", 0, LARGEST_MESSAGE + 1))
    with pytest.raises(CallError, match="compressed"):
        Messages().push(struct.pack(">BI", 1, 3) + b"abc")


@pytest.mark.parametrize(
    ("trailers", "code", "text"),
    [
        ({b"grpc-status": b"5", b"grpc-message": b"kein Gep%C3%A4ck 100%25"}, "NOT_FOUND", "kein Gepäck 100%"),
        ({b"grpc-status": b"14", b"grpc-message": b"%zz%ff"}, "UNAVAILABLE", "%zz\ufffd"),
        ({b"grpc-status": b"13"}, "INTERNAL", "no reason"),
        ({b"grpc-status": b"99"}, "UNKNOWN", "no reason"),
        ({b"grpc-status": b"-1"}, "UNKNOWN", "no reason"),
        ({b"grpc-status": "²".encode()}, "UNKNOWN", "no reason"),
        ({b"grpc-status": b"1" * 5000}, "UNKNOWN", "no reason"),
        ({}, "UNKNOWN", "no reason"),
    ],
)
def test_how_a_call_ended(trailers: dict[bytes, bytes], code: str, text: str) -> None:
    """The status by its name, the text decoded; what cannot be a status is UNKNOWN."""
    with pytest.raises(CallError, match=text) as raised:
        check_end(trailers)
    assert raised.value.code == code
    check_end({b"grpc-status": b"0"})


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({b":status": b"404", b"content-type": b"text/html"}, "UNIMPLEMENTED"),
        ({b":status": b"503"}, "UNAVAILABLE"),
        ({b":status": b"\xff"}, "UNKNOWN"),
        ({}, "UNKNOWN"),
        ({b":status": b"200", b"content-type": b"text/html"}, "UNKNOWN"),
    ],
)
def test_an_answer_that_is_not_grpc(fields: dict[bytes, bytes], code: str) -> None:
    """By its HTTP status, or its type."""
    with pytest.raises(CallError) as raised:
        check_answer(fields)
    assert raised.value.code == code
    check_answer({b":status": b"200", b"content-type": b"application/grpc+proto"})


# responses ----------------------------------------------------------------------------------------------------------


def made(tensors: list[tuple[str, bytes]], *, final: bool = False, error: str = "") -> Any:
    """A response."""
    answer = service_pb2.ModelStreamInferResponse(error_message=error)
    answer.infer_response.model_name = "tensorrt_llm"
    answer.infer_response.parameters["triton_final_response"].bool_param = final
    for name, content in tensors:
        answer.infer_response.outputs.add(name=name, datatype="INT32", shape=[1, 1])
        answer.infer_response.raw_output_contents.append(content)
    return answer


names = st.sampled_from(["output_ids", "sequence_length", "x"])
contents = st.sampled_from([b"", b"\x32\x04", b"abcd", b"dcba", b"\x32\x02ab", b"a" * 130, b"b" * 130])
tensors = st.lists(st.tuples(names, contents), max_size=3)


@given(st.lists(st.tuples(tensors, st.booleans()), max_size=10))
def test_responses_are_what_protobuf_reads(sent: list[tuple[list[tuple[str, bytes]], bool]]) -> None:
    """Whatever came before, and however alike they are."""
    responses = Responses()
    for one, final in sent:
        answer = made(one, final=final).infer_response
        read = responses.read(made(one, final=final).SerializeToString())
        assert list(read.names) == [output.name for output in answer.outputs]
        assert list(read.contents) == list(answer.raw_output_contents)
        assert read.is_final == is_final(answer) == final


def test_a_response_like_the_last_one_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what makes a token cheap."""
    parsed = []
    parse = service_pb2.ModelStreamInferResponse.FromString

    def counted(data: bytes) -> Any:
        parsed.append(data)
        return parse(data)

    monkeypatch.setattr("lora_slots.gateway.responses._parse", counted)
    responses = Responses()
    for content in (b"aaaa", b"bbbb", b"cccc"):
        read = responses.read(made([("output_ids", content), ("sequence_length", b"\1\0\0\0")]).SerializeToString())
        assert read == Response(("output_ids", "sequence_length"), (content, b"\1\0\0\0"), False)
    assert len(parsed) == 1


def test_tensors_of_other_lengths_are_not_cut_as_the_last_ones() -> None:
    """Though the whole is as long, and begins as they did."""
    responses = Responses()
    for lengths in ((4, 4), (2, 6), (6, 2), (4, 4)):
        sent = [("output_ids", b"a" * lengths[0]), ("sequence_length", b"b" * lengths[1])]
        assert responses.read(made(sent).SerializeToString()).contents == tuple(content for _, content in sent)


def test_errors_and_junk_are_told() -> None:
    """In Triton's words; and after them a response is read as before."""
    responses = Responses()
    with pytest.raises(StreamError, match="too bad"):
        responses.read(made([], error="too bad").SerializeToString())
    with pytest.raises(DecodeError):
        responses.read(b"\xff\xff\xff")
    assert responses.read(made([("a", b"b")]).SerializeToString()).contents == (b"b",)
