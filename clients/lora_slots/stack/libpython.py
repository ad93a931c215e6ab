"""Finding the shared library of the running Python, which Triton's stub links against and many machines lack.

Debian's python3 is linked statically, so `libpython3.11.so.1.0` is not there unless a package of its own brings it;
a stub without it makes Triton hang while loading. Looked for, in this order: beside the interpreter, where the
system's loader looks, in our cache. Else it is brought: on Debian and its relatives the package is downloaded and
unpacked into the cache, with private folders for apt, so that neither root nor a change of the system is needed;
as root, where that fails, it is installed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lora_slots.stack.errors import LibpythonMissing, WrongPython

SUPPORTED = ((3, 11), (3, 12))
_APT_TIMEOUT_S = 300


@dataclass(frozen=True)
class Libpython:
    """`library_folder` is what LD_LIBRARY_PATH needs, None where the loader finds the library by itself."""

    name: str
    library_folder: Path | None


def check_python() -> None:
    """Raises WrongPython unless both numpy 1.26 and Triton's stub exist for this interpreter."""
    if sys.version_info[:2] not in SUPPORTED or sys.implementation.name != "cpython":
        raise WrongPython(
            f"this is {sys.implementation.name} {_version()} ({sys.executable}), but the embedded Triton runs with "
            "CPython 3.11 or 3.12 only: `make PYTHON=/path/to/python3.12 setup`"
        )


def library_name() -> str:
    """The name by which the stub asks for the library of this interpreter."""
    return f"libpython{_version()}.so.1.0"


def find_libpython(*, bring: bool = True, cache: Path | None = None) -> Libpython:
    """Find the library, or bring it where `bring`. Raises LibpythonMissing, naming the package to install."""
    name = library_name()
    folder = _beside_the_interpreter(name)
    if folder is not None:
        return Libpython(name, folder)
    if _loader_finds(name):
        return Libpython(name, None)
    from lora_slots.base_model.store import cache_folder  # needed on few machines: a plain start stays light

    store = cache_folder(cache) / "libpython" / _version()
    folder = _in(store, name)
    if folder is None and bring:
        folder = _download(store, name)
        if folder is None and _install():
            return Libpython(name, None)
    if folder is None:
        raise LibpythonMissing(_advice(name))
    return Libpython(name, folder)


def _beside_the_interpreter(name: str) -> Path | None:
    """The folder of a Python built with --enable-shared (pyenv, conda, uv, the python image)."""
    folders = [sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib")]
    return next((Path(folder) for folder in folders if folder and (Path(folder) / name).exists()), None)


def _loader_finds(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _in(store: Path, name: str) -> Path | None:
    return next((library.parent for library in sorted(store.glob(f"**/{name}"))), None)


def _package() -> str:
    return f"libpython{_version()}"


def _download(store: Path, name: str) -> Path | None:
    """Unpack Debian's package into the store, which appears whole or not at all."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        return _unpacked(store, name)
    except OSError:
        return None  # the cache cannot be written; there is a message that says what to install


def _unpacked(store: Path, name: str) -> Path | None:
    with tempfile.TemporaryDirectory(prefix="new-", dir=store.parent) as scratch:
        work = Path(scratch)
        for folder in ("lists/partial", "archives/partial", "root"):
            (work / folder).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}"]
        apt += ["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"]
        if not (_run([*apt, "update"], work) and _run([*apt, "download", _package()], work)):
            return None
        packages = sorted(work.glob("*.deb"))
        if not packages or not _run(["dpkg-deb", "-x", str(packages[0]), f"{work}/root"], work):
            return None
        if _in(work / "root", name) is None:
            return None
        shutil.rmtree(store, ignore_errors=True)
        (work / "root").rename(store)
    return _in(store, name)


def _install() -> bool:
    """As root, have apt install the package."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    _run(["apt-get", "-qq", "update"], Path("/"))
    _run(["apt-get", "-qq", "install", "-y", "--no-install-recommends", _package()], Path("/"))
    return _loader_finds(library_name())


def _run(argv: list[str], folder: Path) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv, cwd=folder, env=environment, timeout=_APT_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _advice(name: str) -> str:
    return (
        f"{name} was not found, and Triton's Python stub needs it. Install it: `apt-get install {_package()}` on "
        f"Debian and Ubuntu, `dnf install python{_version()}-libs` on Fedora and Red Hat; or use a Python that was "
        "built with --enable-shared"
    )


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
