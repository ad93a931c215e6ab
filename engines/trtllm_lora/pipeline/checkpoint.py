"""Checkpoint conversion, run inside the NGC image: Hugging Face directory -> TensorRT-LLM checkpoint.

    python3 -m trtllm_lora.pipeline.checkpoint --model-dir BASE --output-dir OUT --dtype float16 --tp 1 --pp 1 …

It is what `examples/models/core/*/convert_checkpoint.py` does, through the library's own classes (`MODEL_MAP`), so that
it does not hang on where an image keeps its examples. Weight-only types are converted; fp8 and AWQ are calibrated by
`quantize`, which needs the GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_lora.pipeline.steps import rope_problem
from trtllm_lora.profile import KV_ALGOS, QUANT_ALGOS
from trtllm_lora.shape import read_json

CALIBRATED = ("fp8", "int4_awq")


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns the exit status. Needs `tensorrt_llm` 1.0 to 1.2."""
    options = _parser().parse_args(arguments)
    config = read_json(options.model_dir / "config.json")
    architecture = config["architectures"][0]
    if rope := rope_problem(config):  # a base that was fetched is seen here first
        sys.stderr.write(f"{options.model_dir / 'config.json'}: {rope}\n")
        return 2
    try:
        from tensorrt_llm.mapping import Mapping as RankMapping
        from tensorrt_llm.models import MODEL_MAP
        from tensorrt_llm.models.modeling_utils import QuantConfig
    except ImportError as error:
        sys.stderr.write(f"{error}: run this inside the NGC image that the profile names (engine.container)\n")
        return 2
    model = MODEL_MAP.get(architecture)
    if model is None:
        sys.stderr.write(f"{architecture} is no model of this TensorRT-LLM; it has {', '.join(sorted(MODEL_MAP))}\n")
        return 2
    quant = QuantConfig(
        quant_algo=QUANT_ALGOS[options.quantization], kv_cache_quant_algo=KV_ALGOS[options.kv_cache_dtype]
    )
    world = options.tp * options.pp
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.quantization in CALIBRATED or options.kv_cache_dtype != "auto":
        mapping = RankMapping(world_size=world, tp_size=options.tp, pp_size=options.pp)
        model.quantize(
            str(options.model_dir), str(options.output_dir), dtype=options.dtype, mapping=mapping, quant_config=quant
        )
        return 0
    for rank in range(world):
        mapping = RankMapping(world_size=world, rank=rank, tp_size=options.tp, pp_size=options.pp)
        _say(f"rank {rank} of {world}: reading {options.model_dir}")
        loaded: Any = model.from_hugging_face(
            str(options.model_dir), options.dtype, mapping=mapping, quant_config=quant
        )
        loaded.save_checkpoint(str(options.output_dir), save_config=rank == 0)
        _say(f"rank {rank} of {world}: written to {options.output_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trtllm_lora.pipeline.checkpoint", allow_abbrev=False)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--quantization", choices=tuple(QUANT_ALGOS), default="none")
    parser.add_argument("--kv-cache-dtype", choices=tuple(KV_ALGOS), default="auto")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
