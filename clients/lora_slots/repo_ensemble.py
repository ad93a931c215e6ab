"""Rules of `repo check` about the ensemble's wiring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lora_slots.repo_files import Finding, ModelFiles, Repository

Check = Callable[[Repository], Iterator[Finding]]


def _wiring(repository: Repository) -> Iterator[Finding]:
    """The ensemble's maps: models and tensors that exist, required inputs that are fed, equal types on both ends."""
    for model in repository.models.values():
        if model.config.WhichOneof("scheduling_choice") == "ensemble_scheduling":
            types = {
                tensor.name: (tensor.data_type, f"the ensemble's input {tensor.name}") for tensor in model.config.input
            }
            for step in model.config.ensemble_scheduling.step:
                yield from _step(repository, model, step, types)
            yield from _origins(repository, model)
            yield from _lora_through(model)


def _step(repository: Repository, model: ModelFiles, step: Any, types: dict[str, tuple[int, str]]) -> Iterator[Finding]:
    line = model.line_of(f'"{step.model_name}"')
    other = repository.models.get(step.model_name)
    if other is None:
        what = f"step {step.model_name} is no model of this repository"
        yield Finding(model.file, line, "step-model", what, f"add the folder {step.model_name}")
        return
    for name, source in step.input_map.items():
        tensor = other.tensor(name)
        if tensor is None:
            what = f"{step.model_name} has no input {name}"
            yield Finding(model.file, line, "step-input", what, "correct the input_map")
        elif source not in types:
            what = f"{source}, wanted by {step.model_name}, is given by no earlier step and no input"
            yield Finding(model.file, line, "step-source", what, "correct the input_map")
        elif types[source][0] != tensor.data_type and not repository.is_open(types[source][0], tensor.data_type):
            what = (
                f"{name} of {step.model_name} and {types[source][1]} have different types: Triton refuses the ensemble"
            )
            yield Finding(model.file, line, "step-types", what, f"make both the same (see {other.file})")
    for tensor in other.config.input:
        if not tensor.optional and tensor.name not in step.input_map:
            what = f"{step.model_name} needs {tensor.name}, and nothing feeds it"
            yield Finding(model.file, line, "step-unfed", what, "add it to the input_map")
    for name, target in step.output_map.items():
        tensor = other.output(name)
        if tensor is None:
            what = f"{step.model_name} has no output {name}"
            yield Finding(model.file, line, "step-output", what, "correct the output_map")
        else:
            types[target] = (tensor.data_type, f"{name} of {step.model_name}")


def _origins(repository: Repository, model: ModelFiles) -> Iterator[Finding]:
    """What comes from a decoupled step, at any distance, cannot meet anything else in a step."""
    decoupled_at: dict[str, frozenset[str]] = {}
    for step in model.config.ensemble_scheduling.step:
        found = {decoupled_at.get(source, frozenset()) for source in step.input_map.values()}
        if len(found) > 1:
            names = " and ".join(sorted({name for origin in found for name in origin}))
            what = f"{step.model_name} takes inputs of the decoupled {names} and others: Triton refuses the ensemble"
            line = model.line_of(f'"{step.model_name}"')
            fix = f"pass them all through {names}, or do without decoupled: true there"
            yield Finding(model.file, line, "step-decoupled", what, fix)
        origin = frozenset().union(*found)
        other = repository.models.get(step.model_name)
        if other is not None and other.config.model_transaction_policy.decoupled:
            origin = frozenset({step.model_name})
        decoupled_at.update(dict.fromkeys(step.output_map.values(), origin))


def _lora_through(model: ModelFiles) -> Iterator[Finding]:
    """B#406: LoRA tensors that stop half way are answered by the base, without an error."""
    for step in model.config.ensemble_scheduling.step:
        if step.model_name == "tensorrt_llm":
            fed = set(step.input_map)
            if fed & {"lora_weights", "lora_config"} and "lora_task_id" not in fed:
                what = (
                    "lora_weights reach tensorrt_llm without lora_task_id: they are ignored, the base answers (B#413)"
                )
                yield Finding(
                    model.file, model.line_of('"tensorrt_llm"'), "lora-without-id", what, "map lora_task_id too"
                )
            elif "lora_task_id" not in fed:
                what = "lora_task_id does not reach tensorrt_llm: every adapter is answered by the base (B#406)"
                yield Finding(model.file, model.line_of('"tensorrt_llm"'), "lora-id-lost", what, "map lora_task_id")


CHECKS: tuple[Check, ...] = (_wiring,)
