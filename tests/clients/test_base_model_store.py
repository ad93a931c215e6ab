"""Where a base model stands and how it is fetched: locks, manifests and pip's failures, real files, real pip."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lora_slots.base_model import (
    CacheNotWritable,
    DownloadFailed,
    HashMismatch,
    NoDiskSpace,
    ensure_base_model,
    make_tiny_llama,
)
from lora_slots.base_model.errors import disk_errors
from lora_slots.base_model.fetch import WHEEL, fetch_wheel
from lora_slots.base_model.store import (
    cache_folder,
    is_whole,
    locked,
    looks_whole,
    publish,
    require_space,
    write_manifest,
)


def ignore(done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A published tiny model."""
    made = make_tiny_llama(tmp_path / "made", seed=1)
    publish(made, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def lonely_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip that knows nothing but the returned folder, whatever the user's settings are."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


def test_the_cache_is_the_argument_then_ours_then_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An argument wins over LORA_SLOTS_CACHE, that over XDG_CACHE_HOME, that over ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LORA_SLOTS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home/.cache/lora-slots"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/lora-slots"
    monkeypatch.setenv("LORA_SLOTS_CACHE", str(tmp_path / "ours"))
    assert cache_folder() == tmp_path / "ours"
    assert cache_folder(tmp_path / "given") == tmp_path / "given"


def test_a_published_model_is_whole(model: Path) -> None:
    """After publishing, both the quick look and the reading are content."""
    assert looks_whole(model)
    assert is_whole(model)


def test_a_changed_byte_is_seen(model: Path) -> None:
    """One byte changed in place is suspicious at the look and wrong at the reading."""
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    os.utime(model / "model.safetensors", ns=(0, 0))
    assert not looks_whole(model)
    assert not is_whole(model)


def test_a_missing_file_is_seen(model: Path) -> None:
    """A file that is gone makes the model neither look nor be whole."""
    (model / "tokenizer.json").unlink()
    assert not looks_whole(model)
    assert not is_whole(model)


def test_a_copied_model_is_whole_and_then_looks_so(model: Path) -> None:
    """Other file times need a reading, and a new manifest settles it."""
    os.utime(model / "config.json", ns=(1, 1))
    assert not looks_whole(model)
    assert is_whole(model)
    write_manifest(model)
    assert looks_whole(model)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"recipe": 1}', '{"recipe": 0, "files": {}}'])
def test_a_broken_manifest_vouches_for_nothing(model: Path, content: str) -> None:
    """An unreadable, empty or older manifest leaves the model to be rebuilt."""
    (model / "manifest.json").write_text(content)
    assert not looks_whole(model)
    assert not is_whole(model)


def test_the_second_process_waits_for_the_lock(tmp_path: Path) -> None:
    """A lock held by another process is waited for, and said so; its death frees it."""
    hold = "import sys; from pathlib import Path; from lora_slots.base_model.store import locked\n"
    hold += "with locked(Path(sys.argv[1]), print): print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waited: list[bool] = []

        def waiting() -> None:
            waited.append(True)
            holder.kill()

        with locked(tmp_path, waiting):
            assert waited == [True]


def test_too_little_space_is_told_in_bytes(tmp_path: Path) -> None:
    """The error names the needed and the found bytes and the path."""
    with pytest.raises(NoDiskSpace, match=r"4,611,686,018,427,387,904 bytes, found [\d,]+") as caught:
        require_space(tmp_path, 2**62)
    assert str(tmp_path) in str(caught.value)


def test_a_disk_that_fills_up_while_writing_is_no_space(tmp_path: Path) -> None:
    """The operating system's ENOSPC becomes NoDiskSpace."""
    with pytest.raises(NoDiskSpace, match="filled up while writing"), disk_errors(tmp_path):
        Path("/dev/full").write_bytes(b"x")


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    """A cache below a file cannot be made; the error names it and the variable to set."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheNotWritable, match=r"file/base.*LORA_SLOTS_CACHE"):
        ensure_base_model(tmp_path / "file")


def test_a_closed_terminal_is_not_blamed_on_the_disk(tmp_path: Path) -> None:
    """A broken pipe of a progress bar stays what it is."""
    with pytest.raises(BrokenPipeError), disk_errors(tmp_path):
        raise BrokenPipeError


def test_other_bytes_under_the_name_are_a_hash_mismatch(lonely_pip: Path, tmp_path: Path) -> None:
    """A wheel of the right name with other bytes is refused by pip, past its cache too, and not left behind."""
    (lonely_pip / WHEEL).write_bytes(b"not the pinned bytes")
    with pytest.raises(HashMismatch, match="Is a mirror rewriting it"):
        fetch_wheel(tmp_path, ignore)
    assert not (tmp_path / WHEEL).exists()
    assert not (tmp_path / "pip").exists()


def test_an_index_without_the_wheel_gives_pips_last_lines(lonely_pip: Path, tmp_path: Path) -> None:
    """Where nothing is found the error carries what pip said."""
    with pytest.raises(DownloadFailed, match="No matching distribution") as caught:
        fetch_wheel(tmp_path, ignore)
    assert not isinstance(caught.value, HashMismatch)


def test_no_network_gives_pips_last_lines(lonely_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that does not answer is a DownloadFailed that says to check the network."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        with pytest.raises(DownloadFailed, match="Check the network"):
            fetch_wheel(tmp_path, ignore)
