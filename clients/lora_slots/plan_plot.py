"""A picture of a capacity plan: how a GPU's memory is shared, for the plan and each what-if, as SVG or PNG.

The picture is a list of shapes; SVG is written here, PNG is drawn by matplotlib, an extra (`lora-slots[plot]`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lora_slots.refusals import Refused

if TYPE_CHECKING:
    from lora_slots.plan_report import Case

WIDTH, LABEL, BAR, GAP, TOP = 900.0, 190.0, 28.0, 22.0, 74.0
PARTS = (
    ("weights", "#30475e"),
    ("activations", "#6c7a89"),
    ("runtime", "#a4b0be"),
    ("KV cache", "#2e86ab"),
    ("LoRA cache", "#e07a1f"),
    ("left alone", "#e8e8e8"),
)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled box, in points from the top left."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text; y is its base line."""

    x: float
    y: float
    text: str
    size: float = 12


Shape = Rectangle | Label


def draw(cases: Sequence[Case], file: Path) -> None:
    """Write the picture; the ending of the name decides the format.

    Raises:
        Refused: another ending than .svg or .png, or .png without matplotlib.
    """
    check_name(file)
    height = TOP + len(cases) * (BAR + GAP) + 30
    shapes = list(_shapes(cases))
    kind = file.suffix.lower()
    if kind == ".svg":
        file.write_text(_svg(shapes, height), encoding="utf-8")
    elif kind == ".png":
        _png(shapes, height, file)


def check_name(file: Path) -> None:
    """Raise Refused: another ending than .svg or .png, or no folder that it could be written into."""
    if not file.parent.is_dir():
        raise Refused(f"--plot {file}: {file.parent} is no folder; make it first")
    if file.is_dir():
        raise Refused(f"--plot {file}: is a folder; write a name that ends in .svg or .png")
    if file.suffix.lower() not in (".svg", ".png"):
        raise Refused(f"--plot {file}: write a name that ends in .svg or .png")


def _shapes(cases: Sequence[Case]) -> Iterator[Shape]:
    yield Label(10, 24, f"{cases[0].wish.profile.name}: memory of one GPU, GiB", 16)
    x = 10.0
    for name, colour in PARTS:
        yield Rectangle(x, 40, 12, 12, colour)
        yield Label(x + 17, 51, name)
        x += 40 + 7 * len(name)
    largest = max(case.plan.gpu_bytes for case in cases if case.plan)
    scale = (WIDTH - LABEL - 70) / largest
    for i, case in enumerate(cases):
        y = TOP + i * (BAR + GAP)
        yield Label(10, y + BAR / 2 + 4, case.name)
        if case.plan is None:
            yield Label(LABEL, y + BAR / 2 + 4, f"cannot be had: {case.why}", 10)
            continue
        plan, forecast, memory = case.plan, case.forecast, case.plan.memory
        x = LABEL
        sizes = (memory.weights, memory.activations, memory.runtime, plan.kv_bytes, plan.device_bytes)
        for (_, colour), size in zip(PARTS, (*sizes, plan.headroom_bytes), strict=True):
            width = max(0.0, size * scale)
            yield Rectangle(x, y, width, BAR, colour)
            x += width
        yield Label(x + 6, y + BAR / 2 + 4, f"{plan.gpu_bytes / 2**30:.0f}")
        text = f"{plan.slots} slots, {plan.pages_needed} pages, {plan.kv_tokens:,} KV tokens, {plan.streams} streams"
        text += f", hit rate {forecast.hit_rate:.1%}" if forecast else ""
        yield Label(LABEL, y + BAR + 13, text, 10)


def _svg(shapes: Sequence[Shape], height: float) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height:.0f}" font-family="sans-serif">',
        f'<rect width="{WIDTH:.0f}" height="{height:.0f}" fill="white"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Rectangle):
            lines.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
                f'fill="{shape.colour}"/>'
            )
        else:
            lines.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}">{escape(shape.text)}</text>'
            )
    return "\n".join([*lines, "</svg>", ""])


def _png(shapes: Sequence[Shape], height: float, file: Path) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle as Patch
    except ImportError:
        raise Refused(
            f"--plot {file}: PNG needs matplotlib (pip install 'lora-slots[plot]'); SVG needs nothing"
        ) from None
    figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    for shape in shapes:
        if isinstance(shape, Rectangle):
            axes.add_patch(Patch((shape.x, shape.y), shape.width, shape.height, color=shape.colour, linewidth=0))
        else:
            axes.text(shape.x, shape.y, shape.text, fontsize=shape.size * 0.72)
    figure.savefig(file)
