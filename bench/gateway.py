"""What the gateway costs: CPU of its process per streamed token, and many streams at once without a leak.

    python bench/gateway.py [--streams 1 8 64] [--tokens 200] [--soak 500] [--waves 6]

A real Triton with a tiny random Llama and one adapter, so that tokens come fast; the gateway as a process of its own;
the client is plain sockets in one event loop. Per number of streams: CPU of the gateway per token (user and system, all
threads), the same of a process that only reads the streams from Triton, which is what gRPC costs us, and tokens
a second. The soak opens that many streams at once in waves, half of whose clients leave early, and prints the gateway's
memory after every wave, its open files, and the leases and cache places that are still taken at the end: none may be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fakes.bundles import small_bundle

from adapter_slots.registry import publish
from lora_slots.base_model import make_tiny_llama
from lora_slots.client import Client
from lora_slots.embedded import Prepared, running
from reference_engine.engine_dir import build_engine

PROMPT = list(range(30, 60))
ROUNDS = 3
READER = """
import asyncio, sys, time
import uvloop
from lora_slots.gateway.door import Door
url, streams, tokens, rounds = sys.argv[1], *map(int, sys.argv[2:])
async def one(door):
    values = {"request_output_len": tokens, "runtime_top_k": 1}
    prompt = list(range(30, 60))
    async for piece in door.generate(prompt, values, {}, request_id="b", task_id=None, streaming=True):
        pass
async def main():
    door = Door(url)
    await asyncio.gather(*(one(door) for _ in range(streams)))
    began = time.process_time()
    for _ in range(rounds):
        await asyncio.gather(*(one(door) for _ in range(streams)))
    print((time.process_time() - began) / (rounds * streams * tokens) * 1e6)
    await door.close()
uvloop.run(main())
"""


@contextmanager
def gateway(url: str) -> Iterator[tuple[int, int]]:
    """A gateway process: its port and process id."""
    command = [sys.executable, "-c", "from lora_slots.cli import main; main()", "gateway", "--url", url]
    ports = ["--port", "0", "--admin-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(found for line in process.stdout if (found := re.search(r"http://[^:]+:(\d+)/v1", line)))
            yield int(found[1]), process.pid
        finally:
            process.terminate()


def cpu_s(pid: int) -> float:
    """Seconds a process has had a CPU, all its threads."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def stream(port: int, tokens: int, leave_after: int | None = None) -> int:
    """One streamed completion; returns the events that carried text. Leaves after some events if it is told to."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    asked = {"model": "bench", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    # a model of random weights would make bytes of no text; one letter over and over is text in every token
    body = json.dumps({**asked, "ignore_eos": True, "logit_bias": {"40": 100}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    count, end = 0, b""
    try:
        while b"[DONE]" not in end:
            chunk = await reader.read(2**16)
            if not chunk:
                raise RuntimeError("the stream broke off")
            count += chunk.count(b"data: ")
            end = end[-16:] + chunk
            if leave_after is not None and count >= leave_after:
                return count
    finally:
        writer.close()
    return count - 2  # the reason, and [DONE]


async def measure(port: int, pid: int, streams: int, tokens: int) -> tuple[float, float]:
    """CPU microseconds per token, and tokens a second; the best of some rounds, since others use the machine too."""
    await asyncio.gather(*(stream(port, 8) for _ in range(min(streams, 8))))
    costs, speeds = [], []
    for _ in range(ROUNDS):
        cpu, began = cpu_s(pid), time.perf_counter()
        counts = await asyncio.gather(*(stream(port, tokens) for _ in range(streams)))
        assert sum(counts) == streams * tokens, "an event a token"
        costs.append((cpu_s(pid) - cpu) / (streams * tokens) * 1e6)
        speeds.append(streams * tokens / (time.perf_counter() - began))
    return min(costs), max(speeds)


async def soak(port: int, pid: int, url: str, streams: int, waves: int, tokens: int) -> None:
    """Waves of many streams, half of which are left early."""
    print(f"{'wave':>8} {'seconds':>10} {'memory MB':>10} {'open files':>10}")
    for wave in range(waves):
        began = time.perf_counter()
        leaving = [5 if i % 2 else None for i in range(streams)]
        await asyncio.gather(*(stream(port, tokens, leave) for leave in leaving))
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        seconds = time.perf_counter() - began
        print(f"{wave + 1:>8} {seconds:>10.1f} {resident_mb(pid):>10.1f} {files:>10}", flush=True)
    with Client(url) as client:
        for _ in range(100):
            states = client.operate("status")["adapters"]
            left = sum(one["leases"] + one["waiting"] for one in states)
            if not left:
                break
            await asyncio.sleep(0.1)
        print(f"leases left: {left}")


def main() -> None:
    """Start everything, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--soak", type=int, default=500, help="streams at once; 0: none")
    parser.add_argument("--waves", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        base = make_tiny_llama(home / "base", seed=1)
        engine = build_engine(base, home / "engine", max_lora_rank=8, max_seq_len=512, max_batch_size=64)
        publish(home / "adapters.yaml", small_bundle(home / "bundles", "bench"))
        prepared = Prepared(base, engine, home / "adapters.yaml")
        with running(prepared) as server, gateway(server.grpc_url) as (port, pid):
            print(f"load {os.getloadavg()[0]:.1f}")
            if options.streams:
                print(f"{'streams':>8} {'gateway us/token':>18} {'reading alone':>14} {'tokens/s':>10}")
            for streams in options.streams:
                numbers = [str(streams), str(options.tokens), str(ROUNDS)]
                alone = subprocess.run(
                    [sys.executable, "-c", READER, server.grpc_url, *numbers],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                cost, speed = asyncio.run(measure(port, pid, streams, options.tokens))
                print(f"{streams:>8} {cost:>18.1f} {float(alone.stdout):>14.1f} {speed:>10.0f}", flush=True)
            if options.soak:
                asyncio.run(soak(port, pid, server.grpc_url, options.soak, options.waves, options.tokens))


if __name__ == "__main__":
    main()
