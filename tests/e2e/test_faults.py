"""What fails on this machine, behind a real Triton: disk, shared memory, clients. The cause is told, others go on."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.small_shm import fill, in_small_shm
from fakes.stacks import running
from fakes.steady import Steady, ask, explain, is_right, until

from adapter_slots.host import KEPT_FREE
from adapter_slots.registry import publish, publish_at
from adapter_slots.store import source_digest
from lora_slots.client import Client
from lora_slots.embedded import Prepared
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from peft_to_trtllm import convert

pytestmark = pytest.mark.triton
STEADY = "json-1"
KIB, MIB = 2**10, 2**20
QUICK = {"tick_s": "0.1", "wait_s": "3"}


def by_name(golden: list[dict[str, Any]], adapter: str) -> dict[str, Any]:
    """An example adapter's first answer."""
    return next(entry for entry in golden if entry["adapter"] == adapter)


# --- disk


@dataclass
class SmallDisk:
    """A stack whose adapters are converted into a file system of 1 MiB, and two of which fit HOST."""

    server: TritonServer
    root: Path
    torn: str
    """Name of a directory that was a bundle once."""

    def allow_writing(self, allowed: bool) -> None:
        """Let nobody, root included, make or remove anything in the directory; or let them again.

        A mount cannot be made read-only while the lock's file is open for writing.
        """
        flag = "-i" if allowed else "+i"
        made = subprocess.run(["chattr", flag, self.root], capture_output=True, check=False)  # noqa: S607
        if made.returncode:
            pytest.skip(f"this kernel's tmpfs knows no immutable directory: {made.stderr.decode().strip()}")


@pytest.fixture(scope="module")
def small_disk(
    base: Path,
    engine: Path,
    variants: dict[str, dict[str, Any]],
    all_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SmallDisk]:
    """Raw adapters beside the registry; in the disk's directory a torn bundle and a stranger's file."""
    home = tmp_path_factory.mktemp("small-disk")
    root, registry = home / "disk", home / "adapters.yaml"
    root.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root], check=False).returncode:  # noqa: S607
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        for name in variants:
            raw = all_adapters[name]
            if name in (STEADY, "robot-2"):
                bundle = convert(raw, base=base, out=home / "bundles", dtype="float32", name=name)
            if name == STEADY:
                publish(registry, bundle, name)
                continue
            hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in raw.iterdir()}
            publish_at(registry, name, source_digest(hashes), str(raw))
        shutil.copytree(bundle.path, root / bundle.digest)
        os.truncate(root / bundle.digest / "model.lora_weights.npy", 1000)
        (root / "notes.txt").write_text("somebody else's")
        router = {**QUICK, "disk_dir": str(root), "host_bytes": str(34 * KIB)}
        with running(Prepared(base, engine, registry), router=router) as server:
            yield SmallDisk(server, root, bundle.digest)
    finally:
        subprocess.run(["umount", root], check=True)  # noqa: S607


def test_a_torn_bundle_is_shelved_and_a_strangers_file_stays(
    small_disk: SmallDisk, variants: dict[str, dict[str, Any]]
) -> None:
    """Both are told; the torn adapter is made anew and answers right."""
    with Client(small_disk.server.grpc_url) as client:
        disk = client.operate("status")["disk"]
    assert list(disk["torn"]) == [small_disk.torn]
    assert disk["foreign"] == ["notes.txt"]
    assert ask(small_disk.server, variants["robot-2"]) == variants["robot-2"]["text"]
    assert (small_disk.root / "notes.txt").read_text() == "somebody else's"


def test_a_full_disk_is_told_and_heals(small_disk: SmallDisk, variants: dict[str, dict[str, Any]]) -> None:
    """Another program fills the file system: nothing that is there is lost, and with room again the adapter comes."""
    other = fill(small_disk.root, leave=4 * KIB)
    with Steady(small_disk.server, variants[STEADY]):
        with pytest.raises(ServerError, match=r"no room for \d+ bytes"):
            ask(small_disk.server, variants["pirate-1"])
        assert "free on the file system" in explain(small_disk.server, "pirate-1")["failure"]
        other.unlink()
        until(lambda: is_right(small_disk.server, variants["pirate-1"]))
    assert is_right(small_disk.server, variants["robot-2"])


def test_a_disk_that_nobody_may_write_serves_what_it_has(
    small_disk: SmallDisk, variants: dict[str, dict[str, Any]]
) -> None:
    """What is there is brought up; what is not is refused with the reason, until it can be written again."""
    server = small_disk.server
    for name in ("pirate-1", "robot-2"):  # there, and at most one of them in HOST beside the steady one
        until(lambda name=name: is_right(server, variants[name]))  # type: ignore[misc]
    small_disk.allow_writing(False)
    try:
        with Steady(server, variants[STEADY]):
            with pytest.raises(ServerError, match="not permitted"):
                ask(server, variants["pirate-3"])
            assert "not permitted" in explain(server, "pirate-3")["failure"]
            assert [is_right(server, variants[name]) for name in ("pirate-1", "robot-2")] == [True, True]
    finally:
        small_disk.allow_writing(True)
    until(lambda: is_right(server, variants["pirate-3"]))


# --- shared memory


def test_a_full_shared_memory_is_told_and_heals(prepared: Prepared, golden: list[dict[str, Any]]) -> None:
    """Another program fills /dev/shm: the server lives, what is bound answers, the rest is told why and comes later."""
    pirate, robot = by_name(golden, "pirate"), by_name(golden, "robot")

    def body(shm: Path) -> None:
        with running(prepared, router=QUICK) as server:
            assert is_right(server, pirate)
            other = fill(shm, leave=KEPT_FREE)
            with Steady(server, pirate):
                with pytest.raises(ServerError, match="shared memory has no room for"):
                    ask(server, robot)
                assert "must stay so" in explain(server, "robot")["failure"]
                other.unlink()
                until(lambda: is_right(server, robot))
            assert [line for line in explain(server, "pirate")["story"] if "left" in line["what"]] == []

    in_small_shm(48 * MIB, body)


# --- clients


@pytest.fixture(scope="module")
def narrow(prepared: Prepared) -> Iterator[TritonServer]:
    """One slot."""
    with running(
        prepared, router={"tick_s": "0.1", "num_slots": "1", "max_wait_s": "1000", "first_token_s": "3"}
    ) as server:
        yield server


ASKS = """
import sys
from lora_slots.client import Client
with Client(sys.argv[1]) as client:
    for _ in client.stream("x", adapter="robot", max_tokens=8):
        pass
"""


def test_who_cannot_have_a_slot_is_refused_at_once(narrow: TritonServer, golden: list[dict[str, Any]]) -> None:
    """The one slot is pinned: RESOURCE_EXHAUSTED with the reason, and no wait; unpinned, it is answered."""
    with Client(narrow.grpc_url) as client:
        client.operate("pin", adapter="pirate")
        client.operate("warm", adapter="pirate")
        with pytest.raises(ServerError, match="all 1 slots are pinned") as refused:
            ask(narrow, by_name(golden, "robot"))
        assert refused.value.code == "RESOURCE_EXHAUSTED"
        client.operate("unpin", adapter="pirate")
    assert is_right(narrow, by_name(golden, "robot"))


@pytest.mark.parametrize("door", ["ensemble", "direct"])
def test_a_client_that_goes_while_it_waits_leaves_nothing(
    narrow: TritonServer, golden: list[dict[str, Any]], door: str
) -> None:
    """The running stream ends whole, and no lease is left.

    The direct door sees that nobody waits. In an ensemble a step does not learn it (Triton 2.51); mostly the next step
    never runs then, nobody reports its end, and the lease is reaped by its deadline.
    """
    started, pieces, reaped_before = threading.Event(), list[str](), reaped(narrow)

    def run() -> None:
        with Client(narrow.grpc_url) as client:
            for piece in client.stream("Once upon a time", adapter="pirate", max_tokens=1900, end_id=-1):
                pieces.append(piece)
                started.set()

    running_stream = threading.Thread(target=run)
    running_stream.start()
    assert started.wait(60)
    if door == "ensemble":
        process = subprocess.Popen([sys.executable, "-c", ASKS, narrow.grpc_url])
        until(lambda: explain(narrow, "robot")["waiting"] == 1)
        process.kill()
        process.wait()
    else:
        client = Client(narrow.grpc_url)
        asking = threading.Thread(target=ask_for_lease, args=(client,))
        asking.start()
        until(lambda: explain(narrow, "robot")["waiting"] == 1)
        client.close()
        asking.join()
    running_stream.join()
    until(lambda: (explain(narrow, "robot")["waiting"], explain(narrow, "robot")["leases"]) == (0, 0))
    assert len(pieces) > 100
    assert is_right(narrow, by_name(golden, "json"))
    assert reaped(narrow) - reaped_before in ({0, 1} if door == "ensemble" else {0})


def ask_for_lease(client: Client) -> None:
    """Wait for a lease; the connection is closed meanwhile."""
    with pytest.raises(ServerError):
        client.operate("lease", adapter="robot", request_id="gone", max_tokens=8)


def reaped(server: TritonServer) -> float:
    """Leases whose end nobody reported."""
    with urllib.request.urlopen(server.metrics_url) as reply:  # noqa: S310 - loopback
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("lora_slots_leases_reaped_total"))
