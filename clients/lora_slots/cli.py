"""`lora-slots`: every command of the project. Commands live in modules of their own; heavy imports wait until used."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from lora_slots.errors import (
    EXIT_CHECK_FAILED,
    EXIT_ENVIRONMENT,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    CheckFailed,
    ServerError,
    UsageError,
)

if TYPE_CHECKING:
    import typer

COMMANDS = (
    *("up", "convert", "generate", "slots", "prewarm"),
    *("gateway", "tenants"),
    *("adapters", "bundle", "canary"),
    *("engine", "repo", "plan", "merge"),
)
"""Commands and groups in the order of `--help`; each is in the module of its name. `merge` brings `merge-advice`."""


def main() -> NoReturn:
    """Run the command line; every expected error becomes one message and an exit code, never a traceback."""
    try:
        if sys.argv[1:2] == ["convert"]:  # without typer, whose import takes longer than a usual conversion
            from lora_slots import convert_command

            convert_command.run(sys.argv[2:])
        if sys.argv[1:] == ["--version"]:
            from importlib.metadata import version

            sys.stdout.write(f"lora-slots {version('lora-slots')}\n")
            sys.exit(0)
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # the reader of a pipe has gone: nothing to tell anybody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ENVIRONMENT)


def application(first_word: str = "") -> typer.Typer:
    """The application: the one command or group of this first word, else every command of the project.

    One alone starts sooner: typer looks at each parameter of each command that it is given.
    """
    import typer

    app = typer.Typer(name="lora-slots", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(lora_slots)
    for name in [first_word] if first_word in COMMANDS else COMMANDS:
        import_module(f"lora_slots.{name}_command").register(app)
    return app


def _run() -> int:
    import typer

    app = application(sys.argv[1] if len(sys.argv) > 1 else "")
    usage_error = _usage_error(typer.BadParameter)
    try:
        return int(app(standalone_mode=False) or 0)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except usage_error as error:
        if str(error).strip():  # without arguments the help was printed, and that is all
            # with the option's name in front, where the error is about an option
            sys.stderr.write(f"lora-slots: {getattr(error, 'format_message', error.__str__)()}\n")
        return EXIT_ENVIRONMENT
    except ServerError as error:
        return _fail(f"{error} [{error.code}]", error.exit_code)
    except CheckFailed as error:
        return _fail(f"check failed:\n{error}", EXIT_CHECK_FAILED)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(
            ": ".join(str(part) for part in (error.filename, error.strerror or error) if part), EXIT_ENVIRONMENT
        )
    except Exception as error:
        code = _expected(error)
        if code is None:
            raise
        return _fail(str(error), code)


def _usage_error(kind: type[Exception]) -> type[Exception]:
    """The common base of typer's usage errors; where it lives depends on the version of typer."""
    return next(base for base in kind.__mro__ if base.__name__ == "ClickException")


def lora_slots() -> None:
    """Serve many LoRA adapters on one TensorRT-LLM engine behind Triton.

    `lora-slots --version` prints the version.

    Exit codes: 0 done, 1 usage or environment, 2 refused, 3 a check failed, 130 interrupted.
    """


def _expected(error: Exception) -> int | None:
    """Exit code of one of the project's own errors, which are written for a person; None for a surprise."""
    from adapter_slots.errors import SlotError
    from lora_slots.base_model import BaseModelError
    from lora_slots.repository import RepositoryError
    from lora_slots.stack import StackError
    from lora_slots.text import TokenizerError
    from peft_to_trtllm.errors import AdapterRefused, InputError
    from reference_engine.errors import ReferenceEngineError
    from trtllm_lora import ContractError

    own = (UsageError, ContractError, SlotError, InputError, ReferenceEngineError, BaseModelError)
    if isinstance(error, AdapterRefused):
        return EXIT_REFUSED
    if isinstance(error, (*own, RepositoryError, StackError, TokenizerError)):
        return EXIT_ENVIRONMENT
    return None


def _fail(message: str, code: int) -> int:
    print(f"lora-slots: {message}", file=sys.stderr)  # noqa: T201 - the one place that speaks to the terminal
    return code
