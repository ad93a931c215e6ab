"""Runs the steps of a build. A result appears under its name when it is whole, or not at all; logs are always kept.

Each step writes to a folder beside its final one, in a process group of its own. The last step's folder is verified
against the profile and gets its manifest before it is renamed. An interruption ends the group and removes the folder.
Beside each result lies a list of its files and their sizes: one that lost a file since is built again. An engine out of
a remote store is verified like one that was built here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtllm_lora.errors import ContractError
from trtllm_lora.pipeline.manifest import check_manifest, write_manifest
from trtllm_lora.pipeline.results import is_whole, put
from trtllm_lora.pipeline.steps import BuildPlan, Step
from trtllm_lora.verify import verify_engine

LOG_TAIL = 15
TOKENIZER_FOLDER = "tokenizer"
_TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class BuildFailed(ContractError):
    """A step failed; the message ends with the last lines of its log and says where the log is."""


class RemoteStore(Protocol):
    """Results kept elsewhere, by name. Both calls may raise; a build goes on without a remote that fails to answer."""

    def fetch(self, name: str, into: Path) -> bool:
        """Put the result `name` into the new folder `into`; False if it is not there."""
        ...

    def keep(self, name: str, folder: Path) -> None:
        """Keep a result."""
        ...


@dataclass(frozen=True, slots=True)
class Built:
    """What became of one step."""

    step: Step
    how: str
    """`run`, `cached` or `fetched`."""
    seconds: float
    log: Path | None


class Runner:
    """Carries out a plan, step by step."""

    def __init__(
        self,
        cache: Path,
        clock: Callable[[], float],
        say: Callable[[str], object],
        *,
        remote: RemoteStore | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._cache, self._clock, self._say, self._remote = cache, clock, say, remote
        self._environment = environment

    def run(self, plan: BuildPlan) -> list[Built]:
        """All steps in order; those whose results stand are passed over, and so are those only such a result needs.

        Raises:
            BuildFailed: a step failed, or the engine is not what the profile says. Nothing half-made is left.
        """
        steps = plan.steps
        first = next((i for i in reversed(range(len(steps))) if is_whole(steps[i].folder)), -1)
        done = [Built(step, "cached", 0.0, None) for step in steps[: first + 1]]
        for i, step in enumerate(steps[first + 1 :], first + 2):
            began = self._clock()
            self._say(f"[{i}/{len(steps)}] {step.name}: {_quoted(step.command(step.folder))}")
            built = self._one(step, plan, done)
            done.append(Built(step, built, self._clock() - began, self._log(step) if built == "run" else None))
            self._say(f"[{i}/{len(steps)}] {step.name}: {built} in {done[-1].seconds:.1f} s -> {step.folder}")
        return done

    def _one(self, step: Step, plan: BuildPlan, done: Sequence[Built]) -> str:
        self._cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{step.folder.name}-", dir=self._cache) as scratch:
            out = Path(scratch) / "out"
            if self._fetched(step, out, plan):
                put(out, step.folder, self._say)
                return "fetched"
            self._command(step, out)
            if step is plan.engine:
                self._finish(plan, out, done)
            put(out, step.folder, self._say)
        self._kept(step)
        return "run"

    def _command(self, step: Step, out: Path) -> None:
        log = self._log(step)
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = step.command(out)
        with log.open("wb") as sink:
            sink.write(f"$ {_quoted(argv)}\n".encode())
            sink.flush()
            try:
                code = _run(argv, sink.fileno(), self._environment)
            except OSError as error:
                hint = "run this inside the container that the profile names, or see --dry-run"
                raise BuildFailed(f"{step.name}: {argv[0]} cannot be started ({error.strerror}): {hint}") from None
        if code:
            raise BuildFailed(f"{step.name}: ended with code {code}\n{_tail(log)}\nwhole log: {log}")
        if not out.is_dir() or not any(out.iterdir()):
            raise BuildFailed(f"{step.name}: ended well but wrote nothing\n{_tail(log)}\nwhole log: {log}")

    def _finish(self, plan: BuildPlan, out: Path, done: Sequence[Built]) -> None:
        differences = verify_engine(out, plan.profile)
        if differences:
            lines = "\n".join(f"  {difference}" for difference in differences)
            raise BuildFailed(f"the engine was built, but is not what the profile says:\n{lines}")
        if plan.tokenizer is not None:
            _copy_tokenizer(plan.tokenizer, out / TOKENIZER_FOLDER)
        write_manifest(out, plan, {built.step.name: built.seconds for built in done})

    def _log(self, step: Step) -> Path:
        return self._cache / "logs" / f"{step.folder.name}.log"

    def _fetched(self, step: Step, out: Path, plan: BuildPlan) -> bool:
        if self._remote is None:
            return False
        try:
            if not self._remote.fetch(step.folder.name, out):
                return False
        except OSError as error:
            self._say(f"{step.name}: the remote store did not answer, so it is built here ({error})")
        else:
            problems = _engine_problems(out, plan) if step is plan.engine else []
            if not problems:
                return True
            self._say(f"{step.name}: what the remote store has is not used: {'; '.join(problems)}")
        shutil.rmtree(out, ignore_errors=True)
        return False

    def _kept(self, step: Step) -> None:
        if self._remote is None:
            return
        try:
            self._remote.keep(step.folder.name, step.folder)
        except OSError as error:
            self._say(f"{step.name}: the remote store did not take it; it is kept here only ({error})")


def _run(argv: Sequence[str], log: int, environment: Mapping[str, str] | None) -> int:
    """Run a command in a group of its own; whatever ends us ends the whole group."""
    process = subprocess.Popen(
        argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
    )
    try:
        return process.wait()
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue


def _copy_tokenizer(base: Path, into: Path) -> None:
    """So that an engine directory can be served where its base is not."""
    into.mkdir()
    for name in _TOKENIZER_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, into / name)


def _engine_problems(out: Path, plan: BuildPlan) -> list[str]:
    """Why a fetched engine is not the one that was asked for."""
    try:
        return [str(difference) for difference in verify_engine(out, plan.profile)] + check_manifest(out)
    except ContractError as error:
        return [str(error)]


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-LOG_TAIL:])


def _quoted(argv: Sequence[str]) -> str:
    import shlex

    return shlex.join(argv)
