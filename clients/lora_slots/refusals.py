"""Refused input ends with exit code 2 and every problem on a line of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lora_slots.errors import EXIT_REFUSED
from trtllm_lora import ContractError


class Refused(ContractError):
    """Input that cannot be used; the message has one line for each problem."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a contract's refusal into its lines on stderr and exit code 2."""
    try:
        yield
    except ContractError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(EXIT_REFUSED) from None
