"""How the factors of one module are stored: plain, or as BD-LoRA and QALoRA store them.

    plain     A [r, in], B [out, r]
    BD-LoRA   A [r, in/n] or B [out, r/n]: the n row chunks are the blocks of a block-diagonal matrix
    QALoRA    A [r, in/g]: x is averaged over groups of g inputs and multiplied by in/g, so
              A'[:, i] = A[:, i // g] * (in/g) / g
    turned    target_parameters on a weight stored (in, out): lora_A [r, out], lora_B [in, r], ΔWᵀ = s·B·A

The config's flags say what may be there, the shape what is: use_qalora means nothing on a layer that is not quantised.
Sources: PEFT 0.21 `tuners/lora/variants.py`, BdLoraLinearVariant (its names are looked for anywhere in the module's
path) and QALoraLinearVariant; `tuners/lora/layer.py`, ParamWrapper.
"""

from __future__ import annotations

from peft_to_trtllm.dims import SYMBOLS, Dimensions
from peft_to_trtllm.families import Leaf
from peft_to_trtllm.fields import Settings
from peft_to_trtllm.modules import Adapted
from peft_to_trtllm.report import Findings
from peft_to_trtllm.rows import Factors


def stored_factors(
    adapted: Adapted,
    scale: float,
    settings: Settings,
    dims: Dimensions,
    leaf: Leaf,
    layer: int,
    is_turned: bool,
    problems: Findings,
) -> Factors | None:
    """The factors of a module with how they are stored; None with the reason in `problems`."""
    a, b = adapted.a, adapted.b
    path = adapted.path
    if settings.block_diagonal:
        blocks = settings.block_diagonal
        a_is, b_is = any(p in path for p in blocks.a_names), any(p in path for p in blocks.b_names)
        if a_is and b_is:
            problems.add("bd-lora", a.name, f"{path!r} is in both target_modules_bd_a and _bd_b", "one of the two")
            return None
        if a_is or b_is:
            return _block_diagonal(adapted, scale, blocks.nblocks, a_is=a_is, problems=problems)
    repeat = 1
    width = dims.known(SYMBOLS[leaf.modules[0]][0], layer)
    if settings.qalora_group and width is None and not is_turned:
        problems.add(
            "qalora",
            a.name,
            "use_qalora is on, and whether this A stands for groups of inputs only its width beside the base's says",
            "the base's config.json (--base)",
        )
        return None
    if settings.qalora_group and not is_turned and a.shape[1] * settings.qalora_group == width:
        repeat = settings.qalora_group
        scale = scale * a.shape[1] / repeat
    if a.shape[0] != b.shape[1]:
        problems.add(
            "rank",
            a.name,
            f"A has shape {list(a.shape)}, B {list(b.shape)}: their ranks do not match",
            "A [r, in] and B [out, r] with one r",
        )
        return None
    if is_turned:
        return Factors(b, a, a.shape[0], scale, swapped=True)
    return Factors(a, b, a.shape[0], scale, a_repeat=repeat)


def _block_diagonal(adapted: Adapted, scale: float, nblocks: int, *, a_is: bool, problems: Findings) -> Factors | None:
    a, b = adapted.a, adapted.b
    side, columns = (a, b.shape[1]) if a_is else (b, a.shape[0])
    rank = a.shape[0] if a_is else b.shape[1] * nblocks
    if side.shape[0] % nblocks or rank != columns:
        problems.add(
            "bd-lora",
            side.name,
            f"A has shape {list(a.shape)}, B {list(b.shape)}; they do not fit {nblocks} blocks",
            "A [r, in/n] and B [out, r], or A [r, in] and B [out, r/n]",
        )
        return None
    return Factors(a, b, rank, scale, a_blocks=nblocks if a_is else 1, b_blocks=1 if a_is else nblocks)
