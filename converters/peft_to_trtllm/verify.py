"""Proof on the real model: base + what the bundle says, against base + adapter as PEFT runs it.

The rows are read back from the bundle and added to the base's weights; both models see the same random token ids in
float32. This proves factors, scales, rounding and the file; that a fused row belongs to q rather than k is proven by
the tests, which hold the row orders against transformers.

torch, transformers and peft are imported here and nowhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peft_to_trtllm.errors import InputError
from peft_to_trtllm.rounding import Array, Floats, values_of
from peft_to_trtllm.rows import Plan, Row
from trtllm_lora import Bundle

TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 8e-2}
"""Largest allowed difference of a logit, relative to the largest change the adapter makes to one."""

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PROMPTS, _TOKENS = 3, 16


class Verdict(NamedTuple):
    """How far the bundle is from PEFT, over all logits of the prompts."""

    largest_difference: float
    largest_change: float
    """What the adapter changes at all: the measure for the difference."""
    tolerance: float

    @property
    def ok(self) -> bool:
        """Within what rounding to the bundle's type explains."""
        return self.largest_difference <= self.tolerance * max(self.largest_change, 1e-6)

    def text(self) -> str:
        """One line for a person."""
        verdict = "as PEFT" if self.ok else "NOT as PEFT"
        return (
            f"{verdict}: largest logit difference {self.largest_difference:.3g}, "
            f"where the adapter changes logits by up to {self.largest_change:.3g}"
        )


def check_available() -> None:
    """Whether what `verify` needs is installed; nothing is imported.

    Raises:
        InputError: names what is missing.
    """
    missing = [name for name in ("torch", "transformers", "peft") if find_spec(name) is None]
    if missing:
        raise InputError(f"--verify needs torch, transformers and peft; not installed: {', '.join(missing)}")


def verify(bundle: Bundle, plan: Plan, adapter: Path, base: Path) -> Verdict:
    """Run both models and compare.

    Raises:
        InputError: torch, transformers or peft is missing, the base cannot be loaded, or the bundle has rows that
            belong to no linear layer of the model as transformers builds it (experts), or DoRA.
    """
    try:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise InputError(f"--verify needs torch, transformers and peft: {error}") from None
    _check_supported(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise InputError(f"{base}: transformers cannot load the base: {error}") from None
        model.train(False)
        ids = torch.randint(model.config.vocab_size, (_PROMPTS, _TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            plain = model(ids).logits
            linears = _linears(model, plan.rows)
            deltas = [(linears[row.path], row, _delta(bundle, i, row)) for i, row in enumerate(plan.rows)]
            for linear, row, delta in deltas:
                _add(torch, linear, row, delta)
            ours = model(ids).logits
            for linear, row, delta in deltas:
                _add(torch, linear, row, -delta)
            theirs = PeftModel.from_pretrained(model, str(adapter)).eval()(ids).logits
    return Verdict(
        largest_difference=float((ours - theirs).abs().max()),
        largest_change=float((theirs - plain).abs().max()),
        tolerance=TOLERANCE[bundle.dtype],
    )


def _check_supported(plan: Plan) -> None:
    odd = next((row for row in plan.rows if row.num_experts > 1 or row.magnitude or len(row.blocks) > 1), None)
    if odd:
        raise InputError(f"--verify compares plain linear layers; {odd.path} ({odd.module}) is none")


def _linears(model: Any, rows: Sequence[Row]) -> dict[str, Any]:
    modules = dict(model.named_modules())
    found = {}
    for row in rows:
        tail = row.path[row.path.index(f".{row.layer}.") :]
        names = [name for name in modules if name.endswith(tail)]
        if len(names) != 1 or not hasattr(modules[names[0]], "weight"):
            raise InputError(f"--verify: the model has no single linear layer for {row.path}")
        found[row.path] = modules[names[0]]
    return found


def _delta(bundle: Bundle, number: int, row: Row) -> Floats:
    values: Array = bundle.weights()[0, number]
    end_a = row.rank * row.d_in
    a = values_of(np.array(values[:end_a]), _STORED[bundle.dtype]).reshape(row.rank, row.d_in)
    b = values_of(np.array(values[end_a : row.size]), _STORED[bundle.dtype]).reshape(row.d_out, row.rank)
    product: Floats = b @ a
    return product


def _add(torch: Any, linear: Any, row: Row, delta: Floats) -> None:
    (block,) = row.blocks
    weight = linear.weight
    view = weight.T if type(linear).__name__ == "Conv1D" else weight
    every = np.arange(view.shape[0])
    view[torch.from_numpy(every[block.b_rows])] += torch.from_numpy(delta).to(weight.dtype)
