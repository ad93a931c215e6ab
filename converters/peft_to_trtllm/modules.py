"""From tensors to adapted modules: A and B paired, complete, of one shape and one rank.

Every tensor of the file ends here in a module, in the report's `ignored`, or as a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from peft_to_trtllm.keys import Ignored, Part, Refused, Role, parse_key
from peft_to_trtllm.report import Findings, Report
from peft_to_trtllm.tensor_file import Tensor


class Adapted(NamedTuple):
    """One adapted module of the file."""

    path: str
    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None
    bias: Tensor | None = None


def collect_modules(tensors: Mapping[str, Tensor], report: Report) -> list[Adapted]:
    """Pair the tensors of a file, in file order of their modules; what is wrong goes into the report."""
    problems = report.problems
    places: dict[str, dict[Role, Tensor]] = {}
    names: dict[str, str] = {}
    for key, tensor in tensors.items():
        meaning = parse_key(key)
        if isinstance(meaning, Ignored):
            report.ignored[key] = meaning.why
        elif isinstance(meaning, Refused):
            problems.add(meaning.rule, key, meaning.found, meaning.wanted)
        else:
            if meaning.role in ("A", "B"):
                names.setdefault(meaning.adapter, key)
            _place(places, meaning, key, tensor, problems)
    if len(names) > 1:
        problems.add(
            "two-adapters",
            ", ".join(names.values()),
            f"tensors of several adapters: {', '.join(name or '(without a name)' for name in names)}",
            "one adapter in a file, its name in every key or in none",
        )
    if not tensors:
        problems.add("no-tensors", "the file", "it holds no tensors", "an adapter with LoRA factors")
    return [found for path, roles in places.items() if (found := _pair(path, roles, problems))]


def _place(places: dict[str, dict[Role, Tensor]], part: Part, key: str, tensor: Tensor, problems: Findings) -> None:
    roles = places.setdefault(part.path, {})
    if part.role in roles:
        problems.add(
            "two-keys", key, f"a second key for the same place as {roles[part.role].name}", "one tensor for each place"
        )
    roles[part.role] = tensor


def _pair(path: str, roles: Mapping[Role, Tensor], problems: Findings) -> Adapted | None:
    empty = [tensor for tensor in roles.values() if 0 in tensor.shape]
    for tensor in empty:
        problems.add(
            "empty-tensor",
            tensor.name,
            f"an empty tensor of shape {list(tensor.shape)}: "
            "saved from a partitioned (ZeRO-3, FSDP) model without gathering",
            "gather the weights before saving (stage3_gather_16bit_weights_on_model_save), and save again",
        )
    a, b = roles.get("A"), roles.get("B")
    if a is None or b is None:
        missing = [f"lora_{role}" for role in ("A", "B") if role not in roles]
        present = next(iter(roles.values()))
        problems.add(
            "unpaired",
            present.name,
            f"incomplete: {path} has no {' and no '.join(missing)}",
            "lora_A and lora_B for each module",
        )
        return None
    if empty or not _is_matrix_pair(a, b, problems):
        return None
    return Adapted(path, a, b, roles.get("magnitude"), roles.get("bias"))


def _is_matrix_pair(a: Tensor, b: Tensor, problems: Findings) -> bool:
    good = True
    for tensor, shape in ((a, "[r, in]"), (b, "[out, r]")):
        if len(tensor.shape) != 2:
            problems.add("shape", tensor.name, f"shape {list(tensor.shape)}", f"a matrix {shape} of a linear layer")
            good = False
        elif tensor.dtype == "BOOL":
            problems.add("shape", tensor.name, "its type is BOOL", "a floating-point type")
            good = False
    return good
