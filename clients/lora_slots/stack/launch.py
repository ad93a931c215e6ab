"""What has to be true before tritonserver is started, and the command that starts it.

The Python backend folder is made for each start, of copies: Triton refuses a library behind a link that leaves the
folder, and sets the stub's mode each time, which it may not where root installed the wheel. The copied stub finds the
wheel's libraries through LD_LIBRARY_PATH, and this environment through the first `python3` on PATH; PYTHON* variables
do not reach it.

Triton starts a stub through a shell, with the paths of backend and model unquoted: with a blank in one it would load
for ever. So the model repository is linked into the server's own folder, whose path has no such character.

A stub that cannot be executed makes Triton hang in loading, not fail; so it is executed once here, without
arguments, where it only says what arguments it expects.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from lora_slots.stack.config import LOOPBACK, Ports, StackConfig
from lora_slots.stack.errors import NumpyTooNew, SetupError, TritonMissing, temporary_errors
from lora_slots.stack.libpython import check_python, find_libpython

WHEEL = "nvidia-pytriton==0.7.0"
_CANNOT_EXECUTE = (126, 127)
_LIST_SEPARATOR = ":"


def triton_home() -> Path:
    """The folder in the wheel with bin/, backends/ and the stubs. Raises TritonMissing."""
    spec = importlib.util.find_spec("pytriton")  # found, not imported: its API and its dependencies are unused
    for place in (spec.submodule_search_locations or []) if spec else []:
        home = Path(place) / "tritonserver"
        if (home / "bin" / "tritonserver").is_file():
            return home
    raise TritonMissing(
        f"tritonserver is not installed beside {sys.executable}: run `make setup`, or "
        f"`pip install --no-deps {WHEEL}` in that environment"
    )


def check_numpy() -> None:
    """Refuse a numpy with which the stub would lose strings. Raises NumpyTooNew."""
    try:
        version = metadata.version("numpy")
    except metadata.PackageNotFoundError:
        raise NumpyTooNew("numpy is not installed: Triton's Python stub needs `numpy<2`; run `make setup`") from None
    if int(version.split(".", 1)[0]) >= 2:
        raise NumpyTooNew(
            f"numpy {version} is installed, but Triton 2.51's Python stub needs `numpy<2`: with a newer one text "
            "tensors come out empty. Run `make setup`, or `pip install 'numpy<2'` in this environment"
        )


def make_folder(folder: Path, home: Path, model_repository: Path) -> Path:
    """Make the server's folder, with backends/ for this interpreter and models/, and return the stub's path in it.

    Raises SetupError for a folder whose path a shell would not leave alone, TritonMissing for a Python without a stub,
    NoTemporary where the folder cannot be written.
    """
    if shlex.quote(str(folder)) != str(folder):
        raise SetupError(f"Triton cannot work below {folder.parent}, a path with a blank or the like: set TMPDIR")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise TritonMissing(f"the installed {WHEEL} has no Python stub for Python {version}: run `make setup`")
    files = [home / "backends" / "python" / name for name in ("libtriton_python.so", "triton_python_backend_utils.py")]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise TritonMissing(f"the installed {WHEEL} is not whole, there is no {', '.join(missing)}: run `make setup`")
    python = folder / "backends" / "python"
    with temporary_errors():
        folder.mkdir(mode=0o700)
        (folder / "models").symlink_to(model_repository.resolve())
        python.mkdir(parents=True)
        for file in (*files, stub):
            shutil.copyfile(file, python / file.name)
    copied = python / stub.name
    copied.chmod(0o700)
    return copied


def server_environment(home: Path, config: StackConfig) -> dict[str, str]:
    """Our environment with this interpreter first on PATH, its libpython and the wheel's libraries findable.

    Raises SetupError.
    """
    check_python()
    check_numpy()
    environment = {**os.environ, **config.environment}
    _put_first(environment, "PATH", str(Path(sys.executable).parent))
    _put_first(environment, "LD_LIBRARY_PATH", str(home.parents[1] / "nvidia_pytriton.libs"))  # names with hashes only
    library_folder = find_libpython().library_folder
    if library_folder is not None:
        _put_first(environment, "LD_LIBRARY_PATH", str(library_folder))
    return environment


def check_stub(stub: Path, environment: dict[str, str]) -> None:
    """Execute the stub once, to see that the loader finds all its libraries. Raises SetupError."""
    try:
        run = subprocess.run(
            [str(stub)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"Triton's Python stub cannot be executed: {error}") from error
    if run.returncode in _CANNOT_EXECUTE or run.returncode < 0:
        raise SetupError(f"Triton's Python stub cannot be executed (code {run.returncode}): {run.stderr.strip()}")


def command(home: Path, config: StackConfig, ports: Ports, folder: Path) -> list[str]:
    """The arguments that start tritonserver in its folder; server and shared memory are named as the folder is."""
    name = folder.name
    argv = [str(home / "bin" / "tritonserver"), f"--id={name}"]
    argv += [f"--model-repository={folder / 'models'}", f"--backend-directory={folder / 'backends'}"]
    argv += [f"--cache-directory={home / 'caches'}"]
    for door, port in ports.doors():
        argv += [f"--{door}-address={LOOPBACK}", f"--{door}-port={port}"]
    argv += [f"--exit-timeout-secs={config.exit_timeout_s}"]
    argv += [f"--backend-config=python,shm-region-prefix-name={name}-"]
    if config.control_models:
        argv += ["--model-control-mode=explicit", "--load-model=*", "--strict-readiness=false"]
    if config.complete_configs:
        argv += ["--disable-auto-complete-config"]
    return [*argv, *config.arguments]


def _put_first(environment: dict[str, str], variable: str, folder: str) -> None:
    rest = environment.get(variable)
    environment[variable] = f"{folder}{_LIST_SEPARATOR}{rest}" if rest else folder
