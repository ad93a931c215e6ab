"""The folders of running stacks, and the cache they lie in: who has which, who is found, and what a bad disk says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.disks import tmpfs

from lora_slots import address, embedded, examples, stack_folders
from lora_slots.base_model import BaseModelError, CacheNotWritable, NoDiskSpace, make_tiny_llama

HOLD = """
import sys
from pathlib import Path
from lora_slots import stack_folders
with stack_folders.claim(Path(sys.argv[1])) as folder, folder.announced(sys.argv[2]):
    print(folder.path.name, flush=True)
    sys.stdin.read()
"""


def quiet(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def holder(cache: Path, url: str) -> subprocess.Popen[str]:
    """Another process with a stack at `url`, already announced."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(cache), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_stack_has_the_lowest_free_folder(tmp_path: Path) -> None:
    """Two at once have two folders, and one that comes after the first ended has the first's."""
    with stack_folders.claim(tmp_path) as first, stack_folders.claim(tmp_path) as second:
        assert (first.path.name, second.path.name) == ("1", "2")
        first.warm_set.write_text("kept")
        first.registry.write_text("gone")
    with stack_folders.claim(tmp_path) as again:
        assert again.warm_set.read_text() == "kept"
        assert sorted(path.name for path in again.path.iterdir()) == [".lock", "warm.json"]


def test_the_newest_running_stack_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest comes first, one that ended is gone, and the variable wins over all."""
    monkeypatch.setenv("LORA_SLOTS_CACHE", str(tmp_path))
    monkeypatch.delenv("LORA_SLOTS_URL", raising=False)
    assert address.find() == address.DEFAULT_URL
    with stack_folders.claim() as one, one.announced("one:1"):
        with stack_folders.claim() as two, two.announced("two:2"):
            assert stack_folders.running() == ["two:2", "one:1"]
            assert address.find() == "two:2"
        assert address.find() == "one:1"
        monkeypatch.setenv("LORA_SLOTS_URL", "given:3")
        assert address.find() == "given:3"
    assert stack_folders.running() == []


def test_a_stack_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    """What a killed one left is neither found nor kept, and its folder is free for the next."""
    with holder(tmp_path, "dead:1") as other:
        assert said(other) == "1"
        assert stack_folders.running(tmp_path) == ["dead:1"]
        with stack_folders.claim(tmp_path) as mine:
            assert mine.path.name == "2"
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert (tmp_path / "stacks/1/stack.json").exists()
    assert stack_folders.running(tmp_path) == []
    assert not (tmp_path / "stacks/1/stack.json").exists()
    with stack_folders.claim(tmp_path) as mine:
        assert mine.path.name == "1"


def test_one_start_at_a_time(tmp_path: Path) -> None:
    """A second start waits for the first, and says so."""
    with stack_folders.claim(tmp_path):
        code = "import sys; from pathlib import Path; from lora_slots import stack_folders\n"
        code += "with stack_folders.starting(lambda: print('waiting', flush=True), Path(sys.argv[1])): print('mine')"
        with stack_folders.starting(lambda: None, tmp_path):
            other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
            assert said(other) == "waiting"
            assert other.poll() is None
        assert other.communicate()[0] == "mine\n"


def test_a_broken_address_is_no_stack(tmp_path: Path) -> None:
    """A file that is not (yet) what it must be is passed over."""
    with stack_folders.claim(tmp_path) as folder, folder.announced("here:1"):
        for text in ("", "[]", "{}"):
            (folder.path / stack_folders.ADDRESS).write_text(text)
            assert stack_folders.running(tmp_path) == []


@pytest.mark.parametrize("part", ["stacks", "engines", "adapters"])
def test_a_read_only_part_of_the_cache_is_named(part: str, tmp_path: Path) -> None:
    """Whichever folder of the cache cannot be written, the error names it and the variable that sets another."""
    base = make_tiny_llama(tmp_path / "base", seed=1)
    cache = tmp_path / "cache"
    with tmpfs(cache / part, "ro"):
        with pytest.raises(CacheNotWritable, match=rf"{cache / part}.*LORA_SLOTS_CACHE"):
            if part == "stacks":
                stack_folders.claim(cache).__enter__()
            elif part == "engines":
                embedded.ensure_engine(base, cache / part, quiet)
            else:
                embedded.publish_adapters(examples.adapters(), base, tmp_path, quiet, bundles=cache / part / "bundles")
        assert stack_folders.running(cache) == []


@pytest.mark.parametrize("part", ["engines", "adapters"])
def test_a_full_cache_is_told_in_bytes(part: str, tmp_path: Path) -> None:
    """Before an engine or a bundle is written where it does not fit: needed and free bytes, folder and variable."""
    base = make_tiny_llama(tmp_path / "base", seed=1)
    folder = tmp_path / "cache" / part
    said = rf"{folder}.*needed [\d,]+ bytes, found .*LORA_SLOTS_CACHE"
    with tmpfs(folder.parent, "size=64k"), pytest.raises(NoDiskSpace, match=said):
        if part == "engines":
            embedded.ensure_engine(base, folder, quiet)
        else:
            embedded.publish_adapters(examples.adapters(), base, tmp_path, quiet, bundles=folder)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A cache below a file: no stack can run there, and none is found."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BaseModelError, match=r"file/stacks.*LORA_SLOTS_CACHE"), stack_folders.claim(tmp_path / "file"):
        pass
    assert stack_folders.running(tmp_path / "file") == []


def test_a_damaged_bundle_is_written_anew(tmp_path: Path) -> None:
    """Bundles are shared by all stacks, so what one finds broken it replaces, byte for byte."""
    from lora_slots.base_model import ensure_base_model

    base, (name, path) = ensure_base_model(), next(iter(examples.adapters().items()))
    embedded.publish_adapters({name: path}, base, tmp_path, quiet)
    (weights,) = tmp_path.glob("bundles/*/model.lora_weights.npy")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    embedded.publish_adapters({name: path}, base, tmp_path, quiet)
    assert weights.read_bytes() == whole


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    """An engine half made by a process that is gone goes with the next one that is built."""
    base = make_tiny_llama(tmp_path / "base", seed=1)
    half = tmp_path / "engines" / f".{base.name}-float32-0-abc"
    half.mkdir(parents=True)
    engine = embedded.ensure_engine(base, half.parent, quiet)
    assert {path.name for path in half.parent.iterdir()} == {".lock", engine.name}
