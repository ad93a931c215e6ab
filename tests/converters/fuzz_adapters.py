"""Fuzz config, header and pickle for a while: `python tests/converters/fuzz_adapters.py --seconds 600`.

Every run goes through `lora-slots convert` itself: whatever the files say, it must return 0, 1 or 2, leave nothing
behind when it refuses, and never raise. The first run that does anything else is written to --keep.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fakes.peft_files import CONFIG, LLAMA, PREFIX, llama_tensors, pair, safetensors_bytes, write_base

from lora_slots.convert_command import main as convert
from peft_to_trtllm.fields import KNOWN

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    4,
    8,
    2**31,
    2**63,
    10**400,
    1e308,
    -1e-308,
    1e-320,
    "",
    "none",
    "all",
    "pissa",
    "q_proj",
    "0.21.2",
    "layers",
    ".*",
    "(a+)+",
    "\ud800",
    [],
    {},
    [1],
    ["q_proj"],
    {"q_proj": 4},
    {"q_proj": 0},
    {"a": {"b": []}},
    [[[]]],
    {"nblocks": 2},
    {"q_proj": 2.5},
    {"(": 1},
    {"a?" * 60: 2},
    "0" * 5000,
]
FIELDS = [*sorted(KNOWN), "unknown_field", "use_new", ""]
WORDS = [
    "base_model",
    "model",
    "layers",
    "0",
    "1",
    "99",
    "self_attn",
    "q_proj",
    "mlp",
    "experts",
    "base_layer",
    "lora_A",
    "lora_B",
    "weight",
    "bias",
    "default",
    "lora_magnitude_vector",
    "lora_embedding_A",
    "h",
    "transformer",
    "visual",
    "",
    "\x00",
    "é",
    "0" * 400,
]
TYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I8", "U8", "BOOL", "F4", None, 3]


FAMILIES: list[Any] = [
    "llama",
    "phi3",
    "gpt2",
    "falcon",
    "chatglm",
    "codegen",
    "mixtral",
    "llama4_text",
    "gpt_oss",
    "deepseek_v3",
    "",
    3,
]


def config(rng: random.Random) -> bytes:
    """A config with a few wild fields, or with wild bytes."""
    made: dict[str, Any] = dict(CONFIG)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        made[rng.choice(FIELDS)] = rng.choice(VALUES)
    text = json.dumps(made).encode()
    return damaged(rng, text) if rng.random() < 0.1 else text


def tensors(rng: random.Random) -> bytes:
    """A safetensors file with wild keys, types, shapes, offsets or bytes."""
    plain = llama_tensors(layers=rng.choice([1, 2]))
    if rng.random() < 0.2:
        a, b = pair(np.random.default_rng(0), 12, *rng.choice([(16, 48), (48, 16), (24, 16), (16, 16)]))
        wrapper = PREFIX + rng.choice(["0.mlp.experts", "0.feed_forward.experts.base_layer", "1.mlp.gate", "0.mlp"])
        plain |= {f"{wrapper}.lora_A.weight": a, f"{wrapper}.lora_B.weight": b}
    good = safetensors_bytes(
        {
            key: array * np.float32(rng.choice([1, 1, 1, 1, 1, 1, 1e30, 1e-30, float("nan")]))
            for key, array in plain.items()
        }
    )
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        name = rng.choice([*header, PREFIX + "0.self_attn.k_proj.lora_A.weight"])
        entry = header.setdefault(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        how = rng.randrange(6) if isinstance(entry, dict) else 0
        if how == 0:
            header[".".join(rng.choices(WORDS, k=rng.randrange(1, 9)))] = header.pop(name)
        elif how == 1:
            entry["dtype"] = rng.choice(TYPES)
        elif how == 2:
            entry["shape"] = [rng.choice([0, 1, 4, 16, 64, -1, 2**60, 1.5, None]) for _ in range(rng.randrange(4))]
        elif how == 3:
            entry["data_offsets"] = [rng.choice([0, 1, 256, 2**40, -1]) for _ in range(rng.randrange(4))]
        elif how == 4:
            entry["shape"] = entry.get("shape", [])[::-1]
        else:
            header[name] = rng.choice(VALUES)
    text = json.dumps(header).encode()
    made = len(text).to_bytes(8, "little") + text + data
    return damaged(rng, made) if rng.random() < 0.2 else made


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut off or put in."""
    made = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(made) + 1)
        how = rng.randrange(4)
        if how == 0:
            made[at : at + 1] = bytes([rng.randrange(256)])
        elif how == 1:
            made[at:at] = rng.randbytes(rng.randrange(9))
        elif how == 2:
            del made[at : at + rng.randrange(1, 20)]
        else:
            del made[at:]
    return bytes(made)


def pickled(rng: random.Random) -> bytes:
    """A zip of torch.save's form around a wild pickle."""
    program = bytearray(b"\x80\x02")
    for _ in range(rng.randrange(1, 60)):
        program += rng.choice(
            [
                b"}",
                b")",
                b"]",
                b"(",
                b"N",
                b"K\x04",
                b"q\x01",
                b"h\x01",
                b"X\x01\x00\x00\x00a",
                b"s",
                b"u",
                b"t",
                b"\x85",
                b"\x86",
                b"\x87",
                b"R",
                b"b",
                b"Q",
                b"e",
                b"\x88",
                b"ctorch._utils\n_rebuild_tensor_v2\n",
                b"ctorch\nFloatStorage\n",
                b"ccollections\nOrderedDict\n",
                b"X\x07\x00\x00\x00storage",
                rng.randbytes(2),
            ]
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", bytes(program + b"."))
        archive.writestr("a/data/0", bytes(64))
    made = buffer.getvalue()
    return damaged(rng, made) if rng.random() < 0.3 else made


def base_config(rng: random.Random) -> dict[str, Any]:
    """A base's config, sometimes with wild sizes or another family."""
    made = dict(LLAMA)
    if rng.random() < 0.3:
        made[rng.choice([*made, "head_dim", "num_local_experts", "text_config", "layer_types", "kv_lora_rank"])] = (
            rng.choice(VALUES)
        )
        made["model_type"] = rng.choice(FAMILIES)
    return made


def one(rng: random.Random, folder: Path, statuses: Counter[int]) -> str | None:
    """One run; what went wrong, or None."""
    shutil.rmtree(folder, ignore_errors=True)
    adapter = folder / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_bytes(config(rng))
    if rng.random() < 0.2:
        (adapter / "adapter_model.bin").write_bytes(pickled(rng))
    else:
        (adapter / "adapter_model.safetensors").write_bytes(tensors(rng))
    write_base(folder / "base", base_config(rng))
    arguments = [str(adapter), "--dtype", rng.choice(["float32", "float16", "bfloat16"]), "--out", str(folder / "out")]
    if rng.random() < 0.8:
        arguments += ["--base", str(folder / "base")]
    if rng.random() < 0.2:
        arguments += ["--fused", rng.choice(["attn_qkv", "mlp_gate_up"]), "--tp", rng.choice(["1", "2", "3"])]
    sink = io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            status = convert(arguments)
    except (Exception, SystemExit):  # noqa: BLE001 - whatever it is, it is the find
        return traceback.format_exc()
    if status not in (0, 1, 2) or (status and (folder / "out").exists()):
        return f"exit status {status}, {sink.getvalue()}"
    statuses[status] += 1
    return None


def main() -> None:
    """Fuzz until the time is over or something is found."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--keep", type=Path, default=Path("fuzz-find"))
    arguments = options.parse_args()
    end, runs, statuses = time.monotonic() + arguments.seconds, 0, Counter[int]()
    with tempfile.TemporaryDirectory() as root:
        while time.monotonic() < end:
            wrong = one(random.Random(arguments.seed + runs), Path(root) / "run", statuses)
            runs += 1
            if wrong:
                shutil.copytree(Path(root) / "run", arguments.keep, dirs_exist_ok=True)
                sys.exit(f"run {runs - 1} (seed {arguments.seed + runs - 1}), files in {arguments.keep}:\n{wrong}")
    counts = ", ".join(f"{count} times exit {status}" for status, count in sorted(statuses.items()))
    sys.stdout.write(f"{runs} runs in {arguments.seconds:.0f} s, {counts}: no traceback, nothing left behind\n")


if __name__ == "__main__":
    main()
