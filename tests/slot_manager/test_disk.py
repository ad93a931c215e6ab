"""DISK: a bounded directory that survives crashes, full and read-only file systems, and other people's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.bundles import SHAPE, small_bundle
from fakes.faulty_proxy import Fault, FaultyProxy
from fakes.peft_files import LLAMA, llama_tensors, write_adapter, write_base

from adapter_slots.disk import DiskTier
from adapter_slots.disk_space import QUARANTINED_AT_MOST
from adapter_slots.errors import (
    AdapterRejected,
    BundleBroken,
    ConversionFailed,
    DiskFailed,
    DiskFull,
    DiskReadOnly,
    MoveCancelled,
    StoreCorrupt,
    StoreUnavailable,
)
from adapter_slots.registry import FILE_NAME, Registry, publish
from adapter_slots.store import Source, Stores, StoreSettings, Transfer
from peft_to_trtllm import convert
from trtllm_lora import Bundle, CacheGeometry, EngineShape
from trtllm_lora.bundle import MANIFEST_FILE, WEIGHTS_FILE

GEOMETRY = CacheGeometry.of(SHAPE)
LARGE = CacheGeometry.of(replace(SHAPE, max_lora_rank=256), max_rank=256)


@pytest.fixture
def shop(tmp_path: Path) -> list[Bundle]:
    """Four bundles of the same size, in a store that is a directory."""
    return [small_bundle(tmp_path / "shop", f"adapter-{seed}", seed) for seed in range(4)]


def source(bundle: Bundle) -> Source:
    """The bundle as a source of a store."""
    return Stores().source(str(bundle.path))


def size(bundle: Bundle) -> int:
    """All bytes of a bundle's directory."""
    return sum(file.stat().st_size for file in bundle.path.iterdir())


@contextmanager
def tier(root: Path, max_bytes: int = 2**30, **options: object) -> Iterator[DiskTier]:
    """A tier that gives its directory back."""
    disk = DiskTier(LARGE, root, max_bytes=max_bytes, **options)  # type: ignore[arg-type]
    try:
        yield disk
    finally:
        disk.close()


def ours(root: Path) -> list[str]:
    """What lies in the directory, its lock aside."""
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


# --- coming in


def test_an_adapter_comes_in_once_and_is_there_after_a_restart(tmp_path: Path, shop: list[Bundle]) -> None:
    """Whole, under its digest, with nothing beside it."""
    with tier(tmp_path / "disk") as disk:
        bundle = disk.add(shop[0].digest, source(shop[0]))
        assert tmp_path / "disk" / shop[0].digest == bundle.path
        bundle.verify()
        assert size(shop[0]) == disk.used_bytes
        assert [shop[0].digest] == ours(tmp_path / "disk")
        shutil.rmtree(shop[0].path)
        assert bundle == disk.add(shop[0].digest, source(shop[0]))
    with tier(tmp_path / "disk") as disk:
        assert disk.has(shop[0].digest)
        assert disk.found.as_expected


def test_many_that_want_the_same_adapter_cost_one_download(
    aws: None,
    quick: StoreSettings,
    proxy: FaultyProxy,
    upload: Callable[[Path, str], str],
    tmp_path: Path,
    shop: list[Bundle],
) -> None:
    """Sixteen threads, one manifest read, one bundle for all."""
    wanted = Stores(quick).source(upload(shop[0].path, "x"))
    found: list[Path] = []
    with tier(tmp_path / "disk") as disk:
        threads = [
            threading.Thread(target=lambda: found.append(disk.add(shop[0].digest, wanted).path)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [tmp_path / "disk" / shop[0].digest] * 16 == found
    assert len([line for line in proxy.requests if MANIFEST_FILE in line]) == 1
    wanted.store.close()


def test_what_arrived_before_an_error_is_used_by_the_next_try(
    aws: None,
    quick: StoreSettings,
    proxy: FaultyProxy,
    upload: Callable[[Path, str], str],
    tmp_path: Path,
) -> None:
    """A store that fails half way through costs the missing half; the half counts as used meanwhile."""
    bundle = small_bundle(tmp_path / "shop", "large", rank=256)
    wanted = Stores(replace(quick, parallel=1)).source(upload(bundle.path, "x"))
    disk = DiskTier(LARGE, tmp_path / "disk")
    proxy.faults.append(Fault("busy", f"ange: bytes={10 * quick.part_bytes}-", times=quick.attempts))
    with pytest.raises(StoreUnavailable):
        disk.add(bundle.digest, wanted)
    assert disk.used_bytes > 0
    assert not disk.has(bundle.digest)
    asked = len(proxy.requests)
    disk.add(bundle.digest, wanted).verify()
    assert len(proxy.requests) - asked < 10
    assert [bundle.digest] == ours(tmp_path / "disk")
    disk.close()
    wanted.store.close()


def test_what_does_not_fit_the_engine_takes_no_room(tmp_path: Path) -> None:
    """A rank beyond the engine's is refused with the reason, and nothing stays."""
    bundle = small_bundle(tmp_path / "shop", "large", rank=16)
    disk = DiskTier(GEOMETRY, tmp_path / "disk")
    with pytest.raises(AdapterRejected, match="max_lora_rank is 8"):
        disk.add(bundle.digest, source(bundle))
    assert (disk.used_bytes, ours(tmp_path / "disk")) == (0, [])
    disk.close()


def test_another_adapter_under_a_digest_is_refused(tmp_path: Path, shop: list[Bundle]) -> None:
    """The registry's digest decides, not the store's."""
    with tier(tmp_path / "disk") as disk:
        with pytest.raises(StoreCorrupt, match=shop[1].digest[:12]):
            disk.add(shop[0].digest, source(shop[1]))
        assert (disk.used_bytes, ours(tmp_path / "disk")) == (0, [])


def test_a_cancelled_transfer_stays_until_the_next_start(tmp_path: Path, shop: list[Bundle]) -> None:
    """It can go on; it is the first to make room, and a restart removes it."""
    transfer = Transfer()
    transfer = replace(transfer, progress=lambda *_: transfer.cancelled.set())
    with tier(tmp_path / "disk") as disk:
        with pytest.raises(MoveCancelled):
            disk.add(shop[0].digest, source(shop[0]), transfer)
        assert [f".fetching-{shop[0].digest}"] == ours(tmp_path / "disk")
    with tier(tmp_path / "disk") as disk:
        assert [f".fetching-{shop[0].digest}"] == disk.found.removed
        assert (disk.used_bytes, ours(tmp_path / "disk")) == (0, [])


def test_a_bundle_beside_the_registry_is_used_in_place(tmp_path: Path, shop: list[Bundle]) -> None:
    """With or without a directory of its own, DISK copies nothing that is on this machine already."""
    publish(tmp_path / FILE_NAME, shop[0])
    entry = Registry(tmp_path / FILE_NAME).resolve("adapter-0")
    with tier(tmp_path / "disk") as disk:
        assert shop[0].path == disk.open(entry).path
        disk.verify(disk.open(entry))
        assert disk.used_bytes == 0
    assert shop[0].digest == DiskTier(GEOMETRY).open(entry).digest
    with pytest.raises(DiskFailed, match="no directory"):
        DiskTier(GEOMETRY).add(shop[0].digest, source(shop[0]))


# --- bounded


def test_the_least_recently_used_makes_room(tmp_path: Path, shop: list[Bundle]) -> None:
    """Never more bytes than the bound, never one in use."""
    with tier(tmp_path / "disk", 2 * size(shop[0]) + 100) as disk:
        for bundle in shop[:2]:
            disk.add(bundle.digest, source(bundle))
        with disk.in_use(shop[0].digest):
            pass
        disk.add(shop[2].digest, source(shop[2]))
        assert sorted([shop[0].digest, shop[2].digest]) == ours(tmp_path / "disk")
        with disk.in_use(shop[0].digest), disk.in_use(shop[2].digest):
            with pytest.raises(DiskFull, match="no room for"):
                disk.add(shop[3].digest, source(shop[3]))
            assert not disk.remove(shop[0].digest)
        assert disk.used_bytes <= 2 * size(shop[0]) + 100
        assert disk.remove(shop[0].digest)
        disk.add(shop[3].digest, source(shop[3]))
        assert sorted([shop[2].digest, shop[3].digest]) == ours(tmp_path / "disk")


def test_what_can_never_fit_evicts_nobody(tmp_path: Path, shop: list[Bundle]) -> None:
    """A bundle larger than the bound leaves the others alone."""
    large = small_bundle(tmp_path / "shop", "large", rank=8)
    with tier(tmp_path / "disk", size(shop[0]) + 100) as disk:
        disk.add(shop[0].digest, source(shop[0]))
        with pytest.raises(DiskFull):
            disk.add(large.digest, source(large))
        assert disk.has(shop[0].digest)


def test_the_order_of_use_survives_a_restart(tmp_path: Path, shop: list[Bundle]) -> None:
    """Also when the bound has become smaller meanwhile."""
    with tier(tmp_path / "disk") as disk:
        for bundle in shop:
            disk.add(bundle.digest, source(bundle))
        for age, bundle in enumerate([shop[2], shop[0], shop[3], shop[1]]):
            os.utime(tmp_path / "disk" / bundle.digest, (1e9 - age * 1000,) * 2)
        with disk.in_use(shop[3].digest):
            pass
    with tier(tmp_path / "disk", 2 * size(shop[0]) + 100) as disk:
        assert [disk.has(shop[2].digest), disk.has(shop[3].digest)] == [True, True]
        disk.add(shop[0].digest, source(shop[0]))
        assert disk.has(shop[3].digest)


# --- what was there before


def test_leftovers_go_torn_bundles_are_shelved_and_foreign_files_stay(tmp_path: Path, shop: list[Bundle]) -> None:
    """A start with everything wrong at once serves what is whole."""
    root = tmp_path / "disk"
    with tier(root) as disk:
        for bundle in shop[:3]:
            disk.add(bundle.digest, source(bundle))
    os.truncate(root / shop[0].digest / WEIGHTS_FILE, 100)
    (root / shop[1].digest / MANIFEST_FILE).unlink()
    (root / ("0" * 64)).symlink_to(tmp_path)
    for name in (".fetching-x", ".leaving-y", "lost+found"):
        (root / name).mkdir()
    (root / "notes.txt").write_text("mine")
    with tier(root) as disk:
        assert {".fetching-x", ".leaving-y"} == set(disk.found.removed)
        assert {"0" * 64, "lost+found", "notes.txt"} == set(disk.found.foreign)
        assert {shop[0].digest, shop[1].digest} == {path.name for path in disk.found.torn}
        assert [disk.has(bundle.digest) for bundle in shop[:3]] == [False, False, True]
        disk.add(shop[0].digest, source(shop[0])).verify()
    assert (root / "notes.txt").read_text() == "mine"
    reasons = {path.parent.name: path.read_text() for path in root.glob(".quarantine/*/reason.txt")}
    assert "100 bytes" in reasons[f"{shop[0].digest}-1"]
    assert "no bundle here" in reasons[f"{shop[1].digest}-1"]


def test_a_flipped_byte_on_disk_is_found_once_and_quarantined(tmp_path: Path, shop: list[Bundle]) -> None:
    """After a restart every byte is checked before first use; the next add brings the adapter anew."""
    root = tmp_path / "disk"
    with tier(root) as disk:
        disk.add(shop[0].digest, source(shop[0]))
    with (root / shop[0].digest / WEIGHTS_FILE).open("r+b") as file:
        file.seek(200)
        file.write(b"\xff")
    with tier(root) as disk:
        publish(tmp_path / FILE_NAME, shop[0])
        bundle = disk.open(Registry(tmp_path / FILE_NAME).resolve("adapter-0"))
        with pytest.raises(BundleBroken, match="differ from the manifest"):
            disk.verify(bundle)
        assert not disk.has(shop[0].digest)
        disk.verify(disk.add(shop[0].digest, source(shop[0])))


def test_the_quarantine_is_bounded(tmp_path: Path, shop: list[Bundle]) -> None:
    """The newest few are kept to be looked at, and count as used."""
    root = tmp_path / "disk"
    for _ in range(QUARANTINED_AT_MOST + 2):
        with tier(root) as disk:
            disk.add(shop[0].digest, source(shop[0]))
        os.truncate(root / shop[0].digest / WEIGHTS_FILE, 100)
    with tier(root) as disk:
        assert len(list((root / ".quarantine").iterdir())) == QUARANTINED_AT_MOST
        assert disk.used_bytes > 0


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second manager on the same directory is refused, until the first lets go."""
    with tier(tmp_path / "disk"), pytest.raises(DiskFailed, match="another slot manager"):
        DiskTier(GEOMETRY, tmp_path / "disk")
    with tier(tmp_path / "disk"):
        pass


CHILD = """
import sys
from pathlib import Path
from fakes.bundles import SHAPE
from adapter_slots.disk import DiskTier
from adapter_slots.store import Stores
from trtllm_lora import CacheGeometry
shop, root = map(Path, sys.argv[1:])
disk = DiskTier(CacheGeometry.of(SHAPE), root, max_bytes=40_000)
print("ready", flush=True)
while True:
    for path in sorted(shop.iterdir()):
        disk.add(path.name, Stores().source(str(path)))
"""


@pytest.mark.parametrize("adds_s", [0.0, 0.01, 0.05, 0.2])
def test_a_killed_process_leaves_whole_bundles_or_none(tmp_path: Path, shop: list[Bundle], adds_s: float) -> None:
    """SIGKILL while bundles come and go: whatever has a bundle's name afterwards is one, byte for byte."""
    root = tmp_path / "disk"
    search = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", CHILD, str(shop[0].path.parent), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        threading.Event().wait(adds_s)
        child.kill()
    with tier(root, 40_000) as disk:
        assert not disk.found.torn
        assert not disk.found.foreign
        for bundle in shop:
            if disk.has(bundle.digest):
                disk.add(bundle.digest, source(bundle)).verify()
        assert disk.used_bytes <= 40_000


# --- file systems that refuse


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    root = tmp_path / "mounted"
    root.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", root], capture_output=True, check=False)  # noqa: S607
    if made.returncode:
        pytest.skip(f"mount is not permitted here: {made.stderr.decode().strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", root], check=True)  # noqa: S607


def test_a_disk_that_is_too_full_is_seen_before_anything_is_written(small_disk: Path, shop: list[Bundle]) -> None:
    """What others use of the file system counts; with room again, the adapter comes."""
    (small_disk / "other.bin").write_bytes(bytes(250 * 1024))
    with tier(small_disk) as disk:
        with pytest.raises(DiskFull, match="free on the file system"):
            disk.add(shop[0].digest, source(shop[0]))
        assert disk.used_bytes == 0
        (small_disk / "other.bin").unlink()
        disk.add(shop[0].digest, source(shop[0])).verify()


def test_bundles_make_room_when_others_fill_the_file_system(small_disk: Path, tmp_path: Path) -> None:
    """The bound may be larger than the disk: idle bundles go before an adapter is refused."""
    shop = [small_bundle(tmp_path / "shop", f"large-{seed}", seed, rank=64) for seed in range(3)]
    with tier(small_disk) as disk:
        for bundle in shop[:2]:
            disk.add(bundle.digest, source(bundle))
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "other.bin").write_bytes(bytes(free - 8192))
        disk.add(shop[2].digest, source(shop[2])).verify()
        assert not disk.has(shop[0].digest)


def test_a_disk_that_fills_up_meanwhile_is_full_and_recovers(small_disk: Path, shop: list[Bundle]) -> None:
    """ENOSPC in the middle of a copy is DiskFull, its bytes are given back, and the others are unharmed."""

    def fill(_done: int, _total: int) -> None:
        if not (small_disk / "other.bin").exists():
            with pytest.raises(OSError, match="No space"), (small_disk / "other.bin").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    with tier(small_disk) as disk:
        disk.add(shop[0].digest, source(shop[0]))
        with pytest.raises(DiskFull) as caught:
            disk.add(shop[1].digest, source(shop[1]), Transfer(progress=fill))
        assert caught.value.transient
        assert size(shop[0]) == disk.used_bytes
        (small_disk / "other.bin").unlink()
        disk.add(shop[1].digest, source(shop[1])).verify()
        disk.add(shop[0].digest, source(shop[0])).verify()


def test_a_read_only_disk_serves_what_it_has(small_disk: Path, shop: list[Bundle]) -> None:
    """What is there is found, checked and used; what is not is refused for good, with the reason."""
    root = small_disk / "disk"
    with tier(root) as disk:
        disk.add(shop[0].digest, source(shop[0]))
    (root / f".fetching-{shop[1].digest}").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)  # noqa: S607
    with tier(root) as disk:
        disk.verify(disk.add(shop[0].digest, source(shop[0])))
        with disk.in_use(shop[0].digest):
            pass
        with pytest.raises(DiskReadOnly, match="Read-only") as caught:
            disk.add(shop[1].digest, source(shop[1]))
        assert not caught.value.transient
        assert disk.has(shop[0].digest)
    with pytest.raises(DiskReadOnly):
        DiskTier(GEOMETRY, small_disk / "another")


# --- raw adapters


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    """A raw PEFT adapter for a small Llama."""
    return write_adapter(tmp_path / "raw" / "pirate", llama_tensors())


@pytest.fixture
def llama(tmp_path: Path) -> CacheGeometry:
    """The engine that Llama would have."""
    write_base(tmp_path / "base")
    return CacheGeometry.of(EngineShape.from_hf_config(LLAMA, dtype="float32"))


def test_a_raw_adapter_is_converted_on_its_way_in(tmp_path: Path, peft: Path, llama: CacheGeometry) -> None:
    """Once, under its own name; known by its source digest or by its bundle's, after a restart too."""
    conversions: list[str] = []

    def converter(adapter: Path, out: Path) -> Bundle:
        conversions.append(adapter.name)
        return convert(adapter, out=out, base=tmp_path / "base", dtype="float32")

    expected = convert(peft, out=tmp_path / "expected", base=tmp_path / "base", dtype="float32")
    raw = Stores().source(str(peft))
    content = raw.look(Transfer())
    (tmp_path / "look").mkdir()
    key = raw.fetch(content, tmp_path / "look", Transfer())
    for _ in range(2):
        disk = DiskTier(llama, tmp_path / "disk", converter=converter)
        bundle = disk.add(key, raw)
        assert ("pirate", expected.digest, expected.task_id) == (bundle.adapter, bundle.digest, bundle.task_id)
        assert disk.has(key)
        assert disk.has(expected.digest)
        disk.close()
    assert conversions == ["pirate"]
    assert {".sources", expected.digest} == set(ours(tmp_path / "disk"))
    disk = DiskTier(llama, tmp_path / "disk", max_bytes=2 * content.num_bytes)
    with pytest.raises(ConversionFailed, match="no converter"):
        disk.add("0" * 64, raw)
    assert [disk.has(key), disk.has(expected.digest)] == [False, False], "they made room for what was fetched"
    disk.close()


def test_a_raw_adapter_that_is_another_than_the_registrys_is_refused(
    tmp_path: Path, peft: Path, llama: CacheGeometry
) -> None:
    """Its bytes have no manifest: the digest in the registry is what they are held to."""

    def converter(adapter: Path, out: Path) -> Bundle:
        return convert(adapter, out=out, base=tmp_path / "base", dtype="float32")

    disk = DiskTier(llama, tmp_path / "disk", converter=converter)
    with pytest.raises(StoreCorrupt, match="the registry says digest"):
        disk.add("0" * 64, Stores().source(str(peft)))
    assert disk.used_bytes == 0
    disk.close()
