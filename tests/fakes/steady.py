"""Somebody else: a client that asks a resident adapter again and again, and whom no fault of another may touch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from lora_slots.client import Client
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer

PAUSE_S = 0.2
"""Between two questions: others want the processors too."""


class Steady:
    """Asks for as long as the block runs; leaving it fails unless there was an answer, and every one was right."""

    def __init__(self, server: TritonServer, answer: dict[str, Any]) -> None:
        """`answer` has adapter, text_input and text."""
        self._server, self._answer = server, answer
        self._stop = threading.Event()
        self._right = 0
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._ask()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            assert not self._wrong, self._wrong
            assert self._right > 1

    def _run(self) -> None:
        while not (self._stop.wait(PAUSE_S) and self._right > 1) and not self._wrong:
            self._ask()

    def _ask(self) -> None:
        try:
            text = ask(self._server, self._answer)
        except ServerError as error:
            self._wrong.append(str(error))
            return
        self._right += text == self._answer["text"]
        self._wrong += [] if text == self._answer["text"] else [text]


def ask(server: TritonServer, answer: dict[str, Any]) -> str:
    """The adapter's answer now. Raises ServerError."""
    with Client(server.grpc_url) as client:
        return client.generate(answer["text_input"], adapter=answer["adapter"], max_tokens=answer.get("max_tokens", 64))


def is_right(server: TritonServer, answer: dict[str, Any]) -> bool:
    """Whether it is the one it should be; not while the server refuses."""
    try:
        return bool(ask(server, answer) == answer["text"])
    except ServerError:
        return False


def explain(server: TritonServer, adapter: str) -> dict[str, Any]:
    """What the slot manager tells of an adapter."""
    with Client(server.grpc_url) as client:
        return client.operate("explain", adapter=adapter)


def until(true: Callable[[], bool], *, tries: int = 600, pause_s: float = 0.1) -> None:
    """Wait for what the server's own timer brings about."""
    clock = threading.Event()
    for _ in range(tries):
        if true():
            return
        clock.wait(pause_s)
    raise AssertionError("it did not come about")
