"""OpenVINO GenAI from the base's GGUF file (4-bit weights), the base only: it does not mix adapters in a batch."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai

job = json.loads(Path(sys.argv[1]).read_text())
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, 16, 256
pipeline = openvino_genai.LLMPipeline(
    job["gguf"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=job["threads"], enable_save_ov_model=False
)


def rate(streams: int, tokens: int) -> float:
    """Tokens per second over the whole generation."""
    ids = np.array(job["prompts"][:streams], np.int64)
    settings = openvino_genai.GenerationConfig()
    settings.max_new_tokens = settings.min_new_tokens = tokens
    settings.ignore_eos, settings.do_sample = True, False
    begin = time.perf_counter()
    pipeline.generate(openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), settings)
    return streams * tokens / (time.perf_counter() - begin)


results = []
for adapters, streams in job["cells"]:
    if adapters == 0:
        rate(streams, 2)
        results.append([0, streams, [rate(streams, job["tokens"]) for _ in range(job["repeats"])]])
print("RESULT " + json.dumps(results))
