"""Refused input ends with exit code 2 and every problem on a line of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import typer

from lora_slots.errors import EXIT_REFUSED
from trtllm_lora import ContractError

T = TypeVar("T")


class Refused(ContractError):
    """Input that cannot be used; the message has one line for each problem."""


class Gathered:
    """Collects refusals, so that a user hears all of them at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def of(self, made: Callable[[], T]) -> T | None:
        """What `made` gives; None if it refuses, which is kept."""
        try:
            return made()
        except ContractError as error:
            self._lines += [line for line in str(error).splitlines() if line not in self._lines]
            return None

    def tell(self) -> None:
        """Raise Refused with everything that was kept, if anything was."""
        if self._lines:
            raise Refused("\n".join(self._lines))


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a contract's refusal into its lines on stderr and exit code 2."""
    try:
        yield
    except ContractError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(EXIT_REFUSED) from None
