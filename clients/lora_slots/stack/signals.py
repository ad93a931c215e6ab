"""Signals that end a program, turned into an exception, so that `with` blocks end in order (and wait for Triton)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Within the block, in the main thread, SIGTERM and SIGHUP raise SystemExit(128 + number); SIGINT is as ever.

    Without it a stack is stopped too (its keeper sees us end), but we would be gone some seconds before it is.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
