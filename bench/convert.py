"""How fast a conversion is: `python bench/convert.py [--runs 9] [--case small|large]`.

Two adapters of Llama-3-8B's shapes, made from seeded random numbers:

    small   rank 16, q k v o, float16      27 MB ->  34 MB
    large   rank 64, all seven, bfloat16  336 MB -> 529 MB

Each is converted by `lora-slots convert` and by the usual torch script, retold here from the layout rules: load with
safetensors.torch, multiply B by the scale, flatten, pad to the widest row, stack, numpy.save. Whole processes are
measured from outside with their peak memory, warm page cache; then the conversion inside a process against its floor:
reading the input into one buffer, writing as many bytes as the output has, and fsync. The torch script does not fsync;
ours always does, and it also hashes input and output (rule B3 of the bundle format): what sha256 alone takes for these
bytes, on one thread and shared by two, is printed beside.

Whatever is compared takes turns within one run, and every figure is the median of all turns. Load averages are those
of the machine before and after.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

COMMAND = str(Path(sys.executable).parent / "lora-slots")

HIDDEN, KV, INTER, LAYERS = 4096, 1024, 14336, 32
DIMS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, KV), "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTER), "mlp.up_proj": (HIDDEN, INTER), "mlp.down_proj": (INTER, HIDDEN),
}  # fmt: skip
BASE = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip

TORCH_SCRIPT = textwrap.dedent(
    """
    import json, sys, time
    import numpy as np
    import torch
    from safetensors.torch import load_file

    IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
    adapter, out, dtype = sys.argv[1:4]
    torch.set_num_threads(int(sys.argv[4]) if len(sys.argv) > 4 else 1)
    begin = time.perf_counter()
    config = json.load(open(adapter + "/adapter_config.json"))
    tensors = load_file(adapter + "/adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    to = getattr(torch, dtype)
    rows, table = [], []
    for key in tensors:
        if ".lora_A." not in key:
            continue
        parts = key.split(".")
        a = tensors[key]
        b = tensors[key.replace("lora_A", "lora_B")] * scale
        rows.append(torch.concatenate([a.contiguous().flatten().to(to), b.contiguous().flatten().to(to)]))
        table.append([IDS[parts[-3]], int(parts[parts.index("layers") + 1]), a.shape[0]])
    widest = max(row.shape[0] for row in rows)
    rows = [torch.nn.functional.pad(row, (0, widest - row.shape[0])) for row in rows]
    weights = torch.stack(rows).unsqueeze(0)
    if to is torch.bfloat16:
        weights = weights.view(torch.int16).numpy().view("V2")
    else:
        weights = weights.numpy()
    np.save(out + "/model.lora_weights.npy", weights)
    np.save(out + "/model.lora_config.npy", np.array([table], dtype=np.int32))
    print(time.perf_counter() - begin)
    """
)


@dataclass(frozen=True)
class Case:
    """One adapter and what is asked of its conversion."""

    name: str
    rank: int
    modules: tuple[str, ...]
    dtype: str
    times_faster: float
    rss_of_output: float


CASES = (
    Case("small", 16, tuple(DIMS)[:4], "float16", 10, 2.0),
    Case("large", 64, tuple(DIMS), "bfloat16", 8, 0.7),
)


def make_adapter(case: Case, folder: Path) -> float:
    """Write a PEFT adapter of the case, and the base's config.json beside it."""
    folder.mkdir()
    rng = np.random.default_rng(7)
    header, blobs, at = {}, [], 0
    for layer in range(LAYERS):
        for module in case.modules:
            d_in, d_out = DIMS[module]
            for letter, shape in (("A", (case.rank, d_in)), ("B", (d_out, case.rank))):
                values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
                halves = values.astype(np.float16).view(np.uint16)
                bits = values.view(np.uint32) >> 16 if case.dtype == "bfloat16" else halves
                blob = bits.astype(np.uint16).tobytes()
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{letter}.weight"
                kind = "BF16" if case.dtype == "bfloat16" else "F16"
                header[key] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(blob)]}
                at += len(blob)
                blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(blobs)
    config = {"peft_type": "LORA", "r": case.rank, "lora_alpha": 2 * case.rank, "target_modules": list(case.modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder.parent / "base.json").write_text(json.dumps(BASE))
    return 0.0


@dataclass
class Run:
    """What one process took."""

    seconds: float
    rss_bytes: int
    text: str


def run_process(arguments: list[str], out: Path) -> Run:
    """Run one process to its end with an empty `out`, and measure it from outside."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    printed = out.parent / "printed"
    begin = time.perf_counter()
    with printed.open("wb") as sink:
        child = os.posix_spawn(
            arguments[0], arguments, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, sink.fileno(), 1)]
        )
        _, status, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{arguments[0]}: exit status {os.waitstatus_to_exitcode(status)}")
    return Run(seconds, usage.ru_maxrss * 1024, printed.read_text())


def floor(source: Path, size: int, target: Path, *, sync: bool) -> float:
    """Seconds to read the input into one buffer and write as many bytes as the output has."""
    begin = time.perf_counter()
    data = source.read_bytes()
    with target.open("wb", buffering=0) as sink:
        done = 0
        while done < size:
            done += sink.write(memoryview(data)[: size - done])
        if sync:
            os.fsync(sink.fileno())
    seconds = time.perf_counter() - begin
    target.unlink()
    return seconds


def in_process(adapter: Path, base: Path, out: Path, dtype: str) -> float:
    """Seconds of `peft_to_trtllm.convert`, imports done."""
    from peft_to_trtllm import convert

    shutil.rmtree(out, ignore_errors=True)
    begin = time.perf_counter()
    convert(adapter, base=base, out=out, dtype=dtype)
    return time.perf_counter() - begin


def apart(work: Callable[[], float]) -> float:
    """Run work in a forked child: what it took of memory must not be counted to processes started later."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, repr(work()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:  # noqa: PTH123 - a descriptor, no path
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("a forked measurement failed; its error is above")
    return float(text)


def three_times(call: Callable[[], float]) -> float:
    """The median of three, as the work of a program that is running."""
    return median(call() for _ in range(3))


def turns(runs: int, *calls: Callable[[], float]) -> list[float]:
    """The median of `runs` rounds for each call; they take turns, so that a busy machine is unfair to none."""
    times = [[apart(partial(three_times, call)) for call in calls] for _ in range(runs)]
    return [median(column) for column in zip(*times, strict=True)]


def hashing(size: int, threads: int) -> float:
    """Seconds sha256 takes for `size` bytes, shared by this many threads."""
    block = memoryview(bytes(1 << 20))

    def work() -> None:
        digest = hashlib.sha256()
        for _ in range(size // len(block) // threads):
            digest.update(block)

    begin = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin


def help_seconds(runs: int, folder: Path) -> float:
    """Seconds of `lora-slots convert --help`, whole process."""
    return median(run_process([COMMAND, "convert", "--help"], folder / "help").seconds for _ in range(runs))


def whole_processes(case: Case, runs: int, folder: Path) -> tuple[list[Run], list[Run], int]:
    """(ours, the torch script's, bytes of our output) of processes that take turns."""
    adapter, base, out, script = folder / "adapter", folder / "base.json", folder / "out", folder / "usual.py"
    script.write_text(TORCH_SCRIPT)
    ours = [COMMAND, "convert", str(adapter), "--base", str(base), "--out", str(out), "--dtype", case.dtype]
    theirs = [sys.executable, str(script), str(adapter), str(out), case.dtype]
    run_process(ours, out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    pairs = [(run_process(ours, out), run_process(theirs, out)) for _ in range(runs)]
    return [a for a, _ in pairs], [b for _, b in pairs], size


def measure(case: Case, runs: int, folder: Path) -> None:
    """Measure one case and print its table."""
    adapter, base = folder / "adapter", folder / "base.json"
    apart(lambda: make_adapter(case, adapter))
    source = adapter / "adapter_model.safetensors"
    ours, theirs, size = whole_processes(case, runs, folder)
    a, b = (median(run.seconds for run in column) for column in (ours, theirs))
    rss, their_rss = (max(run.rss_bytes for run in column) for column in (ours, theirs))
    inside, synced, plain, one, two = turns(
        runs,
        lambda: in_process(adapter, base, folder / "out", case.dtype),
        lambda: floor(source, size, folder / "floor", sync=True),
        lambda: floor(source, size, folder / "floor", sync=False),
        lambda: hashing(source.stat().st_size + size, 1),
        lambda: hashing(source.stat().st_size + size, 2),
    )
    torch_inside = median(float(run.text) for run in theirs)
    print(
        f"\n{case.name}: rank {case.rank}, {len(case.modules)} modules, {case.dtype}, "
        f"{source.stat().st_size / 1e6:.1f} -> {size / 1e6:.1f} MB, medians of {runs}"
    )
    print(
        f"  whole process   ours {a:.3f} s   torch script {b:.3f} s   "
        f"{b / a:.1f}x faster (goal {case.times_faster:.0f}x)"
    )
    print(
        f"  peak memory     ours {rss / 1e6:.0f} MB   torch script {their_rss / 1e6:.0f} MB   "
        f"{rss / size:.2f}x the output (goal {case.rss_of_output}x)"
    )
    print(
        f"  in process      ours {inside:.3f} s   floor {synced:.3f} s with fsync, {plain:.3f} s without   "
        f"torch script {torch_inside:.3f} s   {inside / synced:.2f}x the floor (goal 1.3x)"
    )
    print(f"  sha256 alone    {one:.3f} s on one thread, {two:.3f} s shared by two")


def main() -> None:
    """Measure the cases asked for."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--case", choices=[case.name for case in CASES])
    arguments = options.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode
    print("load average", *(f"{load:.1f}" for load in os.getloadavg()))
    with tempfile.TemporaryDirectory(prefix="bench-convert-") as folder:
        print(f"convert --help  {help_seconds(arguments.runs, Path(folder)):.3f} s (goal 0.3 s)")
    for case in CASES:
        if arguments.case in (None, case.name):
            with tempfile.TemporaryDirectory(prefix="bench-convert-") as folder:
                measure(case, arguments.runs, Path(folder))
    print("\nload average", *(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
