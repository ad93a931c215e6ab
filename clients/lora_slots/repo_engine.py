"""Rules of `repo check` about the engine that the repository serves, from its config.json.

Sources are users' threads: B is tensorrtllm_backend, T is TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lora_slots.repo_files import Finding, Repository
from trtllm_lora.releases import version_problem

Check = Callable[[Repository], Iterator[Finding]]


def _engine(repository: Repository) -> Iterator[Finding]:
    model, engine = repository.tensorrt_llm, repository.engine
    if model is None or engine is None:
        return
    line = model.line("gpt_model_path")
    old = version_problem(engine.version)
    if old:
        what = f"the engine was built by TensorRT-LLM {engine.version}: {old[0]}"
        yield Finding(model.file, line, "engine-version", what, old[1])
    if not engine.lora_enabled:
        what = "the engine was built without LoRA: requests with a task id are answered by the base, without an error"
        yield Finding(model.file, line, "engine-no-lora", what, "build it with --lora_plugin and --lora_target_modules")
    if model.config.max_batch_size > engine.max_batch_size:
        what = f"max_batch_size {model.config.max_batch_size}, the engine was built for {engine.max_batch_size}"
        fix = f"write {engine.max_batch_size}"
        yield Finding(model.file, model.line_of("max_batch_size"), "batch-size", what, fix, warning=True)


def _silent(repository: Repository) -> Iterator[Finding]:
    """B#791, T#2604: engines with LoRA that answers with the base, or with garbage, and says nothing."""
    model, engine = repository.tensorrt_llm, repository.engine
    if model is None or engine is None or not engine.lora_enabled:
        return
    line = model.line("gpt_model_path")
    if engine.plugin_differs:
        what = (
            f"the engine's lora_plugin is {engine.lora_plugin}, its dtype {engine.dtype}: adapters in the engine's "
            "dtype, which the request check demands, are not applied (B#791)"
        )
        yield Finding(model.file, line, "engine-plugin", what, f"build it with --lora_plugin {engine.dtype}")
    if engine.quantised_without_lora:
        what = f"the engine's quantisation {engine.quant_algo} runs no LoRA (T#2603, T#2604)"
        yield Finding(model.file, line, "engine-quantisation", what, "build it with fp8, int4_awq or none")
    if "attn_dense" in engine.lora_modules and not engine.dense_is_square:
        what = (
            f"the engine takes LoRA on attn_dense, whose input is {engine.num_heads} x {engine.head_size} and not the "
            f"hidden size {engine.hidden_size}: the runtime cuts its rows in the wrong place, without an error"
        )
        fix = "build it without attn_dense, and send no adapter trained on o_proj"
        yield Finding(model.file, line, "engine-dense", what, fix)


CHECKS: tuple[Check, ...] = (_engine, _silent)
