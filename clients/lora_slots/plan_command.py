"""`lora-slots plan`: what fits a GPU, which parameters to write, and what traffic will meet."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lora_slots.fleet_source import Source
    from lora_slots.plan_report import Case
    from lora_slots.plan_traffic import Traffic
    from lora_slots.traffic import Request
    from trtllm_lora.fleet import Fleet
    from trtllm_lora.plan import Wish
    from trtllm_lora.profile import EngineProfile

USUAL_CONTEXT = 2048
USUAL_GPU = 80 * 2**30


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    profile: Annotated[Path, typer.Argument(help="Engine profile (YAML).")],
    fleet: Annotated[
        str | None,
        typer.Option(help="Adapters in words: COUNTxRANK[:MODULE+MODULE],…; default: 100 of the largest rank."),
    ] = None,
    adapters: Annotated[str | None, typer.Option(help="Adapters of a registry: adapters.yaml, or s3://…")] = None,
    bundles: Annotated[Path | None, typer.Option(help="Adapters of a folder of bundles.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Memory of one GPU, such as 80GiB; default: the profile's.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Adapters in slots; default: the profile's.")] = None,
    pinned: Annotated[int, typer.Option(min=0, help="Of them, adapters that never leave.")] = 0,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens a stream usually holds; default: 2048, or max_seq_len.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="pin=N or NAME, max-rank=R, ranks=R, tenants=+N or +NxR, slots=N, context=N, gpu=SIZE; repeatable."
        ),
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Forecast from a request log (JSON lines or CSV).")] = None,
    zipf: Annotated[float | None, typer.Option(help="Forecast from a guess: Zipf's exponent, usually 1.")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second of the guess.")] = 20.0,
    seconds: Annotated[float, typer.Option(help="Seconds a request runs, where no log says it.")] = 1.5,
    latency_goal_ms: Annotated[float | None, typer.Option(help="First token's goal, for merge advice.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture: FILE.svg or FILE.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Memory of a GPU, adapters that fit, recommended cache parameters, streams, and a forecast of traffic.

    Examples:

        lora-slots plan engines/profiles/llama-3.1-8b.yaml --fleet 200x16,20x64

        lora-slots plan engines/profiles/llama-3.1-8b.yaml --adapters adapters.yaml --log requests.jsonl --json

        lora-slots plan engines/profiles/mistral-7b.yaml --zipf 1 --what-if pin=4 --what-if max-rank=128 --plot plan.svg
    """
    from lora_slots.plan_report import Case
    from lora_slots.refusals import Gathered, refusing
    from trtllm_lora.fleet import parse_fleet, usual_fleet
    from trtllm_lora.plan import make_plan
    from trtllm_lora.profile import load_profile
    from trtllm_lora.whatif import apply

    with refusing(), _uncollected():
        gathered = Gathered()
        loaded = gathered.of(lambda: load_profile(profile))
        asked_for = gathered.of(lambda: _requests(log, zipf, seconds))
        gathered.of(lambda: _numbers(zipf, rate, seconds, latency_goal_ms))
        gathered.of(lambda: _plot_kind(plot))
        if loaded is None:
            gathered.tell()
            return
        names = {request.adapter for request in asked_for or ()} | {
            text.partition("=")[2].strip() for text in what_if or ()
        }
        source = gathered.of(lambda: _source(loaded, fleet, adapters, bundles, names))
        size = gathered.of(lambda: _gpu(loaded, gpu))
        tokens = gathered.of(lambda: _context(loaded, context))
        # what-ifs of a command line that is wrong elsewhere are judged all the same, with the usual fleet
        chosen = source.fleet if source else parse_fleet(usual_fleet(loaded.shape(), 1), loaded.shape())
        asked = _wish(loaded, chosen, size or USUAL_GPU, slots, pinned, tokens or 1)
        named = _named(source, asked_for)
        wishes = [(text, gathered.of(partial(apply, asked, text, named))) for text in what_if or ()]
        gathered.tell()
        traffic = _traffic(source, asked_for, str(log), zipf, rate, seconds)
        plan = make_plan(asked)
        cases = [Case("as asked", asked, plan, traffic.forecast(asked, plan) if traffic else None)]
        cases += [_case(name, wish, traffic) for name, wish in wishes if wish is not None]
        if plot:
            from lora_slots.plan_plot import draw

            draw(cases, plot)
        _print(cases, traffic.notes if traffic else (), _advice(asked_for, latency_goal_ms), as_json)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for garbage meanwhile: a plan makes no circles of objects, and ten thousand adapters are many."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _gpu(profile: EngineProfile, gpu: str | None) -> int:
    from lora_slots.refusals import Refused
    from trtllm_lora.profile import parse_bytes

    try:
        size = parse_bytes(gpu) if gpu is not None else profile.serving.gpu_memory
    except ValueError as error:
        raise Refused(f"--gpu: {error}") from None
    if not isinstance(size, int):
        raise Refused("the profile has no serving.gpu_memory: write it there, or give --gpu 80GiB")
    if gpu is not None and size < 2**20:
        raise Refused(f"--gpu {gpu}: that is {size} bytes, and no GPU; write the unit, such as --gpu {size}GiB")
    return size


def _context(profile: EngineProfile, context: int | None) -> int:
    from lora_slots.refusals import Refused

    longest = profile.engine.max_seq_len
    if context is not None and context > longest:
        raise Refused(f"--context {context}: the engine's max_seq_len is {longest}")
    return context or min(USUAL_CONTEXT, longest)


def _wish(profile: EngineProfile, fleet: Fleet, size: int, slots: int | None, pinned: int, context: int) -> Wish:
    from trtllm_lora.plan import Wish

    return Wish(profile, fleet, size, slots or profile.serving.slots, pinned, context)


def _requests(log: Path | None, zipf: float | None, seconds: float) -> list[Request] | None:
    from lora_slots.refusals import Refused
    from lora_slots.traffic import read_log

    if log is not None and zipf is not None:
        raise Refused("--log and --zipf: give one of them")
    return read_log(log, seconds) if log is not None else None


def _numbers(zipf: float | None, rate: float, seconds: float, goal: float | None) -> None:
    from lora_slots.refusals import Refused

    given = (
        ("--zipf", zipf, 0.0),
        ("--rate", rate, 0.001),
        ("--seconds", seconds, 0.0),
        ("--latency-goal-ms", goal, 0.0),
    )
    wrong = [
        f"{name} {value}: write a number of at least {least:g}"
        for name, value, least in given
        if value is not None and not (math.isfinite(value) and value >= least)
    ]
    if wrong:
        raise Refused("\n".join(wrong))


def _plot_kind(plot: Path | None) -> None:
    from lora_slots.plan_plot import check_name

    if plot is not None:
        check_name(plot)


def _source(
    profile: EngineProfile, words: str | None, registry: str | None, bundles: Path | None, asked_for: Iterable[str]
) -> Source:
    from lora_slots.fleet_source import Source, from_bundles, from_registry
    from lora_slots.refusals import Refused
    from trtllm_lora.fleet import parse_fleet, usual_fleet

    if sum(source is not None for source in (words, registry, bundles)) > 1:
        raise Refused("--fleet, --adapters and --bundles: give one of them")
    shape = profile.shape()
    if registry is not None:
        return from_registry(registry, shape, asked_for)
    if bundles is not None:
        return from_bundles(bundles, shape)
    return Source(parse_fleet(words if words is not None else usual_fleet(shape, profile.serving.slots), shape))


def _named(source: Source | None, requests: Sequence[Request] | None) -> Callable[[str], str] | None:
    """Which adapter a name means: the registry's, a bundle's, or one of the log; None where adapters have no names."""
    from trtllm_lora.fleet import FleetError

    if source is None:
        return str  # where they come from is refused already
    if source.fleet.names:
        return source.named
    if requests is None:
        return None
    asked = {request.adapter for request in requests}

    def of_log(name: str) -> str:
        if name not in asked:
            raise FleetError(f"no request of the log asks for {name[:80]!r}")
        return name

    return of_log


def _traffic(
    source: Source | None,
    requests: Sequence[Request] | None,
    name: str,
    zipf: float | None,
    rate: float,
    seconds: float,
) -> Traffic | None:
    if source is None or (requests is None and zipf is None):
        return None
    from lora_slots.plan_traffic import guessed, logged
    from lora_slots.traffic import ZipfGuess

    if requests is not None:
        return logged(requests, source, name)
    return guessed(ZipfGuess(zipf or 0.0, rate, seconds), source.fleet)


def _case(name: str, wish: Wish, traffic: Traffic | None) -> Case:
    """A what-if is a question: that it cannot be had is an answer."""
    from lora_slots.plan_report import Case
    from trtllm_lora import ContractError
    from trtllm_lora.plan import make_plan

    try:
        plan = make_plan(wish)
        return Case(name, wish, plan, traffic.forecast(wish, plan) if traffic else None)
    except ContractError as error:
        return Case(name, wish, None, None, str(error))


def _advice(requests: list[Request] | None, goal: float | None) -> list[str]:
    if requests is None:
        return []
    from lora_slots.advice import advise

    return [advice.text() for advice in advise(requests, goal)]


def _print(cases: list[Case], notes: Sequence[str], advice: list[str], as_json: bool) -> None:
    from lora_slots import plan_report

    if as_json:
        typer.echo(json.dumps({**plan_report.as_json(cases, notes), "merge_advice": advice}, indent=1))
        return
    from rich.console import Console

    console = Console()
    plan_report.show(cases, console, notes)
    for line in advice:
        console.print(f"merge advice: {line}", highlight=False, markup=False)
