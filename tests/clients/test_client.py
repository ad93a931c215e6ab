"""The client's own rules, without a server: what cannot be meant, what an error says, what is tried again and when."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tenacity import Future, RetryCallState, Retrying
from tritonclient.grpc import service_pb2

import lora_slots
from lora_slots.client_connection import Connection, Tls
from lora_slots.client_retry import Retry, is_safe, rules
from lora_slots.client_wire import (
    generate_request,
    is_miss,
    operation_request,
    result_of,
    server_error,
    text_of,
    tokens_of,
)
from lora_slots.errors import ServerError, Unreachable, UsageError

URL = "127.0.0.1:8001"


def test_the_package_alone_is_light_and_its_door_is_open() -> None:
    """`import lora_slots` loads no gRPC and no numpy; every name it offers can be had from it."""
    script = "import lora_slots, sys; print(sorted({'grpc', 'numpy', 'typer', 'tritonclient'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert {getattr(lora_slots, name).__name__ for name in lora_slots.__all__ if name != "ONCE"} == {
        name for name in lora_slots.__all__ if name != "ONCE"
    }
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        lora_slots.Klient  # noqa: B018


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling": {"temprature": 1.0}}, "no option 'temprature'; there are temperature, top_k"),
        ({"sampling": {"top_k": 1.5}}, "top_k: 1.5 is no INT32"),
        ({"sampling": {"seed": -1}}, "seed: -1 is no UINT64"),
        ({"sampling": {"top_p": "much"}}, "top_p: much is no FP32"),
        ({"max_tokens": 2**31}, "max_tokens: 2147483648 is no INT32"),
        ({"max_tokens": float("nan")}, "max_tokens: nan is no INT32"),
        ({"stop": "x"}, "stop: a sequence of texts"),
        ({"cold": "base"}, "cold: an ensemble's request can 'wait' or 'fail', found 'base'"),
        ({"temperature": 1.0}, "no option temperature; there are max_tokens, request_id"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(options: dict[str, Any], words: str) -> None:
    """One line with the option's name, before anything is sent."""
    with pytest.raises(UsageError, match=words):
        generate_request("a secret prompt", None, stream=True, request_id="1", options=options)  # type: ignore[arg-type]


def test_a_broken_text_is_refused_without_being_quoted() -> None:
    """Half a character cannot be sent; the error has its place, and nothing of the prompt."""
    with pytest.raises(UsageError, match="text_input: half a character at position 6") as refused:
        generate_request("secret\ud800", None, stream=True, request_id="1", options={})
    assert refused.value.__cause__ is None
    assert "secret" not in repr(refused.value)


@pytest.mark.parametrize("url", ["localhost", "http://localhost:8000", "localhost:", ":8001", "host:port", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """host:port, and nothing else."""
    with pytest.raises(UsageError, match="host:port of Triton's gRPC door is expected"):
        Connection(url)


def test_metadata_is_checked_and_never_shown() -> None:
    """The header that crashes Triton is refused; a value may be a secret and is in no text."""
    with pytest.raises(UsageError, match=r"triton_grpc_error: Triton 2\.51 crashes on it"):
        Connection(URL, metadata={"Triton_grpc_error": "true"})
    for key, value in (("a key", "x"), ("key", "ä"), ("grpc-timeout", "1"), ("key-bin", "x"), ("", "x")):
        with pytest.raises(UsageError, match=r"metadata .*letters, digits"):
            Connection(URL, metadata={key: value})
    assert "hidden" not in repr(Connection(URL, metadata={"authorization": "hidden"}))


def test_the_adapter_goes_along_under_the_header_that_was_chosen() -> None:
    """None for the base, none if none is wanted, the request's own before a general one; no header can be forged."""
    assert Connection(URL).headers("pirate@2") == (("x-gateway-model-name", "pirate@2"),)
    assert Connection(URL).headers(None) == ()
    assert Connection(URL, adapter_header=None).headers("pirate") == ()
    assert Connection(URL, adapter_header="x-lora", metadata={"X-Lora": "a", "k": "v"}).headers("b") == (
        ("x-lora", "b"),
        ("k", "v"),
    )
    for strange in ("pirat🦜", "a\r\nb: c", "a\0"):
        assert Connection(URL).headers(strange) == (), "no registry has such a name, and no header may"


def test_certificates_are_read_and_named(tmp_path: Path) -> None:
    """A missing file, or half of a pair."""
    with pytest.raises(UsageError, match=r"tls: root_certificates .*nothing: No such file"):
        Tls(root_certificates=tmp_path / "nothing").credentials()
    with pytest.raises(UsageError, match="private_key and certificate_chain go together"):
        Tls(private_key=tmp_path / "key").credentials()


@pytest.mark.parametrize(
    ("text", "code", "message", "later"),
    [
        ("in ensemble 'ensemble', [NOT_FOUND] no adapter 'x'", "NOT_FOUND", "no adapter 'x'", None),
        (
            "in ensemble 'e', [request id: 7] [UNAVAILABLE] ready in about 1.5 s",
            "UNAVAILABLE",
            "ready in about 1.5 s",
            1.5,
        ),
        ("[StatusCode.INTERNAL] broken", "INTERNAL", "broken", None),
        ("[StatusCode.UNAVAILABLE] busy, retry after 20s", "UNAVAILABLE", "busy, retry after 20s", 20.0),
        ("whatever", "UNKNOWN", "whatever", None),
        (
            "[StatusCode.INTERNAL] in ensemble 'e', Failed to process the request(s) for model 'm_0_0', message: "
            "ValueError: kaboom\n\nAt:\n  /srv/models/m/1/model.py(30): execute\n",
            "INTERNAL",
            "Failed to process the request(s) for model 'm_0_0', message: ValueError: kaboom",
            None,
        ),
        ("[INTERNAL] it broke: Traceback (most recent call last):\n  File x", "INTERNAL", "it broke:", None),
    ],
)
def test_a_servers_error_becomes_its_code_and_its_words(
    text: str, code: str, message: str, later: float | None
) -> None:
    """Without Triton's wrapping, without a trace, with the time that was named."""
    error = server_error(Exception(text), URL)
    assert (error.code, str(error), error.retry_after_s) == (code, message, later)


@given(st.text())
def test_any_text_is_an_error(text: str) -> None:
    """Whatever a server says."""
    assert server_error(Exception(text), URL).code


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"]
)
def test_what_another_try_cannot_mend_is_never_tried_again(code: str) -> None:
    """Nor what is no server's error at all."""
    assert not is_safe(ServerError("x", code=code))
    assert not is_safe(ValueError("x"))


def test_what_another_try_can_mend_is() -> None:
    """UNAVAILABLE, a miss whatever its code, an id that runs if it was ours; not who asked not to wait."""
    miss = ServerError("LoRA task 5 not found in cache. Please send LoRA weights with request", code="INTERNAL")
    cold = ServerError("in HOST, ready in about 2.0 s", code="UNAVAILABLE", retry_after_s=2.0)
    assert is_safe(Unreachable("x"))
    assert is_miss(miss)
    assert is_safe(miss)
    assert is_safe(cold)
    assert not is_safe(cold, waits=False)
    assert is_safe(Unreachable("x"), waits=False), "it is not the adapter that is not there"
    running = ServerError("x", code="ALREADY_EXISTS")
    assert is_safe(running)
    assert not is_safe(running, own_id=False)


def pause_s(error: Exception, attempt: int = 1) -> float:
    """The pause after an error in the so-many-th try."""
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = attempt
    state.outcome = Future(attempt)
    state.outcome.set_exception(error)
    pause: float = rules(Retry(first_s=0.1, max_s=0.3))["wait"](state)
    return pause


def test_a_pause_grows_has_chance_in_it_and_keeps_to_what_the_server_said() -> None:
    """Twice as long each time, up to the longest; never before the time the server named; none for a miss."""
    plain, told = Unreachable("x"), ServerError("x", code="UNAVAILABLE", retry_after_s=2.0)
    for attempt, longest in ((1, 0.1), (2, 0.2), (3, 0.3), (9, 0.3)):
        pauses = [pause_s(plain, attempt) for _ in range(200)]
        assert max(pauses) <= longest
        assert max(pauses) > longest / 2
        assert len(set(pauses)) > 100
    assert all(2.0 <= pause_s(told) <= 2.1 for _ in range(200))
    assert pause_s(ServerError("LoRA task 5 not found in cache", code="INTERNAL"), 3) == 0


def test_tries_are_counted_and_their_time_is_bounded() -> None:
    """The last error is raised as it was; a pause that would end too late is not begun."""
    tried = []

    def fail(error: Exception) -> None:
        tried.append(error)
        raise error

    with pytest.raises(Unreachable):
        Retrying(**rules(Retry(attempts=3, first_s=0.001)))(fail, Unreachable("x"))
    assert len(tried) == 3
    tried.clear()
    late = ServerError("x", code="UNAVAILABLE", retry_after_s=3600.0)
    with pytest.raises(ServerError) as raised:
        Retrying(**rules(Retry()))(fail, late)
    assert (raised.value, len(tried)) == (late, 1)
    with pytest.raises(ServerError):
        Retrying(**rules(Retry(total_s=1e6), within_s=1.0))(fail, late)
    assert len(tried) == 2


def test_responses_are_read_by_the_names_of_their_tensors() -> None:
    """Texts, token ids cut to their length, an operation's answer; what is absent is None."""
    response = service_pb2.ModelInferResponse()
    assert (text_of(response), result_of(response), tokens_of(response)) == (None, None, [])
    for name, content in (
        ("other", b"xx"),
        ("text_output", struct.pack("<I", 3) + "né".encode() + struct.pack("<I", 0)),
        ("op_result", struct.pack("<I", 8) + b'{"a": 1}'),
        ("output_ids", struct.pack("<3i", 5, 6, 7)),
        ("sequence_length", struct.pack("<i", 2)),
    ):
        response.outputs.add(name=name)
        response.raw_output_contents.append(content)
    assert text_of(response) == "né"
    assert result_of(response) == {"a": 1}
    assert tokens_of(response) == [5, 6]


def test_a_request_says_what_was_asked() -> None:
    """Session and policy as parameters, the rest as inputs; an operation as its name and JSON."""
    options: Any = {"session": "s1", "cold": "fail", "stop": ["a", "bc"], "end_id": 2, "sampling": {"seed": 3}}
    made = generate_request("hi", "pirate", stream=False, request_id="id", options=options)
    assert made.id == "id"
    assert (made.parameters["session"].string_param, made.parameters["cold"].string_param) == ("s1", "fail")
    inputs = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in made.inputs}
    assert inputs["stop_words"] == ("BYTES", [1, 2])
    assert inputs["seed"] == ("UINT64", [1, 1])
    contents = dict(zip(inputs, made.raw_input_contents, strict=True))
    assert contents["text_input"] == b"\x02\x00\x00\x00hi"
    assert contents["stream"] == b"\x00"
    operation = operation_request("warm", {"adapter": "pirate"}, "id")
    assert list(operation.raw_input_contents)[1][4:] == b'{"adapter": "pirate"}'
