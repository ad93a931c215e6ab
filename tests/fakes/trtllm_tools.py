"""Stand-ins for the programs of the NGC image, which run on no machine without a GPU: `trtllm-build`, and the library.

`trtllm-build` here reads its real flags, refuses unknown ones, and writes the config.json and rank files that the real
one would. FAKE_BUILD makes it misbehave: `fail`, `wrong`, `empty` or `hang:<fifo>`.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

_BUILD = """#!{python}
import argparse, json, os, pathlib, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("checkpoint_dir", "output_dir", "kv_cache_type", "remove_input_padding", "use_paged_context_fmha",
             "gemm_plugin", "gpt_attention_plugin", "lora_plugin"):
    parser.add_argument("--" + name, required=True)
for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "max_lora_rank",
             "workers"):
    parser.add_argument("--" + name, type=int, required=True)
parser.add_argument("--lora_target_modules", nargs="+", required=True)
flags = parser.parse_args()
mode = os.environ.get("FAKE_BUILD", "")
out = pathlib.Path(flags.output_dir)
out.mkdir()
print("building", flush=True)
if mode == "fail":
    (out / "rank0.engine").write_bytes(b"half")
    sys.exit("[TRT] out of memory")
if mode == "empty":
    sys.exit(0)
if mode.startswith("hang:"):
    child = subprocess.Popen(["sleep", "600"])
    with open(mode[5:], "w") as fifo:
        fifo.write(str(child.pid))
    child.wait()
pretrained = json.loads((pathlib.Path(flags.checkpoint_dir) / "config.json").read_text())
for rank in range(pretrained["mapping"]["world_size"]):
    (out / f"rank{{rank}}.engine").write_bytes(b"engine")
build = dict(vars(flags), kv_cache_type=flags.kv_cache_type.upper())
build["plugin_config"] = dict(lora_plugin=flags.lora_plugin, dtype=pretrained["dtype"])
rank = flags.max_lora_rank // 2 if mode == "wrong" else flags.max_lora_rank
build["lora_config"] = dict(lora_dir=[], max_lora_rank=rank, lora_target_modules=flags.lora_target_modules)
config = dict(version="1.2.1", pretrained_config=pretrained, build_config=build)
(out / "config.json").write_text(json.dumps(config))
"""

_LIBRARY = {
    "tensorrt_llm/__init__.py": "",
    "tensorrt_llm/mapping.py": """
class Mapping:
    def __init__(self, world_size=1, rank=0, tp_size=1, pp_size=1):
        self.world_size, self.rank, self.tp_size, self.pp_size = world_size, rank, tp_size, pp_size
""",
    "tensorrt_llm/models/__init__.py": """
import json, pathlib
class Model:
    @classmethod
    def from_hugging_face(cls, folder, dtype="auto", mapping=None, quant_config=None):
        model = cls()
        model.base = json.loads((pathlib.Path(folder) / "config.json").read_text())
        model.dtype, model.mapping, model.quant = dtype, mapping, quant_config
        return model
    @classmethod
    def quantize(cls, folder, out, dtype="auto", mapping=None, quant_config=None):
        for rank in range(mapping.world_size):
            mapping.rank = rank
            cls.from_hugging_face(folder, dtype, mapping, quant_config).save_checkpoint(out, save_config=rank == 0)
    def save_checkpoint(self, out, save_config=True):
        out, base, mapping = pathlib.Path(out), self.base, self.mapping
        (out / f"rank{mapping.rank}.safetensors").write_bytes(b"weights")
        if save_config:
            names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads")
            config = {name: base[name] for name in names}
            config |= {"architecture": base["architectures"][0], "dtype": self.dtype, "head_size": base["head_dim"],
                       "mapping": {name: getattr(mapping, name) for name in ("world_size", "tp_size", "pp_size")},
                       "quantization": vars(self.quant)}
            (out / "config.json").write_text(json.dumps(config))
MODEL_MAP = dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"), Model)
""",
    "tensorrt_llm/models/modeling_utils.py": """
class QuantConfig:
    def __init__(self, quant_algo=None, kv_cache_quant_algo=None):
        self.quant_algo, self.kv_cache_quant_algo = quant_algo, kv_cache_quant_algo
""",
}


def install(folder: Path, **more: str) -> Mapping[str, str]:
    """Write the stand-ins to a folder; the environment in which they are found."""
    for name, text in _LIBRARY.items():
        file = folder / "library" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    program = folder / "bin" / "trtllm-build"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(_BUILD.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(folder / "library"), **more}
