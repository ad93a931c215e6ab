"""Every dimension of an adapter against the base, or against the rest of the adapter.

    H hidden   F intermediate   Q heads x head size   K kv heads x head size   E experts   M expert intermediate

A size the base states must be the tensor's. A size nobody states is learned from the first tensor that shows it, and
must then be the same in every other: so an adapter without a base's config.json is at least consistent in itself.
`attn_dense` is Q x H here, as the tensors are; that the engine assumes H x H is for the preflight to judge.
"""

from __future__ import annotations

from collections.abc import Mapping

from peft_to_trtllm.base import Base
from peft_to_trtllm.report import Findings

SYMBOLS: Mapping[str, tuple[str, str]] = {
    "attn_q": ("H", "Q"),
    "attn_k": ("H", "K"),
    "attn_v": ("H", "K"),
    "attn_dense": ("Q", "H"),
    "mlp_h_to_4h": ("H", "F"),
    "mlp_4h_to_h": ("F", "H"),
    "mlp_gate": ("H", "F"),
    "moe_h_to_4h": ("H", "M"),
    "moe_4h_to_h": ("M", "H"),
    "moe_gate": ("H", "M"),
    "moe_router": ("H", "E"),
}
"""Target module -> (in, out); of one expert for the expert modules."""

_MEANING = {
    "H": "hidden size",
    "F": "intermediate size",
    "Q": "heads x head size",
    "K": "kv heads x head size",
    "E": "number of experts",
    "M": "expert intermediate size",
}


class Dimensions:
    """The sizes of one base, as far as they are known."""

    def __init__(self, base: Base | None, problems: Findings) -> None:
        self._base = base
        self._problems = problems
        self._learned: dict[str, tuple[int, str]] = {}

    def known(self, symbol: str, layer: int) -> int | None:
        """A size the base states, or None."""
        return self._base.size(symbol, layer) if self._base else None

    def check(self, symbol: str, layer: int, found: int, where: str, side: str) -> bool:
        """Whether a tensor's side is as it must be; a problem is noted if not."""
        stated = self.known(symbol, layer)
        if stated is not None and self._base is not None:
            source = self._base.source
            wanted = stated
        else:
            wanted, source = self._learned.setdefault(symbol, (found, where))
        if found == wanted:
            return True
        self._problems.add(
            "shape",
            where,
            f"shape mismatch: {side} is {found} where the {_MEANING[symbol]} is {wanted} (from {source})",
            "an adapter trained on this base; give the config.json of the base it was trained on",
        )
        return False
