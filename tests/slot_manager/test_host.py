"""HOST: what lies in shared memory is the bundle, a full one is told, and nothing is left whoever is killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from fakes.bundles import SHAPE, small_bundle
from fakes.small_shm import fill, in_small_shm

from adapter_slots import host
from adapter_slots.disk import DiskTier
from adapter_slots.errors import BundleBroken, HostFull
from adapter_slots.mover import load_checked
from trtllm_lora import Bundle, CacheGeometry, open_bundle

MIB = 2**20
FILLS = """
import sys
from pathlib import Path
from adapter_slots import host
from trtllm_lora import open_bundle
loaded = host.load(open_bundle(Path(sys.argv[1])), sys.argv[2])
print("filled", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A small one."""
    return small_bundle(tmp_path, "ant")


def own(name: str) -> str:
    """A region name of this test run's own."""
    return f"{host.PREFIX}{os.getpid()}-{name}"


def test_a_region_holds_weights_and_config(bundle: Bundle) -> None:
    """Byte for byte, where the region says."""
    with (loaded := host.load(bundle, own("whole"))).file:
        raw = (host.SHM / loaded.region.name).read_bytes()
        host.forget_name(loaded.region.name)
    region = loaded.region
    assert len(raw) == region.num_bytes == host.region_bytes(bundle)
    assert raw[: region.weights_bytes] == bundle.weights().tobytes()
    config = np.frombuffer(raw, np.int32, offset=region.config_offset).reshape(region.config_shape)
    assert np.array_equal(config, bundle.config())


def test_a_full_shared_memory_is_told_and_nothing_is_left(bundle: Bundle) -> None:
    """The file system decides, whatever bound was configured; what others need stays free; with room again it works."""

    def body(shm: Path) -> None:
        other = fill(shm, leave=host.KEPT_FREE)
        with pytest.raises(HostFull, match=r"no room for \d+ bytes: \d+ of \d+ are free, and \d+ must stay so"):
            host.load(bundle, own("full"))
        assert list(host.SHM.iterdir()) == [host.SHM / other.name]
        other.unlink()
        with host.load(bundle, own("full")).file:
            host.forget_name(own("full"))

    in_small_shm(64 * MIB, body)


def test_a_shared_memory_that_fills_up_meanwhile_is_told(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody takes what was free when the copy began: ENOSPC in the middle of it, and half a region is not left."""
    began = host._new_file

    def body(shm: Path) -> None:
        def fill_first(path: Path) -> object:
            file = began(path)
            fill(shm, leave=0)
            return file

        monkeypatch.setattr(host, "_new_file", fill_first)
        with pytest.raises(HostFull, match="no room"):
            host.load(bundle, own("meanwhile"))
        assert [path.name for path in host.SHM.iterdir()] == ["other-program"]

    in_small_shm(64 * MIB, body)


@pytest.mark.parametrize("room", ["enough", "too little"])
def test_a_broken_bundle_is_not_left_in_shared_memory(tmp_path: Path, bundle: Bundle, room: str) -> None:
    """It is copied while it is checked: a wrong byte is told, as the better reason of two, and the copy is gone."""
    file = bundle.path / "model.lora_weights.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    disk = DiskTier(CacheGeometry.of(SHAPE))

    def body(shm: Path) -> None:
        before = {fill(shm, leave=0).name} if room == "too little" else set()
        with pytest.raises(BundleBroken, match="sha256"):
            load_checked(disk, open_bundle(bundle.path), own("broken"))
        assert {path.name for path in host.SHM.iterdir()} == before

    in_small_shm(64 * MIB, body)


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_fills_is_not(bundle: Bundle) -> None:
    """Two processes fill regions; one is killed. Its file goes at the next start, the other's stays until it ends."""
    names = [own("killed"), own("living")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FILLS, str(bundle.path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name in names
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"filled\n"
        assert not set(names) & set(host.sweep())
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        assert (host.SHM / names[0]).exists(), "SIGKILL leaves it"
        assert names[0] in host.sweep()
        assert [(host.SHM / name).exists() for name in names] == [False, True]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
            host.sweep()
    assert not (host.SHM / names[1]).exists()


def test_a_sweep_between_a_files_birth_and_its_lock_does_no_harm(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another manager starts in that very moment and takes the new file for a dead one's: it is made anew."""
    lock, swept = fcntl.flock, list[str]()

    def swept_first(file: IO[bytes], how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.extend(name for name in host.sweep() if name == own("born"))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    with host.load(bundle, own("born")).file:
        assert swept == [own("born")]
        there_again = (host.SHM / own("born")).exists()
        host.forget_name(own("born"))
    assert there_again
