"""Keeps an embedded stack answering: what Triton does not do for a Python model that dies.

Triton never restarts a dead stub, and stays "ready" without it. So: look at the stubs, and ask for one real token now
and then; load a model that died anew; if it was the engine, tell the slot manager that all slots are in doubt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lora_slots.client import ONCE, ROUTER, Client
from lora_slots.errors import ServerError
from lora_slots.stack import StubDied, TritonServer

ENGINE = "tensorrt_llm"
LOOK_S = 0.5
INFERENCE_S = 10.0
INFERENCE_TIMEOUT_S = 30.0


def supervise(
    server: TritonServer,
    say: Callable[[str], None],
    *,
    stop: threading.Event | None = None,
    inference_s: float = INFERENCE_S,
) -> None:
    """Watch a server started with `control_models`, until `stop` is set (None: for ever) or it cannot be healed.

    Raises:
        ServerDied: the server itself ended. StackError: a model that died cannot be loaded again.
    """
    stop = stop or threading.Event()
    next_inference = time.monotonic() + inference_s
    while not stop.is_set():
        try:
            server.wait(LOOK_S)
        except StubDied as death:
            for model in death.models:
                say(f"{model} died; loading it again")
                server.reload(model)
                after_reload(server, model)
            continue
        if time.monotonic() >= next_inference:
            next_inference = time.monotonic() + inference_s
            if not answers(server.grpc_url):
                say("the engine does not answer a one-token request; loading it again")
                server.reload(ENGINE)
                after_reload(server, ENGINE)


def answers(url: str) -> bool:
    """Whether the ensemble gives one token of the base model in time."""
    got = threading.Event()

    def ask() -> None:
        try:
            with Client(url, retry=ONCE) as client:
                client.generate("x", max_tokens=1)
            got.set()
        except ServerError:
            return

    threading.Thread(target=ask, daemon=True).start()
    return got.wait(INFERENCE_TIMEOUT_S)


def after_reload(server: TritonServer, model: str) -> None:
    """A new engine holds no adapter: have the slot manager look at every slot at once."""
    if model == ROUTER:
        return
    try:
        with Client(server.grpc_url, retry=ONCE) as client:
            client.operate("verify")
    except ServerError:
        return  # the slot manager is down itself; it starts with nothing in slots
