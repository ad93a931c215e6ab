"""Progress bars for the steps of `lora-slots up`; lines where there is no terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

STAGES = {
    "wait": "waiting for another start",
    "check": "checking the base model",
    "download": "downloading SmolLM2-135M-Instruct, 93 MB",
    "build": "writing the base model, 543 MB",
    "engine": "building the reference engine",
    "convert": "converting adapters",
    "prewarm": "warming adapters",
}


class Bars:
    """`report(stage, done, total)` draws; a stage without a length (total 0) is a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._rich = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        return self  # nothing is drawn before the first report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()

    def report(self, stage: str, done: int, total: int) -> None:
        """A step came this far."""
        text = STAGES.get(stage, stage)
        if not total:
            self._console.print(f"{text} …", highlight=False)
            return
        if stage not in self._tasks:
            self._rich.start()
            self._tasks[stage] = self._rich.add_task(text, total=total)
            if not self._console.is_terminal:
                self._console.print(f"{text} …", highlight=False)
        self._rich.update(self._tasks[stage], completed=done, total=total)
