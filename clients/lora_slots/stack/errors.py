"""What can go wrong with the embedded stack, one class per way, each message saying what to do next.

StackError
├── SetupError            this machine or environment cannot run the embedded Triton
│   ├── WrongPython       Triton 2.51's stub and numpy 1.26 exist for Python 3.11 and 3.12 only
│   ├── NumpyTooNew       with numpy 2 the stub loses strings silently, so the server is not started
│   ├── TritonMissing     the wheel that carries tritonserver is not installed
│   ├── LibpythonMissing  without it a start would hang instead of failing
│   └── NoTemporary       the temporary folder cannot be written, or is full
├── PortTaken             a port asked for by number is in use, or may not be used
├── ModelsFailed          the server started, a model did not load
├── NotReady              the server lives but did not become ready in time
└── ServerDied            the server, or one of its Python stubs, ended while it should serve
    └── StubDied          Triton never restarts a stub, and stays "ready" without it
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class StackError(RuntimeError):
    """The embedded stack could not start or has stopped serving. `log_tail` is "" where there was no log."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        self.summary = message
        self.log_tail = log_tail
        super().__init__(f"{message}\n\nThe last lines of its log:\n{log_tail}" if log_tail else message)


class SetupError(StackError):
    """The machine or the environment lacks something; nothing was started."""


class WrongPython(SetupError):
    """The interpreter is neither Python 3.11 nor 3.12."""


class NumpyTooNew(SetupError):
    """numpy 2 or newer is installed where the stub would find it, or numpy is not there at all."""


class TritonMissing(SetupError):
    """The wheel with tritonserver is not installed beside this interpreter, or not whole."""


class LibpythonMissing(SetupError):
    """No shared library of this interpreter was found, nor could one be brought."""


class NoTemporary(SetupError):
    """The temporary folder `path` cannot be written, or its disk is full."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"cannot write the temporary folder {path}: {reason}. Free some space, or set TMPDIR to another folder"
        )
        self.path = path


@contextmanager
def temporary_errors() -> Iterator[None]:
    """Turn the operating system's errors on finding and writing the temporary folder into NoTemporary."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - named to the user only
        raise NoTemporary(Path(folder), error.strerror or str(error)) from error


class PortTaken(StackError):
    """`door` ("http", "grpc" or "metrics") cannot listen on `port`. `setting` is what the caller set the port with."""

    def __init__(self, door: str, port: int, reason: str, *, setting: str | None = None, log_tail: str = "") -> None:
        self.door = door
        self.port = port
        self.reason = reason
        super().__init__(
            f"the {door} port {port} of the embedded Triton cannot be used: {reason}. "
            f"Give {setting or f'{door}_port'} another number, or 0 to have a free one chosen",
            log_tail=log_tail,
        )


class ModelsFailed(StackError):
    """`models` did not load."""

    def __init__(self, models: Sequence[str], *, log_tail: str) -> None:
        self.models = tuple(models)
        super().__init__(f"Triton could not load {', '.join(models)}", log_tail=log_tail)


class NotReady(StackError):
    """The server did not become ready within the time given."""


class ServerDied(StackError):
    """tritonserver ended by itself. `returncode` as `subprocess` gives it, None where nobody saw it."""

    def __init__(self, message: str, *, returncode: int | None, log_tail: str) -> None:
        self.returncode = returncode
        super().__init__(message, log_tail=log_tail)


class StubDied(ServerDied):
    """The process of a Python model ended; every request to that model would fail from now on.

    `instances` are the model instances as Triton calls them (`model_0_0`).
    """

    def __init__(self, message: str, *, log_tail: str, instances: Sequence[str]) -> None:
        super().__init__(message, returncode=None, log_tail=log_tail)
        self.instances = tuple(instances)

    @property
    def models(self) -> tuple[str, ...]:
        """The models of those instances."""
        return tuple(dict.fromkeys(name.rsplit("_", 2)[0] for name in self.instances))
