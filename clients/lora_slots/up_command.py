"""`lora-slots up`: the embedded stack, from nothing to streamed answers of several adapters."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_slots import examples
from lora_slots.errors import CheckFailed, ServerError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from lora_slots.embedded import Prepared
    from lora_slots.peft_source import PeftSource
    from lora_slots.stack import TritonServer
    from lora_slots.stack_folders import StackFolder

USUAL_PORTS = (8000, 8001, 8002)
MAX_TOKENS = 64
MAX_SHOWN = 4
"""Adapters of a user's own registry that are warmed and asked at the start: it may have thousands."""
DEATH_S = 2.0
"""When a request fails because the server died, its death is known at the latest after so long."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked of `up`."""

    adapters: Mapping[str, Path] | None
    """Name -> PEFT directory of what is published; None: `registry` is served as it is."""
    registry: Path | str | None
    known: Sequence[str]
    """The names of all adapters that are served."""
    prompt: str | None
    max_tokens: int
    check: bool
    ports: tuple[int, int, int]
    """http, grpc, metrics; 0: the usual one if it is free, else any."""
    slots: int
    idle_s: float
    as_json: bool = False
    """One line of JSON when it serves, or the answers of `check`; all words go to stderr."""
    source: PeftSource | None = None
    """Where `registry` comes from, if it is made of a folder of adapters."""
    refresh_s: float | None = None
    """How often to look at `source` again; None: never."""

    @property
    def shown(self) -> Sequence[str]:
        """The adapters that are warmed and asked at the start."""
        return self.known if self.registry is None else self.known[:MAX_SHOWN]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("up")(up)


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number of seconds")
    return value


def up(
    check: Annotated[
        bool, typer.Option("--check", help="Check the answers, then stop; exit code 3 if one is wrong.")
    ] = False,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=DIR: a further PEFT adapter of the base model; may be repeated.")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|s3://…",
            help="Serve the adapters of this adapters.yaml, as it is, in place of the example adapters.",
        ),
    ] = None,
    peft_source: Annotated[
        str | None,
        typer.Option(
            help="Serve the adapters in this directory or s3://bucket/prefix, a folder each. (env: NIM_PEFT_SOURCE)"
        ),
    ] = None,
    peft_refresh_s: Annotated[
        float | None,
        typer.Option(
            callback=_finite,
            min=0.001,
            help="Look for changes there so often; default: never. (env: NIM_PEFT_REFRESH_INTERVAL)",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask the base and each adapter.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of these answers at most.")] = MAX_TOKENS,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Adapters in the engine's working set at most; default: 8. (env: NIM_MAX_GPU_LORAS)"),
    ] = None,
    idle_s: Annotated[
        float | None,
        typer.Option(min=0, callback=_finite, help="Evict an adapter nobody used for so many seconds; default: 300."),
    ] = None,
    http_port: Annotated[int, typer.Option(help="0: 8000 if it is free, else any.")] = 0,
    grpc_port: Annotated[int, typer.Option(help="0: 8001 if it is free, else any.")] = 0,
    metrics_port: Annotated[int, typer.Option(help="0: 8002 if it is free, else any.")] = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON line when it serves: URLs, adapters, pid; nothing is asked. With --check the answers.",
        ),
    ] = False,
) -> None:
    """Start everything here: base model, adapters, a real Triton; ask one prompt; serve until Ctrl-C.

    What no option says is taken from LORA_SLOTS_* and then from NIM 1.x's variables: see docs/migration.md.

    Examples:

        lora-slots up

        lora-slots up --check

        lora-slots up --adapter mine=./my_adapter --slots 4

        lora-slots up --registry ./adapters.yaml

        lora-slots up --peft-source ./loras --peft-refresh-s 30

        lora-slots up --json --slots 4
    """
    from rich.console import Console

    from lora_slots import up_adapters
    from lora_slots.stack import exit_on_signals

    if adapter and registry is not None:
        raise UsageError("--adapter publishes into a registry of the stack's own; with --registry, add it to that file")
    if peft_source is not None and (adapter or registry is not None):
        raise UsageError("--peft-source says where all adapters come from: leave out --registry and --adapter")
    if as_json and prompt is not None and not check:
        raise UsageError("--prompt: with --json nothing is asked; leave it out, or ask by --check --json")
    console, environment = Console(stderr=as_json), up_adapters.environment()
    ports = (http_port, grpc_port, metrics_port)
    with exit_on_signals():
        place, source, named_by = registry and up_adapters.place_of(registry), None, "--registry"
        if not adapter and registry is None:
            named_by = environment.variables.get("registry", "--peft-source")
            place, source = up_adapters.from_environment(environment, peft_source, lambda line: _say(console, line))
        adapters = up_adapters.examples_and(adapter or []) if place is None else None
        endpoint = environment.parameters.get("s3_endpoint_url")
        known = list(adapters or {}) if place is None else up_adapters.published(place, named_by, endpoint)
        slots = slots or int(environment.parameters.get("num_slots", 8))
        idle_s = float(environment.parameters.get("idle_s", 300.0)) if idle_s is None else idle_s
        refresh_s = peft_refresh_s or environment.peft_refresh_s
        wishes = Wishes(
            adapters, place, known, prompt, max_tokens, check, ports, slots, idle_s, as_json, source, refresh_s
        )
        _run(wishes, console)


def _run(wishes: Wishes, console: Console) -> None:
    from lora_slots import embedded, stack_folders, up_adapters, up_ready
    from lora_slots.progress import Bars
    from lora_slots.stack.ports import choose_ports
    from lora_slots.supervisor import supervise

    started = time.monotonic()
    with _ports_as_options():
        choose_ports(*wishes.ports)  # before what takes long
    with stack_folders.claim() as folder, ExitStack() as serving:
        if others := stack_folders.running():
            _say(
                console,
                f"other stacks of yours serve on {', '.join(others)}; without --url, commands talk to the newest",
            )
        with Bars(console) as bars:
            registry = wishes.registry or folder.registry.absolute()
            prepared = embedded.prepare(wishes.adapters, registry, progress=bars.report)
        with stack_folders.starting(waiting=lambda: _say(console, "waiting for another start …")):
            _say(console, "starting Triton …")
            server = serving.enter_context(_triton(prepared, folder, wishes))
        serving.enter_context(folder.announced(server.grpc_url))
        serving.enter_context(up_adapters.following(wishes.source, wishes.refresh_s, lambda line: _say(console, line)))
        try:
            warm = list(_warm(server.grpc_url, wishes, console))
            _say(console, f"ready after {time.monotonic() - started:.1f} s\n")
            if wishes.as_json and not wishes.check:
                typer.echo(up_ready.ready_json(server, prepared, wishes.known, warm))  # which flushes
            else:
                _ask(server, prepared, wishes, console)
            if not wishes.check:
                supervise(server, lambda line: _say(console, line))
        except (KeyboardInterrupt, SystemExit):
            _say(console, "stopping …")
            raise
        except ServerError:
            server.wait(DEATH_S)  # if the server died, that is the reason, and its log tells more
            raise


@contextmanager
def _triton(prepared: Prepared, folder: StackFolder, wishes: Wishes) -> Iterator[TritonServer]:
    from lora_slots import embedded
    from lora_slots.stack import Ports

    router = {"num_slots": str(wishes.slots), "idle_s": str(wishes.idle_s), "state_file": str(folder.warm_set)}
    if wishes.registry:
        router["disk_dir"] = str(folder.disk)  # it may name remote adapters
    with ExitStack() as end:
        with _ports_as_options():
            running = embedded.running(
                prepared, ports=Ports(*wishes.ports), usual_ports=Ports(*USUAL_PORTS), router=router
            )
            server = end.enter_context(running)
        yield server


@contextmanager
def _ports_as_options() -> Iterator[None]:
    """A port that is refused is named as the user typed it."""
    from lora_slots.stack import PortTaken

    try:
        yield
    except PortTaken as error:
        option = f"--{error.door}-port"
        raise PortTaken(error.door, error.port, error.reason, setting=option, log_tail=error.log_tail) from None


def _ask(server: TritonServer, prepared: Prepared, wishes: Wishes, console: Console) -> None:
    from lora_slots import demo, up_ready
    from lora_slots.text import Tokenizer

    prompt = wishes.prompt or str(examples.styles().DEMO_PROMPT)
    text = Tokenizer(prepared.base).apply_chat_template([{"role": "user", "content": prompt}])
    if len(wishes.shown) < len(wishes.known):
        _say(console, f"asked are the base and {', '.join(wishes.shown)}, of {len(wishes.known):,} adapters")
    _say(console, f"prompt: {prompt}\n")
    answers = demo.ask(server.grpc_url, text, wishes.shown, max_tokens=wishes.max_tokens, console=console)
    failures = demo.failures(answers)
    if failures:
        server.wait(DEATH_S)
    if wishes.check:
        problems = [*failures, *demo.style_problems(answers, examples.adapters() if wishes.registry is None else ())]
        if wishes.as_json:
            typer.echo(up_ready.check_json(prompt, answers, problems))
        if problems:
            raise CheckFailed("\n".join(problems))
        _say(console, "check passed: every answer came, each example adapter's in its style, the base's in none")
        return
    for problem in failures:
        _say(console, problem)
    _say(console, up_ready.ready_lines(server, text, next(iter(wishes.shown), None), wishes.max_tokens))


def _warm(url: str, wishes: Wishes, console: Console) -> Iterator[str]:
    """Warm what is shown; the names of those that are."""
    from lora_slots.client import Client

    with Client(url) as client:
        for name in wishes.shown:
            try:
                answer = client.operate("warm", adapter=name)
            except ServerError as error:
                if wishes.registry is None:
                    raise
                _say(console, f"  {name}: {error}")  # one bad adapter of a registry is no reason to serve none
                continue
            _say(console, f"  warm: {name} (found in {answer['found_in']}, {answer['waited_s']:.2f} s)")
            yield name


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
