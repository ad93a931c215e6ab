"""The rules of `repo check` by name, each with what goes wrong where it is broken; docs/engines.md is made from them.

Sources are users' threads: B is tensorrtllm_backend, T is TensorRT-LLM.
"""

from __future__ import annotations

RULES: dict[str, str] = {
    # files
    "not-a-config": "a config.pbtxt that Triton's own parser refuses",
    "placeholder": "a `${…}` not filled where Triton wants a number, a type or a backend: the model does not load",
    "placeholder-text": "a `${…}` in a parameter that is read as text, such as a path named `${engine_dir}`",
    "placeholder-default": "(warned of) other parameters that were not filled: their defaults are in force",
    "model-name": "a model named otherwise than its folder: Triton refuses it",
    "no-version": "no version folder: Triton finds nothing to load",
    "no-model-py": "a model of the python backend without a model.py",
    "backend": "a model without a backend, or with one that it cannot have, or a misspelt one",
    "parameter-missing": "a parameter without which a model does not start (`gpt_model_path`, `tokenizer_dir`, …); "
    "warned of where `lora_router` has it empty, and gets it from the environment",
    "no-ensemble": "no ensemble (and no `tensorrt_llm_bls`); warned of where there are no text steps either",
    # tensors of tensorrt_llm, against those of the 1.2 line
    "no-tensorrt-llm": "no model tensorrt_llm, for which ensemble and clients look",
    "renamed-tensor": "an input by the name it had before 1.x (`min_length`, `random_seed`)",
    "tensor-missing": "a tensor of the backend that the config lacks (warned of; an error for `lora_…`, "
    "and for ids, lengths and what is answered)",
    "tensor-type": "a tensor of another type",
    "tensor-dims": "a tensor of other dims",
    "task-id-reshape": "`lora_task_id` without its reshape: the backend gets [1] and extracts no scalar",
    "tensor-optional": "a LoRA input that is not optional: who asks for the base is refused",
    # adapters on the wire
    "lora-pair": "`lora_config` without `lora_weights`",
    "lora-type": "`lora_weights` of another type than the engine: no adapter can be sent (B#403, B#671, T#2434)",
    "lora-numpy": "bfloat16 adapters through a model.py that copies tensors by numpy (B#671)",
    "lora-columns": "`lora_config` with 3 columns in one model and 4 in another",
    "bundle-columns": "`lora_config` with 3 columns, and adapters on disk that have 4, or the other way round (B#750)",
    "bundle-type": "adapters on disk of another type than the engine: every request with one is refused (T#2434)",
    "bundle-config": "adapters on disk whose `lora_config` is not int32 [1, rows, 3 or 4]",
    "bundle-array": "adapters on disk with an array that cannot be read",
    "bundle-size": "adapters on disk above 2 GiB: no gRPC message can carry them (B#718)",
    "zero-task-id": "a warm-up that sends `lora_task_id` 0, which stock clients take for no adapter",
    "warmup-file": "a warm-up whose file for `lora_task_id` is not there: the model does not load",
    # prefetch directories, which fail in silence
    "prefetch-bfloat16": "`lora_prefetch_dir` on a bfloat16 engine: the runtime cannot read such files",
    "prefetch-python": "`lora_prefetch_dir` with NVIDIA's python model, which reads it as a number",
    "prefetch-missing": "a `lora_prefetch_dir` that does not exist: it is passed over in silence (B#718)",
    "prefetch-name": "a folder in it whose name is no task id: it is skipped",
    "prefetch-zero": "a folder in it named 0, which stock clients take for no adapter",
    "prefetch-overflow": "a folder in it with an id above 2³¹ − 1: the engine does not start",
    "prefetch-files": "a folder in it without one of the two arrays",
    "prefetch-array": "an array in it that cannot be read",
    "prefetch-type": "weights in it of another type than the engine: not applied, in silence (B#791)",
    # the engine and its caches
    "engine-unread": "(warned of) an engine that cannot be read from here: what depends on it goes unchecked",
    "engine-version": "an engine of a version that has no engine backend, or other input names",
    "engine-no-lora": "an engine built without LoRA: adapters are answered by the base, in silence",
    "engine-plugin": "an engine whose `lora_plugin` has another type than its dtype: adapters are not applied (B#791)",
    "engine-quantisation": "an engine under SmoothQuant or row-wise FP8, which run no LoRA (T#2603, T#2604)",
    "engine-dense": "an engine with LoRA on `attn_dense` where heads × head_size ≠ hidden_size: rows are cut wrong",
    "batch-size": "(warned of) a `max_batch_size` above the engine's",
    "cache-fraction": "(warned of) no `lora_cache_gpu_memory_fraction`: 0.02 is in force, although the log says 0.05",
    "cache-number": "a cache parameter that is no number (its default is in force), or a share not between 0 and 1",
    "cache-rank": "`lora_cache_max_adapter_size` below the engine's `max_lora_rank`: rows are written past their pages",
    "cache-memory": "a host cache with which the engine does not start (B#559, B#560, T#1562)",
    "cache-mirror": "cache parameters that differ in `lora_router`: the slot manager miscounts the engine's pages",
    # serving
    "batching-v1": "`gpt_model_type` V1, which does not feed LoRA tensors (B#511)",
    "batching-type": "a `gpt_model_type` that the backend does not know",
    "parameter-value": "another parameter with a value that the backend cannot use (`decoding_mode: zzz`)",
    "no-batch": "`tensorrt_llm` with `max_batch_size` 0: its tensors have no batch dimension",
    "not-decoupled": "(warned of; an error beside a model that streams) `tensorrt_llm` not decoupled: no streaming",
    "instances": "several instances of `tensorrt_llm`: each has a LoRA cache of its own, an adapter is in one of them",
    "router-instances": "several instances of `lora_router`: two slot managers for one engine",
    # the ensemble
    "step-model": "a step whose model is not there",
    "step-input": "a step that feeds an input its model does not have",
    "step-source": "a step fed by a name that no input and no earlier step gives",
    "step-types": "a step fed by a tensor of another type: Triton refuses the ensemble",
    "step-decoupled": "a step fed by different decoupled steps, or by one and by something else: Triton refuses it",
    "step-unfed": "a step whose model needs an input that nothing feeds",
    "step-output": "a step that takes an output its model does not have",
    "lora-without-id": "`lora_weights` that reach the engine without `lora_task_id`: the base answers (B#413)",
    "lora-id-lost": "`lora_task_id` that does not reach the engine: every adapter is answered by the base (B#406)",
}
