"""Files made to harm: refused in bounded time and memory, nothing executed, nothing written."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import PREFIX, llama_tensors, safetensors_bytes, write_adapter

from peft_to_trtllm import AdapterRefused, convert, inspect

pytestmark = pytest.mark.timeout(300)  # seconds; each takes a few, and a hundred times that is no busy machine

Q = f"{PREFIX}0.self_attn.q_proj"


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "seven bytes": lambda: b"1234567",
    "header bomb": lambda: _file({}, length=2**63),
    "header larger than the file": lambda: _file({}, length=10**9),
    "header of a hundred megabytes": lambda: _file(b" " * (100 << 20)),
    "header is no object": lambda: _file([]),
    "header nested deeply": lambda: _file(b'{"a":' * 200_000),
    "a million keys": lambda: _file(
        b"{" + b",".join(b'"k%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(10**6)) + b"}"
    ),
    "200,000 unknown keys": lambda: _file(
        b"{" + b",".join(b'"k%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(200_000)) + b"}"
    ),
    "a key of ten megabytes": lambda: _file({"k" * (10 << 20): _entry(0, 4)}, bytes(4)),
    "duplicate keys": lambda: _file(b'{"a":%s,"a":%s}' % ((json.dumps(_entry(0, 4)).encode(),) * 2), bytes(4)),
    "overlapping tensors": lambda: _file({"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12)),
    "the same bytes twice": lambda: _file({"a": _entry(0, 8), "b": _entry(0, 8)}, bytes(8)),
    "a hole": lambda: _file({"a": _entry(0, 4), "b": _entry(8, 12)}, bytes(12)),
    "beyond the end": lambda: _file({"a": _entry(0, 400)}, bytes(8)),
    "trailing bytes": lambda: safetensors_bytes(llama_tensors()) + b"x",
    "backwards": lambda: _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    "negative offset": lambda: _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(4)),
    "negative side": lambda: _file({"a": _entry(0, 4, [-1, -1])}, bytes(4)),
    "a side of 2^62": lambda: _file({"a": _entry(0, 4, [2**62, 4])}, bytes(4)),
    "true as a side": lambda: _file({"a": _entry(0, 4, [True])}, bytes(4)),
    "a float side": lambda: _file({"a": _entry(0, 4, [1.0])}, bytes(4)),
    "a thousand dimensions": lambda: _file({"a": _entry(0, 4, [1] * 1000)}, bytes(4)),
    "an unknown type": lambda: _file({"a": _entry(0, 4, dtype="F31")}, bytes(4)),
    "a type that is a list": lambda: _file({"a": _entry(0, 4, dtype=["F32"])}, bytes(4)),
    "missing fields": lambda: _file({"a": {"dtype": "F32"}}, bytes(4)),
    "an entry that is a number": lambda: _file({"a": 7}, bytes(4)),
    "traversal in a name": lambda: _file({"../../../etc/passwd": _entry(0, 4)}, bytes(4)),
    "escapes in a name": lambda: _file({"\x1b[2J\x07base": _entry(0, 4)}, bytes(4)),
    "a lone surrogate in a name": lambda: _file(b'{"\\ud800":' + json.dumps(_entry(0, 4)).encode() + b"}", bytes(4)),
    "a layer number of 5,000 digits": lambda: _file(
        {f"{PREFIX}{'9' * 5000}.self_attn.q_proj.lora_A.weight": _entry(0, 4)}, bytes(4)
    ),
    "a list of 20 million lists": lambda: _file(b'{"a":[' + b"[]," * 20_000_000 + b"[]]}"),
    "a key of 400,000 wrappers": lambda: _file(
        {"module." * 400_000 + "lora_A.weight": _entry(0, 256, [4, 16])}, bytes(256)
    ),
    "a key of 200,000 prefixes": lambda: _file(
        {"base_model.model." * 200_000 + "lora_A.weight": _entry(0, 256, [4, 16])}, bytes(256)
    ),
    "a path of 300,000 base layers": lambda: _file(
        {f"{PREFIX}0.mlp.experts{'.base_layer' * 300_000}.lora_A.weight": _entry(0, 256, [4, 16])}, bytes(256)
    ),
    "a path of 300 characters": lambda: _file(
        {f"{PREFIX}0.self_attn.{'a' * 300}.q_proj.lora_A.weight": _entry(0, 256, [4, 16])}, bytes(256)
    ),
    "a layer number in other digits": lambda: _file(
        {f"{PREFIX}٣.self_attn.q_proj.lora_A.weight": _entry(0, 4)}, bytes(4)
    ),
}


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """None of these takes 900 MiB more than there was; what takes minutes is ended by the mark above."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 900 << 10


def _refused(adapter: Path, out: Path) -> str:
    with pytest.raises(AdapterRefused) as caught:
        convert(adapter, out=out, dtype="float32")
    assert not out.exists()
    text = str(caught.value)
    assert "Traceback" not in text
    assert len(text) < 20_000
    assert all(c.isprintable() or c == "\n" for c in text)
    return text


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_safetensors(tmp_path: Path, kind: str) -> None:
    """A header that lies, swells or hides something is refused, shortly and printably."""
    adapter = write_adapter(tmp_path / "a", {})
    (adapter / "adapter_model.safetensors").write_bytes(SAFETENSORS[kind]())
    _refused(adapter, tmp_path / "o")


class _Evil:
    """A pickle that would run something when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _torch_zip(program: bytes, storages: dict[str, bytes] | None = None, *, deflate: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as archive:
        archive.writestr("adapter_model/data.pkl", program)
        for key, data in (storages or {}).items():
            archive.writestr(f"adapter_model/data/{key}", data)
    return buffer.getvalue()


def _marker() -> Path:
    return Path("adapter-code-was-executed")


BINS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no zip": lambda: b"\x80\x02}q\x00.",
    "a plain pickle with code": lambda: pickle.dumps(_Evil(open, "adapter-code-was-executed", "w")),
    "code by open": lambda: _torch_zip(pickle.dumps(_Evil(open, "adapter-code-was-executed", "w"), 2)),
    "code by eval": lambda: _torch_zip(pickle.dumps(_Evil(eval, "open('adapter-code-was-executed','w')"), 2)),
    "code by a newer protocol": lambda: _torch_zip(pickle.dumps(_Evil(open, "adapter-code-was-executed", "w"), 4)),
    "INST": lambda: _torch_zip(b"(S'adapter-code-was-executed'\nS'w'\nibuiltins\nopen\n."),
    "a memo index of four billion": lambda: _torch_zip(b"\x80\x02}r\xff\xff\xff\xff."),
    "a text of four gigabytes": lambda: _torch_zip(b"\x80\x02X\xff\xff\xff\xffa."),
    "an endless pickle": lambda: _torch_zip(b"\x80\x02" + b"N" * 1_000_000),
    "a dictionary in itself": lambda: _torch_zip(b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."),
    "SETITEM on nothing": lambda: _torch_zip(b"\x80\x02NNNs."),
    "a list of marks": lambda: _torch_zip(b"\x80\x02((((("),
    "something else than tensors": lambda: _torch_zip(pickle.dumps({"a": 1}, 2)),
    "a key that is a tuple two million deep": lambda: _torch_zip(b"\x80\x02}N" + b"\x85" * 2_000_000 + b"Ns."),
    "such a key in an OrderedDict": lambda: _torch_zip(
        b"\x80\x02ccollections\nOrderedDict\n]N" + b"\x85" * 2_000_000 + b"N\x86a\x85R."
    ),
    "a value two million deep": lambda: _torch_zip(b"\x80\x02}X\x01\x00\x00\x00aN" + b"\x85" * 2_000_000 + b"s."),
    "100,000 tuples on a deep stack": lambda: _torch_zip(b"\x80\x02(" + b"N" * 100_000 + b"((t" * 100_000 + b"."),
    "ten million instructions": lambda: _torch_zip(b"\x80\x02" + b"N" * 10_000_000 + b"."),
    "a tuple without its mark": lambda: _torch_zip(b"\x80\x02t."),
    "a mark that lost its items": lambda: _torch_zip(b"\x80\x02N(\x85\x85st."),
    "a number": lambda: _torch_zip(pickle.dumps(7, 2)),
    "deflated": lambda: _torch_zip(pickle.dumps({}, 2), {"0": bytes(1 << 20)}, deflate=True),
    "a zip bomb": lambda: _torch_zip(pickle.dumps({}, 2), {"0": bytes(200 << 20)}, deflate=True),
    "no data.pkl": lambda: _zip_of({"x": b""}),
    "two data.pkl": lambda: _zip_of({"a/data.pkl": b"", "b/data.pkl": b""}),
    "70,000 entries": lambda: _zip_of({f"data/{i}": b"" for i in range(70_000)}),
    "cut off": lambda: _torch_zip(pickle.dumps({}, 2), {"0": bytes(1000)})[:-40],
    "big-endian": lambda: _zip_of({"a/data.pkl": pickle.dumps({}, 2), "a/byteorder": b"big"}),
}


def _zip_of(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", BINS)
def test_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A .bin that is more than a dictionary of tensors is refused, and nothing in it runs."""
    monkeypatch.chdir(tmp_path)
    adapter = write_adapter(tmp_path / "a", {})
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(BINS[kind]())
    text = _refused(adapter, tmp_path / "o")
    assert "pickle" in text or "no tensors" in text
    assert not _marker().exists()


@pytest.mark.oracle
def test_a_plain_bin_is_read(tmp_path: Path) -> None:
    """What torch.save writes of plain tensors is the same adapter as the safetensors file."""
    import torch

    tensors = llama_tensors()
    plain = convert(write_adapter(tmp_path / "a", tensors), out=tmp_path / "o", dtype="float16")
    adapter = write_adapter(tmp_path / "b", {})
    (adapter / "adapter_model.safetensors").unlink()
    state = {key: torch.from_numpy(value) for key, value in tensors.items()}
    torch.save(state, adapter / "adapter_model.bin")
    from_bin = convert(adapter, out=tmp_path / "o", dtype="float16")
    np.testing.assert_array_equal(from_bin.weights(), plain.weights())
    view = {key: torch.from_numpy(np.stack([value, value])[1]) for key, value in tensors.items()}
    torch.save({**view, "x": torch.zeros(3, 4).T}, adapter / "adapter_model.bin")
    with pytest.raises(AdapterRefused, match="contiguous"):
        convert(adapter, out=tmp_path / "o", dtype="float16")


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    """A file cut short after its header was read is refused, not read as something else."""
    from peft_to_trtllm.job import Job, Request

    adapter = write_adapter(tmp_path / "a", llama_tensors())
    with Job(Request(str(adapter), dtype="float32")) as job:
        assert job.conversion
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        list(job.conversion.rows())
        assert job.report.problems.counts["corrupt-file"] == 1


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    """A directory, or a link to nowhere, under the file's name is an input error or a refusal."""
    from peft_to_trtllm import ConversionError

    adapter = write_adapter(tmp_path / "a", {})
    file = adapter / "adapter_model.safetensors"
    file.unlink()
    file.mkdir()
    with pytest.raises(ConversionError):
        inspect(adapter, dtype="float32")
    file.rmdir()
    file.symlink_to("nowhere")
    with pytest.raises(ConversionError):
        inspect(adapter, dtype="float32")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_file_that_never_ends(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe or a device in place of a file is said to be none, and nobody waits for it."""
    import os

    from peft_to_trtllm import InputError
    from peft_to_trtllm.file_hash import FileHash

    adapter = write_adapter(tmp_path / "a", llama_tensors())
    if name == "adapter_model.bin":
        (adapter / "adapter_model.safetensors").unlink()
    (adapter / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(adapter / name)
    else:
        (adapter / name).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="not a regular file"):
        convert(adapter, out=tmp_path / "o", dtype="float32")
    with pytest.raises(OSError, match="not a regular file"):
        FileHash(adapter / name).result()


def test_a_config_of_five_million_objects(tmp_path: Path) -> None:
    """Values are counted before they are parsed."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    (adapter / "adapter_config.json").write_bytes(b'{"peft_type":"LORA","x":[' + b"{}," * 5_000_000 + b"{}]}")
    assert "values in JSON" in _refused(adapter, tmp_path / "o")


def test_a_pattern_on_the_longest_path(tmp_path: Path) -> None:
    """The costliest pattern that is matched, on the longest path that is, ends soon."""
    path = "base_model.model." + "model." * 35 + "layers.0.self_attn.q_proj"
    tensors = {key.replace(Q, path): value for key, value in llama_tensors({"self_attn.q_proj": 4}, layers=1).items()}
    adapter = write_adapter(tmp_path / "a", tensors, {"alpha_pattern": {".*.*.*b.*": 3}})
    report = inspect(adapter, dtype="float32")
    assert set(report.problems.counts) <= {"pattern-cost"}
