"""How requests to an alias are shared out, counted at the gateway's door.

    python bench/canary.py [--requests 10000] [--share 5]

A real Triton with a tiny random Llama and two adapters behind one alias; every request has a session of its own and is
answered with one token. Prints the share of the canary over all requests, and of a tenth of the sessions, asked once
more, how many were answered by the other adapter: none may be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes.bundles import small_bundle
from fakes.gateways import gateway

from adapter_slots.registry import publish
from adapter_slots.registry_changes import set_alias
from adapter_slots.registry_home import FileHome
from adapter_slots.registry_writing import change
from lora_slots.base_model import make_tiny_llama
from lora_slots.embedded import Prepared, running
from reference_engine.engine_dir import build_engine

CONNECTIONS = 32
BODY = json.dumps({"model": "prod", "prompt": [30, 31, 32], "max_tokens": 1, "temperature": 0}).encode()


async def ask(port: int, sessions: Sequence[int]) -> list[str]:
    """The adapter that answered each session, one after another on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for session in sessions:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"x-session-id: session-{session}\r\ncontent-length: {len(BODY)}\r\n\r\n"
        writer.write(head.encode() + BODY)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(fields["content-length"]))
        assert " 200 " in lines[0], body
        found.append(fields["x-lora-slots-adapter"])
    writer.close()
    return found


async def ask_all(port: int, sessions: Sequence[int]) -> dict[int, str]:
    """The adapter that answered each session."""
    parts = [sessions[i::CONNECTIONS] for i in range(CONNECTIONS)]
    answers = await asyncio.gather(*(ask(port, part) for part in parts))
    return {
        session: name
        for part, names in zip(parts, answers, strict=True)
        for session, name in zip(part, names, strict=True)
    }


def main() -> None:
    """Serve, ask, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=5.0, help="per cent of the canary")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = make_tiny_llama(folder / "base", seed=1)
        engine = build_engine(base, folder / "engine", dtype="float32", max_lora_rank=8, max_batch_size=CONNECTIONS)
        registry = folder / "adapters.yaml"
        for seed, adapter in enumerate(("stable", "canary")):
            publish(registry, small_bundle(folder / "bundles", adapter, seed), adapter)
        shares = {"stable": 100 - given.share, "canary": given.share}
        change(FileHome(registry), "bench", lambda doc: set_alias(doc, "prod", shares))
        with running(Prepared(base, engine, registry)) as server, gateway(server.grpc_url, folder / "log") as door:
            port = int(door.url.rpartition(":")[2])
            began = time.perf_counter()
            answered = asyncio.run(ask_all(port, range(given.requests)))
            seconds = time.perf_counter() - began
            again = asyncio.run(ask_all(port, range(0, given.requests, 10)))
    share = sum(name.startswith("canary@") for name in answered.values()) / given.requests * 100
    moved = sum(answered[session] != name for session, name in again.items())
    print(f"{given.requests} requests in {seconds:.1f} s: {share:.2f} % to the canary, {given.share:g} % were meant")
    print(f"{len(again)} sessions again: {moved} answered by the other adapter")


if __name__ == "__main__":
    main()
