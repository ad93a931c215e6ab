"""What is warmed before traffic: which adapters of a registry, how many, and what an access log says."""

from __future__ import annotations

import gzip
import json
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_slots.registry import Registry
from lora_slots.access_log import adapter_in, count_adapters
from lora_slots.errors import UsageError
from lora_slots.prewarm import choose, names_of

REGISTRY = """
schema: 1
adapters:
  ant: {versions: [{version: 1, digest: a1, path: a1}]}
  bee:
    current: 1
    versions: [{version: 1, digest: b1, path: b1}, {version: 2, digest: b2, path: b2}]
  cow: {pinned: true, versions: [{version: 4, digest: c4, path: c4}]}
  dog: {versions: [{version: 1, digest: d1, path: d1}]}
aliases:
  support: {targets: {bee: 95, bee@2: 5}}
"""
GATEWAY = {"event": "request", "level": "info", "route": "POST /v1/chat/completions", "status": 200}
NAMES = st.text(string.ascii_letters + string.digits + "._:@/-", min_size=1, max_size=20).filter(
    lambda name: name != "-"
)


def test_pinned_ones_come_first_then_what_aliases_need(tmp_path: Path) -> None:
    """By exact versions, a canary's too; an old version that nothing leads to is not warmed."""
    file = tmp_path / "adapters.yaml"
    file.write_text(REGISTRY)
    assert names_of(Registry(file).content) == ["cow@4", "bee@1", "bee@2", "ant@1", "dog@1"]


def status(num_slots: int, *pinned: str) -> dict[str, Any]:
    """A slot manager's status with adapters pinned in slots, and one that is pinned and in none yet."""
    adapters = [{"name": name, "pinned": True, "tier": "SLOT"} for name in pinned]
    adapters += [{"name": "elk", "pinned": True, "tier": "HOST"}, {"name": "fox", "pinned": False, "tier": "SLOT"}]
    return {"num_slots": num_slots, "adapters": adapters}


@pytest.mark.parametrize(
    ("slots", "pinned", "warmed"),
    [
        (8, (), ["a@1", "b@2", "c"]),
        (2, (), ["a@1", "b@2"]),
        (3, ("z",), ["a@1", "b@2"]),
        (3, ("a", "c@7"), ["a@1", "b@2", "c"]),
        (1, ("y", "z"), []),
    ],
)
def test_never_more_than_there_is_room_for(slots: int, pinned: tuple[str, ...], warmed: list[str]) -> None:
    """What others are pinned in is no room; a name given twice is one."""
    choice = choose(["a@1", "b@2", "a@1", "c"], status(slots, *pinned))
    assert list(choice.names) == warmed
    assert [*choice.names, *choice.left_out] == ["a@1", "b@2", "c"]
    assert choice.slots == slots


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (json.dumps({**GATEWAY, "adapter": "pirate@3", "digest": "5f", "model": "support"}), "pirate"),
        (json.dumps({**GATEWAY, "adapter": "SmolLM2"}), None),
        (json.dumps({**GATEWAY, "status": 404, "outcome": "model_not_found"}), None),
        (json.dumps({"event": "registry broken", "adapter": "pirate@3", "digest": "5f"}), None),
        ('{"adapter": "pirate", "status": "200"}', "pirate"),
        ('{"http_x_gateway_model_name": "team/a@2", "status": "200"}', "team/a@2"),
        ('{"adapter": "-"}', None),
        ('{"adapter": ""}', None),
        ('{"adapter": null}', None),
        ('10.0.0.1 - - [01/Dec/2026:03:00:00 +0000] "POST /v2 HTTP/1.1" 200 512 adapter=pirate', "pirate"),
        ('10.0.0.1 "POST /v2 HTTP/1.1" 200 adapter="pirate" rt=0.1', "pirate"),
        ("1733022000 (adapter=pirate,status=200)", "pirate"),
        ("10.0.0.1 - 200 adapter=-", None),
        ("10.0.0.1 - 200 adapter=", None),
    ],
)
def test_a_line_of_each_form_names_its_adapter(line: str, name: str | None) -> None:
    """The gateway's, a proxy's JSON, a proxy's text; the base is nobody."""
    assert adapter_in(line) == name


@given(NAMES)
def test_every_name_is_read_back(name: str) -> None:
    """As JSON and as text; the gateway's without the version it adds."""
    assert adapter_in(json.dumps({"adapter": name})) == name
    assert adapter_in(f'10.0.0.1 "GET /" 200 adapter="{name}"') == name
    assert adapter_in(json.dumps({**GATEWAY, "adapter": f"{name}@12", "digest": "5f"})) == name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('10.0.0.1 - - "GET / HTTP/1.1" 200', "neither a JSON object nor a line with adapter=NAME"),
        ("I1130 09:00:00.1 http_server.cc:1] HTTP request: 2 /v2", "neither a JSON object nor"),
        ('{"path": "/v2"}', "no 'adapter' or 'x_gateway_model_name'"),
        ('{"adapter": 5}', "'adapter' is no text"),
        ('{"adapter": "a"', "a JSON object was begun that is none"),
        ("[" * 100_000, "begins like a trace file of Triton, and is none"),
        ("noadapter=x", "neither"),
    ],
)
def test_other_forms_are_refused_by_their_line(line: str, words: str, tmp_path: Path) -> None:
    """File and number; nothing of the line is quoted, it may have a prompt in it."""
    file = tmp_path / "access.log"
    file.write_text(line if line.startswith("[") else f'{{"adapter": "ok"}}\n\n{line}\n')
    with pytest.raises(UsageError, match=words) as refused:
        count_adapters([file])
    assert str(refused.value).startswith(f"{file}:{1 if line.startswith('[') else 3}: ")
    assert len(str(refused.value)) < len(str(file)) + 120


def test_a_log_full_of_other_lines_is_told_shortly(tmp_path: Path) -> None:
    """Twenty lines, and how many more."""
    file = tmp_path / "access.log"
    file.write_text("x\n" * 100)
    with pytest.raises(UsageError, match="… and 80 more"):
        count_adapters([file])


@given(st.lists(st.text()))
def test_junk_is_refused_or_counted_and_never_crashes(lines: list[str]) -> None:
    """Whatever a line is."""
    for line in lines:
        for text in (line, "{" + line, f'{{"adapter": {line}'):
            try:
                assert adapter_in(text) is None or adapter_in(text)
            except ValueError as error:
                assert str(error)


def test_several_files_are_counted_together(tmp_path: Path) -> None:
    """Plain, packed and of several forms."""
    plain, packed, broken = tmp_path / "a.log", tmp_path / "b.log.gz", tmp_path / "c.log.gz"
    plain.write_text('{"adapter": "ant"}\n{"adapter": "bee"}\n')
    packed.write_bytes(gzip.compress(b"x adapter=ant\ny adapter=-\n"))
    assert count_adapters([plain, packed]) == Counter(ant=2, bee=1)
    broken.write_bytes(b"not packed")
    with pytest.raises(UsageError, match=r"c\.log\.gz: not what gzip writes"):
        count_adapters([broken])
    with pytest.raises(UsageError, match="nowhere: No such file"):
        count_adapters([tmp_path / "nowhere"])


# recorded from tritonserver 2.51 with --trace-config=triton,file=… --trace-config=level=TENSORS; shortened
TRACE = [
    {"id": 3, "model_name": "lora_router", "model_version": 1, "request_id": "2959", "parent_id": 1},
    {"id": 3, "timestamps": [{"name": "REQUEST_START", "ns": 17684293672239}]},
    {"id": 3, "activity": "TENSOR_QUEUE_INPUT",
     "tensor": {"name": "adapter", "data": '"pirate"', "shape": "1,1", "dtype": "BYTES"}},
    {"id": 1, "model_name": "ensemble", "model_version": 1, "request_id": "2959"},
    {"id": 1, "activity": "TENSOR_QUEUE_INPUT",
     "tensor": {"name": "text_input", "data": '"hi"', "shape": "1,1", "dtype": "BYTES"}},
    {"id": 1, "activity": "TENSOR_QUEUE_INPUT",
     "tensor": {"name": "adapter", "data": '"pirate"', "shape": "1,1", "dtype": "BYTES"}},
]  # fmt: skip


def test_a_trace_of_triton_counts_each_request_once(tmp_path: Path) -> None:
    """The ensemble and lora_router both have the tensor; a file that was cut off is refused."""
    file = tmp_path / "trace.json.0"
    file.write_text(json.dumps(TRACE))
    assert count_adapters([file]) == Counter(pirate=1)
    file.write_text(json.dumps(TRACE)[:-20])
    with pytest.raises(UsageError, match="begins like a trace file of Triton, and is none"):
        count_adapters([file])
