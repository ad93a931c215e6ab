"""`lora-slots convert`: a PEFT adapter becomes a bundle, or a report of every reason why not.

Exit status: 0 converted (or found convertible), 2 refused, 1 a wrong argument, path or disk. Reports go to stderr, one
line of summary (or JSON) to stdout.

The options are argparse's and the application only delegates: importing typer (and with it pydantic) takes longer than
converting a usual adapter. `cli.main` comes here before it imports them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer

    from peft_to_trtllm.file_hash import FileHash
    from peft_to_trtllm.job import Conversion, Job, Request
    from trtllm_lora import Bundle
    from trtllm_lora.signing import PrivateKey

_REFUSED, _WRONG_INPUT, _INTERRUPTED = 2, 1, 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONG_WORK_BYTES = 200 << 20
"""Output from which a progress bar is worth its import."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A wrong usage exits 1: 2 means that an adapter was refused."""
        self.exit(_WRONG_INPUT, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    options = _Parser(
        prog="lora-slots convert",
        description="Convert a PEFT LoRA adapter to a bundle for a TensorRT-LLM engine, or say every reason why not.",
        epilog="Exit status: 0 converted, 2 refused, 1 a wrong argument, path or disk. "
        "Example: lora-slots convert ./my_adapter --engine /engines/llama --out ./bundles",
        allow_abbrev=False,
    )
    add = options.add_argument
    add("adapter", metavar="ADAPTER", help="PEFT adapter directory, or s3://bucket/path")
    add("--base", type=Path, metavar="PATH", help="the base model's config.json, or its directory")
    add("--engine", type=Path, metavar="PATH", help="engine directory, or its config.json: check against it")
    add("--out", type=Path, metavar="DIR", help="where the bundle is written, under its digest")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="type of the weights; default: the engine's, else the base's",
    )
    add("--name", help="name of the adapter; default: its directory's")
    add("--base-weights", type=Path, metavar="DIR", help="the base's .safetensors, which DoRA needs")
    add(
        "--fused",
        action="append",
        default=[],
        choices=("attn_qkv", "mlp_gate_up"),
        help="write this fused id instead of the separate ones; may be given twice",
    )
    add("--tp", type=int, metavar="N", help="ranks to deal fused rows out for; default: the engine's")
    add("--sign", type=Path, metavar="KEY", help="sign the bundle with this private key (`lora-slots adapters keygen`)")
    add("--check", action="store_true", help="judge only, write nothing")
    add("--explain", action="store_true", help="print which module becomes which row; writes only with --out")
    add("--verify", type=Path, metavar="DIR", help="base model: compare with PEFT on it (needs torch and peft)")
    add("--json", action="store_true", help="print the report as JSON on stdout")
    return options


def register(app: typer.Typer) -> None:
    """Add the command to the application, which hands its arguments over as they are."""
    from lora_slots.convert_completion import HandedOver, handed_over

    app.command("convert", cls=HandedOver)(handed_over(parser(), main))


def run(arguments: Sequence[str]) -> NoReturn:
    """Run the command as the one thing this process does.

    Raises:
        SystemExit: of the option parser, or after a signal.
    """
    gc.disable()  # the process is short: collecting takes longer than what it gives back
    try:
        status = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:  # of the streams: those of files are told of by `main`; a pipe may be closed, a disk full
        status = _WRONG_INPUT
        with contextlib.suppress(OSError):
            _failed(f"the report could not be written: {error.strerror or error}")
            sys.stderr.flush()
    os._exit(status)  # taking the interpreter and numpy down takes as long as writing a small bundle


def main(arguments: Sequence[str]) -> int:
    """Run the command on its arguments and return the exit status."""
    options = parser().parse_args(arguments)
    from peft_to_trtllm.file_hash import FileHash

    hashing = FileHash(Path(options.adapter, "adapter_model.safetensors")) if options.out else None
    try:
        return _convert(options, hashing)
    finally:
        if hashing:
            hashing.cancel()


def _convert(options: argparse.Namespace, hashing: FileHash | None) -> int:
    from peft_to_trtllm.errors import InputError
    from peft_to_trtllm.job import Request
    from trtllm_lora import ContractError

    writes = not options.check and (options.out is not None or not options.explain)
    if writes and options.out is None:
        return _failed("--out is missing: where shall the bundle go? (--check and --explain write nothing)")
    if options.verify and not writes:
        return _failed("--verify compares a bundle that was written: give --out, without --check")
    if options.sign and not writes:
        return _failed("--sign signs a bundle that was written: give --out, without --check")
    request = Request(
        options.adapter,
        options.base,
        options.engine,
        options.dtype,
        options.name,
        options.base_weights,
        tuple(dict.fromkeys(options.fused)),
        options.tp,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text
    try:
        if options.verify:
            from peft_to_trtllm.verify import check_available

            check_available()
        key = _signing_key(options.sign)  # before the work: a key that cannot be used is told at once
        with _ended_by_signals():
            return _run(request, options.out if writes else None, options, hashing, key)
    except (InputError, ContractError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was left behind\n")
        return _INTERRUPTED
    except MemoryError:
        return _failed("out of memory")


def _signing_key(file: Path | None) -> PrivateKey | None:
    if file is None:
        return None
    from trtllm_lora.signing import read_private_key

    return read_private_key(file)


def _run(
    request: Request, out: Path | None, options: argparse.Namespace, hashing: FileHash | None, key: PrivateKey | None
) -> int:
    from peft_to_trtllm.api import convert_job
    from peft_to_trtllm.errors import AdapterRefused
    from peft_to_trtllm.job import Job
    from trtllm_lora.bundle_writing import set_signature

    with Job(request) as job:
        bundle = None
        try:
            with _Progress(job) as progress:
                if out is not None:
                    bundle = convert_job(job, out, progress, hashing)
                    if key is not None:
                        bundle = set_signature(bundle, key.sign(bundle.digest))
                elif job.conversion:
                    for _ in job.conversion.rows(progress):
                        pass
        except AdapterRefused:
            pass  # the report below says why
        report = job.report
        if not report.ok or report.warnings:
            sys.stderr.write(report.text() + "\n")
        if options.explain and report.matches and not options.json:
            sys.stdout.write(report.table() + "\n")
        if options.json:
            sys.stdout.write(_json(job, bundle) + "\n")
        elif report.ok:
            sys.stdout.write(_summary(job, bundle) + "\n")
        if not report.ok:
            return _REFUSED
        return _verify(job.conversion, bundle, options.verify) if options.verify and bundle and job.conversion else 0


def _summary(job: Job, bundle: Bundle | None) -> str:
    from peft_to_trtllm.report import printable

    adapter = printable(job.request.adapter)
    if job.conversion is None:
        return f"{adapter}: refused"
    plan = job.conversion.plan
    ranks = sorted({row.rank for row in plan.rows})
    span = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    what = f"{len(plan.rows)} rows, rank {span}, {job.conversion.dtype}"
    if bundle is None:
        return f"{adapter}: can be converted: {what}"
    return f"{printable(bundle.adapter)}: {what}, {_size(bundle.num_bytes)} -> {bundle.path} (task id {bundle.task_id})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"


def _json(job: Job, bundle: Bundle | None) -> str:
    content = json.loads(job.report.to_json())
    if bundle:
        about = {"path": str(bundle.path), "digest": bundle.digest, "task_id": bundle.task_id}
        content["bundle"] = {**about, "signature": bundle.signature}
    return json.dumps(content, indent=1)


def _verify(ready: Conversion, bundle: Bundle, base: Path) -> int:
    from peft_to_trtllm.verify import verify

    verdict = verify(bundle, ready.plan, ready.adapter.path, base)
    sys.stdout.write(verdict.text() + "\n")
    return 0 if verdict.ok else _REFUSED


class _Progress:
    """A bar on stderr, where a person looks and the work is long; else nothing."""

    def __init__(self, job: Job) -> None:
        rows = job.conversion.plan.rows if job.conversion else ()
        work = sum(row.size for row in rows) * 4
        self._wanted = work > _LONG_WORK_BYTES and sys.stderr.isatty()
        self._name, self._total = job.request.adapter, len(rows)

    def __enter__(self) -> Callable[[int, int], None] | None:
        if not self._wanted:
            return None
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._bar.start()
        task = self._bar.add_task(f"converting {self._name}", total=self._total)
        return lambda done, _: self._bar.update(task, completed=done)

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            self._bar.stop()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the run like an exception, so that nothing half-written stays.

    The first one has the say: what comes after it, while the run cleans up, does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _end:  # after a signal the rest of the run is not to be disturbed either
                signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    for other in _SIGNALS:
        signal.signal(other, _pass_over)  # not SIG_IGN: Python would tell of a signal that had already come
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """A signal after the first."""


def _failed(message: str) -> int:
    plain = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    sys.stderr.write(f"lora-slots convert: {plain}\n")
    return _WRONG_INPUT
