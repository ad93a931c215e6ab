"""REMOTE against a real object store (SeaweedFS) and a proxy that breaks its answers; and a plain directory."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import seaweed
from fakes.bundles import small_bundle
from fakes.faulty_proxy import Fault, FaultyProxy, between
from fakes.seaweed import Seaweed

from adapter_slots.errors import MoveCancelled, StoreCorrupt, StoreDenied, StoreMissing, StoreUnavailable, TierError
from adapter_slots.store import Source, Stores, StoreSettings, Transfer, source_digest
from trtllm_lora import Bundle, open_bundle
from trtllm_lora.bundle import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE

Upload = Callable[[Path, str], str]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle whose weights are many of the small parts."""
    return small_bundle(tmp_path / "bundles", "pirate", rank=256)


@pytest.fixture
def into(tmp_path: Path) -> Path:
    """An empty directory to fetch to."""
    path = tmp_path / "into"
    path.mkdir()
    return path


def fetch(url: str, into: Path, settings: StoreSettings | None = None, transfer: Transfer | None = None) -> str:
    """Look and fetch, as DISK does."""
    stores, transfer = Stores(settings), transfer or Transfer()
    try:
        source = stores.source(url)
        return source.fetch(source.look(transfer), into, transfer)
    finally:
        stores.close()


def assert_same(bundle: Bundle, into: Path) -> None:
    """The copy is a whole bundle with the same bytes."""
    copy = open_bundle(into)
    copy.verify()
    assert (bundle.digest, bundle.task_id) == (copy.digest, copy.task_id)
    assert sorted(file.name for file in into.iterdir()) == sorted([CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE])


# --- without faults


def test_a_bundle_comes_from_s3_in_ranges(
    aws: None, quick: StoreSettings, proxy: FaultyProxy, bundle: Bundle, upload: Upload, into: Path
) -> None:
    """Every part is asked for once, small ones too, and the copy is byte for byte the bundle."""
    url = upload(bundle.path, "adapters/pirate/1")
    seen: list[tuple[int, int]] = []
    transfer = Transfer(progress=lambda done, total: seen.append((done, total)))
    assert fetch(url, into, quick, transfer) == bundle.digest
    assert_same(bundle, into)
    ranges = [line for line in proxy.requests if "ange: bytes=" in line]
    parts = -(-bundle.manifest["files"][WEIGHTS_FILE]["bytes"] // quick.part_bytes)
    assert parts + 1 == len(ranges) == len(set(ranges))
    assert seen == sorted(seen)
    assert (bundle.num_bytes, bundle.num_bytes) == seen[-1]


def test_endpoint_and_credentials_come_from_the_usual_environment(
    aws: None,
    monkeypatch: pytest.MonkeyPatch,
    store_server: Seaweed,
    bundle: Bundle,
    upload: Upload,
    into: Path,
) -> None:
    """AWS_ENDPOINT_URL_S3 and AWS_ACCESS_KEY_ID are enough: no setting of ours is needed."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store_server.url)
    assert fetch(upload(bundle.path, bundle.digest), into) == bundle.digest


def test_a_bundle_comes_from_a_directory(bundle: Bundle, into: Path) -> None:
    """A path and a file:// URL name the same adapter."""
    assert fetch(str(bundle.path), into) == bundle.digest
    assert_same(bundle, into)
    assert fetch(f"file://{bundle.path}", into) == bundle.digest


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_raw_adapter_is_known_by_its_source_digest(
    aws: None, quick: StoreSettings, upload: Upload, tmp_path: Path, into: Path, weights: str
) -> None:
    """Config and weights come, nothing else does, and their hashes make the digest; an empty file is no trouble."""
    raw = tmp_path / "raw"
    raw.mkdir()
    contents = {"adapter_config.json": b"{}", weights: b"w" * 70_000, "README.md": b"", "optimizer.pt": b"x" * 100}
    for name, data in contents.items():
        (raw / name).write_bytes(data)
    wanted = source_digest(
        {name: hashlib.sha256(contents[name]).hexdigest() for name in ("adapter_config.json", weights)}
    )
    assert fetch(upload(raw, "raw/pirate"), into, quick) == wanted
    assert sorted(file.name for file in into.iterdir()) == sorted(["adapter_config.json", weights])
    assert fetch(str(raw), into) == wanted


# --- what is not there, or not ours to see


def test_what_is_not_there_is_missing(aws: None, quick: StoreSettings, bucket: str, tmp_path: Path) -> None:
    """Neither an adapter that does not exist nor a bucket that does not is worth another try."""
    for url in (f"s3://{bucket}/nobody", "s3://no-such-bucket-here/pirate", str(tmp_path / "nobody")):
        with pytest.raises(StoreMissing) as caught:
            fetch(url, tmp_path, quick)
        assert not caught.value.transient


def test_wrong_credentials_are_denied_and_never_shown(
    aws: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quick: StoreSettings,
    bundle: Bundle,
    upload: Upload,
    into: Path,
) -> None:
    """A refusal is permanent; neither its text nor any log, urllib3's at DEBUG included, has the secret."""
    url = upload(bundle.path, "x")
    caplog.set_level(logging.DEBUG)
    logging.getLogger("botocore").setLevel(logging.INFO)  # what botocore tells at DEBUG is the user's own choice
    with pytest.raises(StoreDenied) as caught:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
        fetch(url, into, quick)
    assert "403" in str(caught.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.SECRET)
    assert fetch(url, into, quick) == bundle.digest
    told = f"{caught.value} {caught.value.__cause__} {caplog.text}"
    for secret in ("another-secret", seaweed.SECRET, "Signature=", seaweed.KEY):
        assert secret not in told


def test_no_credentials_at_all_are_denied(
    aws: None, monkeypatch: pytest.MonkeyPatch, quick: StoreSettings, bucket: str, into: Path
) -> None:
    """Nothing configured is said so, at once."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreDenied, match="no usable credentials"):
        fetch(f"s3://{bucket}/x", into, quick)


@pytest.mark.parametrize(
    "url", ["s3:///key", "s3://key:secret@bucket/x", "gs://bucket/x", "s3://bucket/a/../b", "dir/.."]
)
def test_urls_that_name_no_store_or_leave_it_are_refused(url: str) -> None:
    """Before any connection is made."""
    with pytest.raises(ValueError):
        Stores().source(url)


def test_a_link_out_of_the_directory_is_refused(bundle: Bundle, tmp_path: Path, into: Path) -> None:
    """A registry's directory cannot reach other files of this machine."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "pirate").symlink_to(bundle.path)
    with pytest.raises(StoreDenied, match="leads out"):
        fetch(str(tmp_path / "shop" / "pirate"), into)


# --- faults on the way


def test_a_refused_connection_is_unavailable(aws: None, quick: StoreSettings, into: Path) -> None:
    """After its tries, with nothing of the network library's own words."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        settings = replace(quick, endpoint_url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(StoreUnavailable) as caught:
            fetch("s3://bucket/x", into, settings)
    assert caught.value.transient


@pytest.mark.parametrize("kind", ["busy", "reset", "cut", "flip"])
@pytest.mark.parametrize("target", [MANIFEST_FILE, WEIGHTS_FILE])
def test_a_fault_that_passes_is_not_seen(
    aws: None,
    quick: StoreSettings,
    proxy: FaultyProxy,
    bundle: Bundle,
    upload: Upload,
    into: Path,
    kind: str,
    target: str,
) -> None:
    """One 503, reset, broken-off answer or flipped byte costs another try, and the bytes are right."""
    url = upload(bundle.path, "x")
    proxy.faults.append(Fault(kind, target, at=100, times=1))
    assert fetch(url, into, quick) == bundle.digest
    assert_same(bundle, into)


@pytest.mark.parametrize("kind", ["busy", "reset", "cut"])
def test_a_fault_that_stays_is_unavailable(
    aws: None, quick: StoreSettings, proxy: FaultyProxy, bundle: Bundle, upload: Upload, into: Path, kind: str
) -> None:
    """The tries are counted: 503, resets and broken-off answers end in a transient error."""
    url = upload(bundle.path, "x")
    proxy.faults.append(Fault(kind, MANIFEST_FILE, at=10))
    with pytest.raises(StoreUnavailable) as caught:
        fetch(url, into, quick)
    assert caught.value.transient
    assert quick.attempts == len(proxy.requests)


@pytest.mark.parametrize(("kind", "at"), [("drip", 0), ("drip_body", 0), ("drip_body", 10_000)])
def test_one_byte_a_second_fails_within_a_bound(
    aws: None, quick: StoreSettings, proxy: FaultyProxy, bundle: Bundle, upload: Upload, into: Path, kind: str, at: int
) -> None:
    """Though every recv is in time, headers included: each try ends after two windows at most."""
    url = upload(bundle.path, "x")
    proxy.faults.append(Fault(kind, WEIGHTS_FILE, at))
    begin = time.monotonic()
    with pytest.raises(StoreUnavailable, match="less than 16384 bytes/s"):
        fetch(url, into, quick)
    assert time.monotonic() - begin < 60, "by bytes it would be hours"


def test_one_slow_connection_is_replaced(
    aws: None, quick: StoreSettings, proxy: FaultyProxy, bundle: Bundle, upload: Upload, into: Path
) -> None:
    """A part that hangs on one connection comes over another."""
    url = upload(bundle.path, "x")
    proxy.faults.append(Fault("drip", WEIGHTS_FILE, times=1))
    assert fetch(url, into, quick) == bundle.digest


def test_whole_parts_are_not_asked_for_again(
    aws: None, quick: StoreSettings, proxy: FaultyProxy, bundle: Bundle, upload: Upload, into: Path
) -> None:
    """After an error the next try asks for what is missing, and only for that."""
    url = upload(bundle.path, "x")
    settings = replace(quick, parallel=1)
    bad = f"ange: bytes={5 * quick.part_bytes}-"
    proxy.faults.append(Fault("busy", bad, times=quick.attempts))
    with pytest.raises(StoreUnavailable):
        fetch(url, into, settings)
    before = {f"ange: bytes={i * quick.part_bytes}-{(i + 1) * quick.part_bytes - 1}" for i in range(5)}
    proxy.requests.clear()
    assert fetch(url, into, settings) == bundle.digest
    assert not [line for line in proxy.requests if WEIGHTS_FILE in line and line[line.index("ange:") :] in before]
    assert any(bad in line for line in proxy.requests)
    assert_same(bundle, into)


def test_parts_that_were_damaged_on_disk_are_fetched_again(
    aws: None, quick: StoreSettings, proxy: FaultyProxy, bundle: Bundle, upload: Upload, into: Path
) -> None:
    """A note that lies (power lost before the data was written) costs a transfer, not the adapter."""
    url = upload(bundle.path, "x")
    proxy.faults.append(Fault("busy", f"ange: bytes={5 * quick.part_bytes}-", times=quick.attempts))
    with pytest.raises(StoreUnavailable):
        fetch(url, into, replace(quick, parallel=1))
    with (into / WEIGHTS_FILE).open("r+b") as file:
        file.write(bytes(1000))
    assert fetch(url, into, quick) == bundle.digest
    assert_same(bundle, into)


# --- over TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("making a certificate needs openssl")
    file = tmp_path / "certificate.pem"
    what = ["-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1", "-nodes"]
    public = tmp_path / "public.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *what, "-keyout", str(file), "-out", str(public)]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + public.read_text())
    return file


def test_https_is_checked_and_watched(
    aws: None,
    monkeypatch: pytest.MonkeyPatch,
    store_server: Seaweed,
    quick: StoreSettings,
    bundle: Bundle,
    upload: Upload,
    into: Path,
    certificate: Path,
) -> None:
    """An unknown certificate is refused, AWS_CA_BUNDLE makes it known, and a slow or cancelled exchange is cut too."""
    url = upload(bundle.path, "x")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with between(store_server.host, store_server.port, context) as proxy:
        settings = replace(quick, endpoint_url=proxy.url, attempts=2)
        with pytest.raises(StoreUnavailable, match="SSLError"):
            fetch(url, into, replace(settings, slow_window_s=60.0))
        assert not proxy.requests
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        proxy.faults.append(Fault("drip", WEIGHTS_FILE, times=1))
        assert fetch(url, into, settings) == bundle.digest
        proxy.faults.append(Fault("drip", WEIGHTS_FILE))
        transfer = Transfer()
        threading.Timer(0.3, transfer.cancelled.set).start()
        with pytest.raises(MoveCancelled):
            fetch(url, into, replace(settings, slow_window_s=60.0, read_timeout_s=60.0), transfer)
        proxy.faults.clear()
        assert fetch(url, into, settings) == bundle.digest
    assert_same(bundle, into)


# --- what the store has is wrong


def damage(directory: Path, change: Callable[[bytearray], Any]) -> None:
    """Change the weights file."""
    data = bytearray((directory / WEIGHTS_FILE).read_bytes())
    change(data)
    (directory / WEIGHTS_FILE).write_bytes(data)


CHANGES: dict[str, Callable[[bytearray], Any]] = {
    "flipped": lambda data: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 1),
    "truncated": lambda data: data.__delitem__(slice(len(data) - 1, None)),
    "longer": lambda data: data.append(0),
    "emptied": lambda data: data.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["s3", "directory"])
def test_wrong_bytes_in_the_store_are_corrupt(
    aws: None, quick: StoreSettings, bundle: Bundle, upload: Upload, into: Path, change: str, where: str
) -> None:
    """One flipped bit, one byte less or more: permanent, and nothing that opens as a bundle is left."""
    damage(bundle.path, CHANGES[change])
    url = upload(bundle.path, "x") if where == "s3" else str(bundle.path)
    with pytest.raises(StoreCorrupt) as caught:
        fetch(url, into, quick)
    assert not caught.value.transient
    assert not (into / MANIFEST_FILE).exists()


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another task": lambda manifest: {**manifest, "task_id": manifest["task_id"] + 1},
    "another dtype": lambda manifest: {**manifest, "dtype": "float16"},
    "another format": lambda manifest: {**manifest, "format_version": 2},
    "no files": lambda manifest: {**manifest, "files": {}},
    "files are a list": lambda manifest: {**manifest, "files": []},
    "bytes is text": lambda manifest: {**manifest, "files": {WEIGHTS_FILE: {"bytes": "9", "sha256": ""}}},
    "a list": lambda _: [],
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_changed_manifest_is_corrupt(bundle: Bundle, into: Path, change: str) -> None:
    """Whatever was changed, no weights are read for it."""
    manifest = json.loads((bundle.path / MANIFEST_FILE).read_text())
    (bundle.path / MANIFEST_FILE).write_text(json.dumps(MANIFESTS[change](manifest)))
    (bundle.path / WEIGHTS_FILE).unlink()
    with pytest.raises(StoreCorrupt):
        fetch(str(bundle.path), into)


def test_a_huge_manifest_is_not_read(
    aws: None, quick: StoreSettings, bundle: Bundle, upload: Upload, into: Path
) -> None:
    """The bound on its size holds before it is downloaded."""
    (bundle.path / MANIFEST_FILE).write_bytes(b"[" * (17 * 2**20))
    for url in (upload(bundle.path, "x"), str(bundle.path)):
        with pytest.raises(StoreCorrupt, match="16777216"):
            fetch(url, into, quick)


# --- cancelled


@pytest.mark.parametrize("kind", ["drip", "drip_body", "busy"])
def test_a_cancel_is_honoured_at_once(
    aws: None, quick: StoreSettings, proxy: FaultyProxy, bundle: Bundle, upload: Upload, into: Path, kind: str
) -> None:
    """While headers or bytes trickle, and during a back-off; no thread of the transfer is left."""
    url = upload(bundle.path, "x")
    proxy.faults.append(Fault(kind, WEIGHTS_FILE))
    patient = replace(quick, slow_window_s=60.0, read_timeout_s=60.0, backoff_s=60.0, backoff_max_s=60.0)
    transfer = Transfer()
    begun: list[float] = []

    def cancel_when_it_hangs() -> None:
        while not any(WEIGHTS_FILE in line for line in proxy.requests):
            time.sleep(0.01)
        begun.append(time.monotonic())
        transfer.cancelled.set()

    thread = threading.Thread(target=cancel_when_it_hangs)
    thread.start()
    with pytest.raises(MoveCancelled):
        fetch(url, into, patient, transfer)
    thread.join()
    assert time.monotonic() - begun[0] < 0.5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("store")]


def test_a_cancelled_move_does_not_begin(aws: None, quick: StoreSettings, proxy: FaultyProxy, into: Path) -> None:
    """Nothing is asked of the store."""
    transfer = Transfer()
    transfer.cancelled.set()
    for url in ("s3://bucket/x", str(into)):
        with pytest.raises(MoveCancelled):
            fetch(url, into, quick, transfer)
    assert not proxy.requests


def test_many_adapters_come_at_a_time(aws: None, quick: StoreSettings, upload: Upload, tmp_path: Path, s3: Any) -> None:
    """Eight fetches over one client do not disturb each other."""
    bundles = [small_bundle(tmp_path / "bundles", f"a{seed}", seed, rank=64) for seed in range(8)]
    urls = [upload(bundle.path, bundle.digest) for bundle in bundles]
    stores = Stores(quick)
    found: dict[int, str | TierError] = {}

    def get(i: int) -> None:
        source: Source = stores.source(urls[i])
        into = tmp_path / str(i)
        into.mkdir()
        try:
            found[i] = source.fetch(source.look(Transfer()), into, Transfer())
        except TierError as error:
            found[i] = error

    threads = [threading.Thread(target=get, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores.close()
    assert {i: bundle.digest for i, bundle in enumerate(bundles)} == found
