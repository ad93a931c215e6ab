"""The bundle that comes out: same bytes as the leaf writes, same digest everywhere, all or nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.peft_files import LLAMA_DIMS, llama_tensors, write_adapter

from peft_to_trtllm import InputError, convert, stream
from peft_to_trtllm.api import convert_job
from peft_to_trtllm.file_hash import FileHash
from peft_to_trtllm.job import Job, Request
from trtllm_lora import Row, open_bundle, pack, write_bundle
from trtllm_lora.bundle import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE
from trtllm_lora.bundle_writing import WritingFolder

MIXED = {"self_attn.q_proj": 8, "self_attn.v_proj": 4, "mlp.down_proj": 2}
CONFIG = {"rank_pattern": {"q_proj": 8, "down_proj": 2}}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_same_bytes_as_the_leaf(tmp_path: Path, dtype: str) -> None:
    """Written row by row with holes, or whole by trtllm_lora.write_bundle: every file is the same."""
    adapter = write_adapter(tmp_path / "a", llama_tensors(MIXED), CONFIG)
    ours = convert(adapter, out=tmp_path / "ours", dtype=dtype)
    with Job(Request(str(adapter), dtype=dtype)) as job:
        assert job.conversion
        ready = job.conversion
        rows = []
        for number, numbers in ready.rows():
            row = ready.plan.rows[number]
            end = row.rank * row.d_in
            a, b = numbers[:end].reshape(row.rank, row.d_in), numbers[end:].reshape(row.d_out, row.rank)
            rows.append(Row(row.module_id, row.layer, a.copy(), b.copy()))
        weights, table = pack(rows, dtype)
        digest = hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()
        theirs = write_bundle(tmp_path / "theirs", weights, table, ready.facts(digest))
    assert ours.digest == theirs.digest
    for name in (WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE):
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes(), name
    open_bundle(ours.path).verify()


def test_same_input_same_digest(tmp_path: Path) -> None:
    """Neither time nor path nor the order of the file's header enters the rows; the same files give one digest."""
    first = write_adapter(tmp_path / "one" / "pirate", llama_tensors(MIXED), CONFIG)
    second = tmp_path / "two" / "pirate"
    shutil.copytree(first, second)
    os.utime(second / "adapter_model.safetensors", (1, 1))
    bundles = [convert(adapter, out=tmp_path / "o", dtype="float16") for adapter in (first, second)]
    assert bundles[0].digest == bundles[1].digest
    assert [item.name for item in (tmp_path / "o").iterdir()] == [bundles[0].digest]
    turned = write_adapter(tmp_path / "three" / "pirate", dict(reversed(llama_tensors(MIXED).items())), CONFIG)
    other = convert(turned, out=tmp_path / "o", dtype="float16")
    np.testing.assert_array_equal(other.weights(), bundles[0].weights())


def test_rows_are_sorted_and_three_columns_wide(tmp_path: Path) -> None:
    """(layer, module id) order, three columns, a leading 1, zeros to the widest row."""
    bundle = convert(write_adapter(tmp_path / "a", llama_tensors(MIXED), CONFIG), out=tmp_path / "o", dtype="float16")
    assert bundle.config().tolist() == [[[1, 0, 8], [3, 0, 4], [6, 0, 2], [1, 1, 8], [3, 1, 4], [6, 1, 2]]]
    widths = [rank * sum(LLAMA_DIMS[leaf]) for leaf, rank in MIXED.items()]
    assert bundle.weights().shape == (1, 6, max(widths))
    for row, width in zip(bundle.weights()[0], widths * 2, strict=True):
        assert not row[width:].any()


def test_facts(tmp_path: Path) -> None:
    """The manifest says whose weights these are, and with which scales."""
    adapter = write_adapter(
        tmp_path / "pirate", llama_tensors(), {"base_model_name_or_path": "org/llama", "revision": "r1"}
    )
    manifest = convert(adapter, out=tmp_path / "o", dtype="float32").manifest
    assert manifest["adapter"] == "pirate"
    assert (manifest["base_model"], manifest["base_revision"]) == ("org/llama", "r1")
    assert manifest["scales"]["model.layers.0.self_attn.q_proj"] == 2.0
    for name, digest in manifest["source_sha256"].items():
        assert digest == hashlib.sha256((adapter / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """Whatever ends a run in the middle, nothing is left where the bundle would have been."""

    def put(self: Any, values: Any) -> None:
        whole(self, values)
        raise error

    whole = stream.BundleStream.put
    monkeypatch.setattr(stream.BundleStream, "put", put)
    expected = InputError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        convert(write_adapter(tmp_path / "a", llama_tensors()), out=tmp_path / "o", dtype="float32")
    assert not (tmp_path / "o").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the way of --out is an input error, and stays."""
    (tmp_path / "o").write_text("mine")
    with pytest.raises(InputError):
        convert(write_adapter(tmp_path / "a", llama_tensors()), out=tmp_path / "o", dtype="float32")
    assert (tmp_path / "o").read_text() == "mine"


def test_other_bundles_are_left_alone(tmp_path: Path) -> None:
    """A refusal removes nothing that was there before."""
    good = convert(write_adapter(tmp_path / "a", llama_tensors()), out=tmp_path / "o", dtype="float32")
    bad = {key: value * np.float32("nan") for key, value in llama_tensors().items()}
    from peft_to_trtllm import AdapterRefused

    with pytest.raises(AdapterRefused):
        convert(write_adapter(tmp_path / "b", bad), out=tmp_path / "o", dtype="float32")
    assert [item.name for item in (tmp_path / "o").iterdir()] == [good.digest]


def test_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    """The hash in the manifest is of the file that was converted, or there is no bundle."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    file = adapter / "adapter_model.safetensors"
    hashing = FileHash(file)
    hashing.result()
    shutil.copy(file, tmp_path / "new")
    (tmp_path / "new").replace(file)
    with Job(Request(str(adapter), dtype="float32")) as job, pytest.raises(InputError, match="changed while"):
        convert_job(job, tmp_path / "o", hashing=hashing)
    assert not (tmp_path / "o").exists()


def test_two_at_once(tmp_path: Path) -> None:
    """Two conversions of one adapter into one place both succeed, and leave one bundle."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    with ThreadPoolExecutor(4) as pool:
        bundles = list(pool.map(lambda _: convert(adapter, out=tmp_path / "o", dtype="float16"), range(8)))
    assert len({bundle.digest for bundle in bundles}) == 1
    assert [item.name for item in (tmp_path / "o").iterdir()] == [bundles[0].digest]
    bundles[0].verify()


@pytest.mark.parametrize("damage", ["a byte", "cut off", "no manifest", "no weights"])
def test_a_damaged_bundle_is_replaced(tmp_path: Path, damage: str) -> None:
    """What lies under the digest is believed only if every byte is right; else it is written anew."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    good = convert(adapter, out=tmp_path / "o", dtype="float32")
    file = good.path / WEIGHTS_FILE
    if damage == "a byte":
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "cut off":
        os.truncate(file, 200)
    else:
        (good.path / (MANIFEST_FILE if damage == "no manifest" else WEIGHTS_FILE)).unlink()
    again = convert(adapter, out=tmp_path / "o", dtype="float32")
    assert again.digest == good.digest
    open_bundle(again.path).verify()
    assert [item.name for item in (tmp_path / "o").iterdir()] == [good.digest]


def test_a_strangers_folder_under_the_digest_stays(tmp_path: Path) -> None:
    """A folder that holds nothing of a bundle is not taken away."""
    adapter = write_adapter(tmp_path / "a", llama_tensors())
    good = convert(adapter, out=tmp_path / "o", dtype="float32")
    shutil.rmtree(good.path)
    good.path.mkdir()
    (good.path / "mine").write_text("x")
    with pytest.raises(InputError):
        convert(adapter, out=tmp_path / "o", dtype="float32")
    assert (good.path / "mine").read_text() == "x"


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """The next run into a place removes the folder of a dead one, and leaves that of a living one alone."""
    out = tmp_path / "o"
    out.mkdir()
    (out / ".writing-dead").mkdir()
    (out / ".writing-dead" / WEIGHTS_FILE).write_bytes(b"x")
    alive = WritingFolder(out)
    alive.make()
    assert [item.name for item in out.iterdir()] == [alive.path.name]
    (out / ".writing-dead").mkdir()
    bundle = convert(write_adapter(tmp_path / "a", llama_tensors()), out=out, dtype="float32")
    assert sorted(item.name for item in out.iterdir()) == [alive.path.name, bundle.digest]
    alive.remove()
    assert [item.name for item in out.iterdir()] == [bundle.digest]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_second_interrupt_while_it_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """An interrupt that meets the cleaning up of the first is obeyed when nothing is left."""

    def remove(self: Any) -> None:
        if not calls:
            calls.append(1)
            raise error
        whole(self)

    def put(self: Any, values: Any) -> None:
        raise KeyboardInterrupt

    calls: list[int] = []
    whole = WritingFolder.remove
    monkeypatch.setattr(WritingFolder, "remove", remove)
    monkeypatch.setattr(stream.BundleStream, "put", put)
    with pytest.raises(error):
        convert(write_adapter(tmp_path / "a", llama_tensors()), out=tmp_path / "o", dtype="float32")
    assert not (tmp_path / "o").exists()
