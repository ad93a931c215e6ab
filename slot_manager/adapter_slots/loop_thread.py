"""An event loop in a thread of its own: tasks that end with it, one timer, and what is done again and again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from adapter_slots.ports import Clock

STOP_S = 30.0


class LoopThread:
    """`start` once, `stop` once; the rest from any thread in between."""

    def __init__(self, name: str, clock: Clock, on_timer: Callable[[], None]) -> None:
        """`on_timer` is called in the loop when the deadline asked for by `rearm` has come."""
        self._clock = clock
        self._on_timer = on_timer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._armed: tuple[float, asyncio.TimerHandle] | None = None
        self._stopping = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel every task, wait for its end, run `last`, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._stop(last), self._loop).result(timeout=STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=STOP_S)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task; those given first begin first."""

        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    def rearm(self, deadline: float | None) -> None:
        """Call `on_timer` at `deadline` (seconds of the clock) if that is earlier than what was asked for before."""
        if deadline is not None and (self._armed is None or deadline < self._armed[0]):
            self._loop.call_soon_threadsafe(self._arm, deadline)

    def every(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` now and after every `seconds`, whatever becomes of a single call."""

        def turn() -> None:
            if not self._stopping:
                self._loop.call_later(seconds, turn)
                do()

        self._loop.call_soon_threadsafe(turn)

    def _arm(self, deadline: float) -> None:
        if self._armed is not None:
            if self._armed[0] <= deadline:
                return
            self._armed[1].cancel()
        delay = max(0.0, deadline - self._clock())
        self._armed = (deadline, self._loop.call_later(delay, self._fire))

    def _fire(self) -> None:
        self._armed = None
        self._on_timer()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _stop(self, last: Coroutine[Any, Any, None]) -> None:
        self._stopping = True
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await last
