"""Load on a real stack with more adapters than slots: every answer checked, waits and memory watched."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakes.fleet import MAX_TOKENS, PROMPT, Member
from lora_slots.client import ONCE, Client
from lora_slots.errors import ServerError
from lora_slots.stack import TritonServer
from lora_slots.text import Tokenizer


@dataclass
class Outcome:
    """What a soak saw."""

    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    """Seconds of whole requests, in order of their ends."""
    resident_mb: list[float] = field(default_factory=list)
    """Memory of the router's and the engine's processes together, sampled."""


def soak(
    server: TritonServer,
    fleet: Sequence[Member],
    tokenizer: Tokenizer,
    *,
    seconds: float,
    clients: int,
    zipf: bool,
    seed: int = 1,
) -> Outcome:
    """Let clients ask random adapters for a while; popularity by Zipf (s = 1.1) or uniform."""
    outcome, lock, until = Outcome(), threading.Lock(), time.monotonic() + seconds
    weights = [1 / (i + 1) ** 1.1 if zipf else 1.0 for i in range(len(fleet))]
    wanted = {member.name: tokenizer.decode(list(member.tokens)) for member in fleet}

    def client(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        with Client(server.grpc_url, retry=ONCE) as connection:  # every error shall be seen
            while time.monotonic() < until:
                member = chance.choices(fleet, weights)[0]
                began = time.monotonic()
                try:
                    pieces = connection.stream(PROMPT, adapter=member.name, max_tokens=MAX_TOKENS, end_id=-1)
                    text = "".join(pieces)
                except ServerError as error:
                    with lock:
                        outcome.errors[f"{error.code} {error}"[:160]] += 1
                    continue
                with lock:
                    outcome.requests += 1
                    outcome.waits_s.append(time.monotonic() - began)
                    if text != wanted[member.name]:
                        outcome.wrong.append(f"{member.name}: {text!r}")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        outcome.resident_mb.append(resident_mb(server))
        threads[0].join(timeout=2)
        for thread in threads:
            thread.join(timeout=0.01)
    return outcome


def resident_mb(server: TritonServer) -> float:
    """Megabytes of the Python models' processes."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(server.pid):
                status = (folder / "status").read_text()
                total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        except (OSError, StopIteration):
            continue
    return total / 1024
