"""One prompt answered side by side by the base and each adapter, as the answers stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from lora_slots import examples
from lora_slots.client import Client

BASE = "base"


@dataclass
class Answer:
    """One model's answer as far as it has come. Times in seconds from the question."""

    name: str
    text: str = ""
    first_piece_s: float | None = None
    total_s: float | None = None
    pieces: int = 0
    error: Exception | None = field(default=None, repr=False)

    @property
    def headline(self) -> str:
        """Name and times."""
        if self.error is not None:
            return f"{self.name} failed"
        if self.first_piece_s is None or self.total_s is None:
            return self.name
        return f"{self.name} · first {self.first_piece_s:.2f} s · {self.pieces / max(self.total_s, 1e-9):.0f} tokens/s"


def ask(url: str, prompt: str, adapters: Sequence[str], *, max_tokens: int, console: Console) -> list[Answer]:
    """Ask the base and each adapter at the same time, and show the answers while they come.

    `prompt` is finished text (chat template applied). Errors are kept in the answers.
    """
    answers = [Answer(BASE), *(Answer(name) for name in adapters)]
    threads = [
        threading.Thread(target=_stream, args=(url, prompt, answer, max_tokens), daemon=True) for answer in answers
    ]
    for thread in threads:
        thread.start()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=12) as live:
            while any(thread.is_alive() for thread in threads):
                live.update(_panels(answers, console.width))
                time.sleep(0.05)  # the picture's frame rate, nothing waits for it
            live.update(_panels(answers, console.width))
    else:
        for line in _lines(threads, answers):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return answers


def failures(answers: Sequence[Answer]) -> list[str]:
    """The answers that did not come, and why."""
    return [f"{answer.name}: {answer.error}" for answer in answers if answer.error is not None]


def style_problems(answers: Sequence[Answer], examples_among: Collection[str]) -> list[str]:
    """What is wrong with the answers that came: an empty one, an example adapter not in its style, the base in one."""
    styles, problems = examples.styles(), []
    for answer in answers:
        if answer.error is not None:
            continue
        if not answer.text.strip():
            problems.append(f"{answer.name}: an empty answer")
        elif answer.name == BASE:
            like = [style for style in styles.STYLES if styles.looks_right(style, answer.text)]
            problems += [f"the base answers like {style}: {answer.text!r}" for style in like]
        elif answer.name in examples_among and not styles.looks_right(answer.name, answer.text):
            problems.append(f"{answer.name} does not answer in its style: {answer.text!r}")
    return problems


def _stream(url: str, prompt: str, answer: Answer, max_tokens: int) -> None:
    started = time.monotonic()
    try:
        with Client(url) as client:
            adapter = None if answer.name == BASE else answer.name
            for piece in client.stream(prompt, adapter=adapter, max_tokens=max_tokens):
                answer.text += piece
                answer.pieces += 1
                if answer.first_piece_s is None:
                    answer.first_piece_s = time.monotonic() - started
    except Exception as error:  # noqa: BLE001 - shown in the answer's place
        answer.error = error
    answer.total_s = time.monotonic() - started


def _panels(answers: Sequence[Answer], width: int) -> Columns:
    room = max(24, width // len(answers) - 2) if width >= 28 * len(answers) else width - 2
    return Columns(
        [Panel(Text(str(a.error) if a.error else a.text), title=a.headline, width=room) for a in answers], padding=0
    )


def _lines(threads: Sequence[threading.Thread], answers: Sequence[Answer]) -> Iterator[str]:
    """Without a terminal: each answer as it ends."""
    for thread, answer in zip(threads, answers, strict=True):
        thread.join()
        yield f"[{answer.headline}]"
        yield str(answer.error) if answer.error else answer.text.strip()
        yield ""
