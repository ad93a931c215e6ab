"""PEFT's mixed batch (`adapter_names`) on transformers, float32. Job file in, `RESULT` line out."""

import json
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

job = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(job["threads"])
plain = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32).eval()
model = PeftModel.from_pretrained(plain, job["adapters"][0], adapter_name="a0").eval()
for number, folder in enumerate(job["adapters"][1:], start=1):
    model.load_adapter(folder, adapter_name=f"a{number}")


def rate(adapters: int, streams: int, tokens: int) -> float:
    """Tokens per second over the whole generation."""
    ids = torch.tensor(job["prompts"][:streams])
    names = [f"a{i % adapters}" if adapters else "__base__" for i in range(streams)]
    begin = time.perf_counter()
    with torch.no_grad():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            adapter_names=names,
        )
    return streams * tokens / (time.perf_counter() - begin)


results = []
for adapters, streams in job["cells"]:
    rate(adapters, streams, 2)
    results.append([adapters, streams, [rate(adapters, streams, job["tokens"]) for _ in range(job["repeats"])]])
print("RESULT " + json.dumps(results))
