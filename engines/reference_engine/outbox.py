"""Carries words from the loop to the listeners, on a thread of its own, and looks who has gone away."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from reference_engine.progress import Progress

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who asked. Both methods are called from the outbox thread only."""

    def tell(self, progress: Progress) -> None:
        """News of one sequence."""

    def fail(self, text: str) -> None:
        """The request failed; there is nothing more to come for it."""


class Outbox:
    """Calls listeners in the order in which the loop spoke."""

    def __init__(self, watch: Callable[[], None], period_s: float) -> None:
        """`watch` is called about every `period_s` seconds: the place to poll for cancelled clients."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._watch, self._period_s = watch, period_s
        self._thread = threading.Thread(target=self._run, name="reference-engine-outbox", daemon=True)
        self._thread.start()

    def tell(self, listener: Listener, progress: Progress) -> None:
        """Pass news on."""
        self._queue.put(lambda: listener.tell(progress))

    def fail(self, listener: Listener, text: str) -> None:
        """Pass a failure on."""
        self._queue.put(lambda: listener.fail(text))

    def close(self) -> None:
        """Deliver what there is, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._period_s
        while True:
            try:
                act = self._queue.get(timeout=max(due - time.monotonic(), 0.001))
            except queue.Empty:
                act = self._nothing
            if act is None:
                return
            try:
                act()
                if time.monotonic() >= due:
                    self._watch()
                    due = time.monotonic() + self._period_s
            except Exception:  # one broken client is no reason to leave the others without answers
                log.exception("a listener failed")

    @staticmethod
    def _nothing() -> None:
        """Time passed."""
