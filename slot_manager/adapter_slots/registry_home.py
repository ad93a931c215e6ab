"""Where `adapters.yaml` lies: read it if it changed, replace it in one step, keep its history. Blocking.

In a directory: writers hold a lock (flock on the history's file, which is never replaced) from reading to renaming.
In an object store (registry_s3.py): a write goes through only if the object is still the one that was read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adapter_slots.errors import RegistryAbsent, RegistryError, RegistryMoved
from trtllm_lora.files import fsync_path

Stamp = tuple[int, int, int] | str
"""Another one whenever the text may be another: a file's times, size and number, or an object's ETag."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Reading:
    """The text as it was read, and its stamp."""

    text: str
    stamp: Stamp


class Home(Protocol):
    """One `adapters.yaml`. Everything raises RegistryError, which names the place."""

    name: str
    """For messages."""
    folder: Path | None
    """What its paths are relative to on this machine; None: it is not on this machine."""
    interval_s: float
    """How often looking for changes is reasonable."""

    def read(self, known: Stamp | None = None) -> Reading | None:
        """The text; None if it is still the one with the stamp `known`. RegistryAbsent if there is none."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out, where that is how it works here."""

    def write(self, text: str, known: Stamp | None) -> str | None:
        """Replace the text that has the stamp `known` (None: there is none yet).

        Returns a warning, if it could not be made sure that nobody else wrote meanwhile. Raises RegistryMoved.
        """

    def note(self, line: str, at: str) -> None:
        """Add a line to the history; `at` is its time, ISO 8601."""

    def notes(self) -> Sequence[str]:
        """The lines of the history, oldest first."""

    def located(self, path: str) -> str:
        """A path of the registry, usable on this machine: absolute, or a URL."""


def home_of(place: Path | str, *, endpoint_url: str | None = None) -> Home:
    """The home at a path or an `s3://bucket/key` URL; nothing is read yet.

    Raises:
        RegistryError: another scheme.
    """
    text = str(place)
    if isinstance(place, str) and text.startswith("s3://"):
        from adapter_slots.registry_s3 import S3Home

        return S3Home(text, endpoint_url)
    if isinstance(place, str) and "://" in text:
        raise RegistryError(f"{text}: a registry is a file, or s3://bucket/key")
    return FileHome(Path(text))


class FileHome:
    """A file in a directory."""

    interval_s = 0.0

    def __init__(self, file: Path) -> None:
        self.file = file
        self.name = str(file)
        self.folder: Path | None = file.parent

    @property
    def history(self) -> Path:
        """Beside the file itself, wherever a link to it may lie: it is the lock of all its writers."""
        file = self._real
        return file.with_name(f"{file.stem}.history.jsonl")

    @property
    def _real(self) -> Path:
        return Path(os.path.realpath(self.file))

    def read(self, known: Stamp | None = None) -> Reading | None:
        """As `Home.read`."""
        try:
            with self.file.open("rb") as source:
                stamp = _stamp(os.fstat(source.fileno()))
                return None if stamp == known else Reading(source.read().decode("utf-8"), stamp)
        except FileNotFoundError as error:
            what = f"{self.name}: {error.strerror}; the first `lora-slots adapters add` makes it"
            raise RegistryAbsent(what) from None
        except OSError as error:
            raise RegistryError(f"{self.name}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise RegistryError(f"{self.name}: not UTF-8 text") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """As `Home.locked`: the system gives the lock back however its holder ends."""
        try:
            descriptor = self._lock()
        except OSError as error:
            raise RegistryError(f"{self.history}: cannot be locked: {error.strerror}") from None
        try:
            file = self._real
            for left in file.parent.iterdir():
                if left.name.startswith(_prefix(file)):  # by a writer that was killed: nobody else writes now
                    left.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    def write(self, text: str, known: Stamp | None) -> str | None:
        """As `Home.write`; the file keeps its mode, a link stays a link."""
        file = self._real
        temporary: Path | None = None
        try:
            mode, found = 0o644, None
            if file.exists():
                stat = file.stat()
                mode, found = stat.st_mode & 0o777, _stamp(stat)
            if found != known:  # an editor does not ask for the lock
                raise RegistryMoved(f"{self.name}: it was changed meanwhile")
            with tempfile.NamedTemporaryFile("wb", dir=file.parent, prefix=_prefix(file), delete=False) as out:
                temporary = Path(out.name)
                out.write(text.encode())
                out.flush()
                os.fchmod(out.fileno(), mode)
                os.fsync(out.fileno())
            temporary.replace(file)
            temporary = None
            fsync_path(file.parent)
        except OSError as error:
            raise RegistryError(f"{self.name}: cannot be written: {error.strerror}") from None
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        return None

    def note(self, line: str, at: str) -> None:  # noqa: ARG002 - lines are in order here
        """As `Home.note`."""
        try:
            with self.history.open("a+b") as out:
                if out.tell():
                    out.seek(-1, os.SEEK_END)
                    whole = out.read(1) == b"\n"  # else a writer died within its line
                    out.write(b"" if whole else b"\n")
                out.write(line.encode() + b"\n")
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise RegistryError(f"{self.history}: cannot be written: {error.strerror}") from None

    def notes(self) -> Sequence[str]:
        """As `Home.notes`."""
        try:
            return self.history.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise RegistryError(f"{self.history}: {error.strerror}") from None

    def located(self, path: str) -> str:
        """As `Home.located`."""
        return path if "://" in path else str(self.file.parent / path)

    def _lock(self) -> int:
        history = self.history
        history.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(history, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(descriptor), history.stat()):
                    return descriptor
            except FileNotFoundError:
                pass  # somebody moved the history away while we waited: the lock is on the new one
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return descriptor  # a file system without locks: the stamp is all there is
                os.close(descriptor)
                raise
            os.close(descriptor)


def _prefix(file: Path) -> str:
    return f".{file.name}-"


def _stamp(stat: os.stat_result) -> Stamp:
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
