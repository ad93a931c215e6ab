"""A capacity plan as tables for a person and as JSON for a program. Both say the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lora_slots.simulation import Forecast
    from trtllm_lora.plan import Plan, Wish


@dataclass(frozen=True, slots=True)
class Case:
    """The plan, or one of its what-ifs."""

    name: str
    wish: Wish
    plan: Plan | None
    """None: it cannot be had, and `why` says the reason."""
    forecast: Forecast | None
    why: str = ""


def as_json(cases: Sequence[Case], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The first case is the plan, the others are its what-ifs."""
    asked = _case(cases[0])
    asked["warnings"] += notes
    return {"schema": 1, **asked, "what_if": {case.name: _case(case) for case in cases[1:]}}


def _case(case: Case) -> dict[str, Any]:
    wish, plan, forecast = case.wish, case.plan, case.forecast
    if plan is None:
        return {"profile": wish.profile.name, "impossible": case.why}
    memory, geometry = plan.memory, plan.geometry
    return {
        "profile": wish.profile.name,
        "parameters": plan.parameters,
        "router_parameters": router_parameters(wish, plan),
        "gpu_bytes": {
            "total": plan.gpu_bytes,
            "weights": memory.weights,
            "activations": memory.activations,
            "runtime": memory.runtime,
            "kv_cache": plan.kv_bytes,
            "lora_device_cache": plan.device_bytes,
            "headroom": plan.headroom_bytes,
        },
        "host_bytes": {"lora_host_cache": plan.host_bytes, "shared_memory": shared_memory_bytes(wish, plan)},
        "disk_bytes": wish.fleet.num_bytes,
        "kv": {
            "bytes_per_token": memory.kv_bytes_per_token,
            "tokens": plan.kv_tokens,
            "context": wish.context,
            "streams": plan.streams,
            "streams_of_max_seq_len": plan.full_streams,
        },
        "lora_cache": {
            "page_width": geometry.page_width,
            "slots_per_page": geometry.slots_per_page,
            "page_bytes": geometry.page_bytes,
            "max_lora_elements": geometry.max_lora_elements,
            "host_pages": plan.host_pages,
            "device_pages": plan.device_pages,
            "pages_needed": plan.pages_needed,
            "slots": plan.slots,
            "pages_as_configured": plan.configured_pages,
        },
        "ranks": [
            {
                "rank": row.rank,
                "pages": row.pages,
                "adapter_bytes": row.num_bytes,
                "fill": round(row.fill, 4),
                "fit_host": row.host_fit,
                "fit_device": row.device_fit,
            }
            for row in plan.ranks
        ],
        "adapters": {"count": wish.fleet.count, "ranks": list(wish.fleet.ranks), "pinned": wish.pinned},
        "assumptions": list(memory.assumptions),
        "warnings": list(plan.warnings),
        "traffic": forecast.as_json() if forecast else None,
    }


def show(cases: Sequence[Case], console: Console, notes: Sequence[str] = ()) -> None:
    """Print the plan, then one line for each what-if."""
    from rich.markup import escape
    from rich.table import Table

    wish, plan, forecast = cases[0].wish, cases[0].plan, cases[0].forecast
    assert plan is not None  # noqa: S101 - without a plan nothing is shown
    console.print(f"[bold]{wish.profile.name}[/]: {_fleet(wish)}, {plan.slots} slots", highlight=False)
    console.print(_memory_table(wish, plan))
    console.print(_rank_table(plan))
    parameters = Table("model", "parameter", "value", title="recommended", title_justify="left")
    for key, value in plan.parameters.items():
        parameters.add_row("tensorrt_llm", key, value)
    for key, value in router_parameters(wish, plan).items():
        parameters.add_row("lora_router", key, value)
    console.print(parameters)
    console.print(
        f"KV cache: {plan.kv_tokens:,} tokens; {plan.streams} streams of {wish.context} tokens, "
        f"{plan.full_streams} of {wish.profile.engine.max_seq_len} tokens "
        f"(max_batch_size {wish.profile.engine.max_batch_size})",
        highlight=False,
    )
    if forecast:
        console.print(forecast.text(), highlight=False, markup=False)
    if len(cases) > 1:
        console.print(_what_if_table(cases, forecasts=forecast is not None))
        for case in cases[1:]:
            if case.plan is None:
                console.print(f"{case.name}: cannot be had: {case.why}", highlight=False, markup=False)
    for text in plan.memory.assumptions:
        console.print(f"[dim]assumed: {text}[/]", highlight=False)
    for text in (*notes, *plan.warnings):
        console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False)
    for case in cases[1:]:
        for text in case.plan.warnings if case.plan else ():
            if text not in plan.warnings:
                console.print(f"[yellow]warning:[/] {escape(case.name)}: {escape(text)}", highlight=False)


def _memory_table(wish: Wish, plan: Plan) -> Table:
    from rich.table import Table

    memory = plan.memory
    table = Table("memory", "GiB", "share", title=f"one GPU of {_gib(plan.gpu_bytes)} GiB", title_justify="left")
    rows = [
        ("weights", memory.weights),
        ("activations (assumed)", memory.activations),
        ("runtime (assumed)", memory.runtime),
        ("KV cache", plan.kv_bytes),
        (f"LoRA device cache, {plan.device_pages} pages", plan.device_bytes),
        ("left alone", plan.headroom_bytes),
    ]
    for what, size in rows:
        table.add_row(what, _gib(size), f"{size / plan.gpu_bytes:.1%}")
    table.add_section()
    table.add_row(f"host: LoRA cache, {plan.host_pages} pages", _gib(plan.host_bytes), "")
    table.add_row("host: slot manager's shared memory", _gib(shared_memory_bytes(wish, plan)), "")
    table.add_row(f"disk: {wish.fleet.count} bundles", _gib(wish.fleet.num_bytes), "")
    return table


def _rank_table(plan: Plan) -> Table:
    from rich.table import Table

    title = f"adapters that fit, all modules and layers ({plan.geometry.page_bytes / 2**20:.1f} MiB a page)"
    table = Table("rank", "MB", "pages", "fill", "fit in host", "fit in device", title=title, title_justify="left")
    for row in plan.ranks:
        size, fill = f"{row.num_bytes / 1e6:.1f}", f"{row.fill:.0%}"
        table.add_row(str(row.rank), size, str(row.pages), fill, str(row.host_fit), str(row.device_fit))
    return table


def _what_if_table(cases: Sequence[Case], *, forecasts: bool) -> Table:
    """Headings are of two lines, so that 80 columns hold them; what cannot be had has its reason below the table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    table.add_column("what if", overflow="fold")
    headings = ["LoRA\nGiB", "pages", "KV\ntokens", "streams", *(["hit\nrate", "cold\nloads/min"] if forecasts else ())]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        if case.plan is None:
            table.add_row(escape(case.name), "none", *[""] * (len(headings) - 1))
            continue
        expected = (f"{case.forecast.hit_rate:.1%}", f"{case.forecast.cold_loads_per_min:.1f}") if case.forecast else ()
        lora, tokens = _gib(case.plan.device_bytes), f"{case.plan.kv_tokens:,}"
        table.add_row(escape(case.name), lora, str(case.plan.pages_needed), tokens, str(case.plan.streams), *expected)
    return table


def _fleet(wish: Wish) -> str:
    ranks = ", ".join(map(str, wish.fleet.ranks))
    pinned = f", {wish.pinned} of them pinned" if wish.pinned else ""
    return f"{wish.fleet.count} adapters of rank {ranks}{pinned}"


def shared_memory_bytes(wish: Wish, plan: Plan) -> int:
    """What the slot manager's HOST tier should have: the largest adapters of all slots, and as much again."""
    total, left = 0, plan.slots
    for group in sorted(wish.fleet.groups, key=lambda group: -group.num_bytes):
        total, left = total + group.num_bytes * min(left, group.count), left - min(left, group.count)
    return 2 * total


def router_parameters(wish: Wish, plan: Plan) -> dict[str, str]:
    """Parameters of `lora_router` that belong to the plan."""
    return {
        "num_slots": str(plan.slots),
        "host_bytes": str(shared_memory_bytes(wish, plan)),
        "lora_cache_device_pages": str(plan.device_pages),
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
