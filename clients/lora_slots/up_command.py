"""`lora-slots up`: the embedded stack, from nothing to streamed answers of several adapters."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lora_slots import examples
from lora_slots.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from lora_slots.demo import Answer
    from lora_slots.embedded import Prepared
    from lora_slots.stack import Ports, TritonServer

USUAL_PORTS = (8000, 8001, 8002)
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked of `up`."""

    adapters: Mapping[str, Path]
    prompt: str | None
    check: bool
    ports: tuple[int, int, int]
    """http, grpc, metrics; 0: the usual one if it is free, else any."""
    slots: int
    idle_s: float


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("up")(up)


def up(
    check: Annotated[
        bool, typer.Option("--check", help="Check the answers, then stop; exit code 3 if one is wrong.")
    ] = False,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=DIR: a further PEFT adapter of the base model; may be repeated.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask the base and each adapter.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Adapters in the engine's working set at most.")] = 8,
    idle_s: Annotated[float, typer.Option(min=0, help="Evict an adapter nobody used for this many seconds.")] = 300.0,
    http_port: Annotated[int, typer.Option(help="0: 8000 if it is free, else any.")] = 0,
    grpc_port: Annotated[int, typer.Option(help="0: 8001 if it is free, else any.")] = 0,
    metrics_port: Annotated[int, typer.Option(help="0: 8002 if it is free, else any.")] = 0,
) -> None:
    """Start everything here: base model, adapters, a real Triton; ask one prompt; serve until Ctrl-C.

    Examples:

        lora-slots up

        lora-slots up --check

        lora-slots up --adapter mine=./my_adapter --slots 4
    """
    from rich.console import Console

    from lora_slots.stack import exit_on_signals

    adapters = _adapters(adapter or [])
    with exit_on_signals():
        _run(Wishes(adapters, prompt, check, (http_port, grpc_port, metrics_port), slots, idle_s), Console())


def _run(wishes: Wishes, console: Console) -> None:
    from lora_slots import address, embedded
    from lora_slots.progress import Bars

    started = time.monotonic()
    ports = _choose_ports(wishes.ports)
    if other := address.running():
        _say(console, f"another stack of yours serves on {other}; commands without --url will talk to this one")
    with Bars(console) as bars:
        prepared = embedded.prepare(wishes.adapters, progress=bars.report)
    _say(console, "starting Triton …")
    router = {
        "num_slots": str(wishes.slots),
        "idle_s": str(wishes.idle_s),
        "state_file": str(prepared.registry.with_name("warm.json")),
    }
    with embedded.running(prepared, ports=ports, router=router) as server, address.published(server.grpc_url):
        _warm(server.grpc_url, wishes.adapters, console)
        _say(console, f"ready after {time.monotonic() - started:.1f} s\n")
        try:
            _serve(server, prepared, wishes, console)
        except (KeyboardInterrupt, SystemExit):
            _say(console, "stopping …")
            raise


def _serve(server: TritonServer, prepared: Prepared, wishes: Wishes, console: Console) -> None:
    from lora_slots import demo
    from lora_slots.supervisor import supervise
    from lora_slots.text import Tokenizer

    prompt = wishes.prompt or str(examples.styles().DEMO_PROMPT)
    text = Tokenizer(prepared.base).apply_chat_template([{"role": "user", "content": prompt}])
    _say(console, f"prompt: {prompt}\n")
    answers = demo.ask(server.grpc_url, text, list(wishes.adapters), max_tokens=MAX_TOKENS, console=console)
    if wishes.check:
        problems = [*_failures(answers), *_style_problems(answers)]
        if problems:
            raise CheckFailed("\n".join(problems))
        _say(console, "check passed: every answer is in its adapter's style, the base's in none")
        return
    for problem in _failures(answers):
        _say(console, problem)
    _say(console, _ready_lines(server, text, next(iter(wishes.adapters), None)))
    supervise(server, lambda line: _say(console, line))


def _warm(url: str, adapters: Iterable[str], console: Console) -> None:
    from lora_slots.client import Client

    with Client(url) as client:
        for name in adapters:
            answer = client.operate("warm", adapter=name)
            _say(console, f"  warm: {name} (found in {answer['found_in']}, {answer['waited_s']:.2f} s)")


def _failures(answers: Sequence[Answer]) -> list[str]:
    return [f"{answer.name}: {answer.error}" for answer in answers if answer.error is not None]


def _style_problems(answers: Sequence[Answer]) -> list[str]:
    from lora_slots import demo

    styles, problems = examples.styles(), []
    for answer in answers:
        if answer.error is not None:
            continue
        if not answer.text.strip():
            problems.append(f"{answer.name}: an empty answer")
        elif answer.name == demo.BASE:
            like = [style for style in styles.STYLES if styles.looks_right(style, answer.text)]
            problems += [f"the base answers like {style}: {answer.text!r}" for style in like]
        elif answer.name in styles.STYLES and not styles.looks_right(answer.name, answer.text):
            problems.append(f"{answer.name} does not answer in its style: {answer.text!r}")
    return problems


def _ready_lines(server: TritonServer, text: str, adapter: str | None) -> str:
    from lora_slots import address

    body = {"id": "demo-1", "text_input": text, "max_tokens": MAX_TOKENS, "stream": True}
    if adapter:
        body["adapter"] = adapter
    option = f" --adapter {adapter}" if adapter else ""
    at = "" if server.grpc_url == address.find() else f" --url {server.grpc_url}"
    url = f"http://{server.http_url}/v2/models/ensemble/generate_stream"
    python = _short(Path(sys.executable))
    command = _short(Path(sys.executable).with_name("lora-slots"))
    client = _short(examples.folder() / "client.py")
    return "\n".join(
        [
            "",
            "curl (one line of JSON per token):",
            f"  curl -sN {url} -d {shlex.quote(json.dumps(body))}",
            "tritonclient:",
            f"  {python} {client} --url {server.grpc_url}{option} 'Who are you?'",
            "command line:",
            f"  {command} generate{at}{option} 'Who are you?'",
            f"  {command} slots status{at}",
            f"metrics: {server.metrics_url}",
            "",
            "serving until Ctrl-C",
        ]
    )


def _short(path: Path) -> str:
    """A path as a person in this folder would type it."""
    absolute = path.absolute()  # not resolved: .venv/bin/python is a link
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _choose_ports(asked: tuple[int, int, int]) -> Ports:
    from lora_slots.stack import PortTaken
    from lora_slots.stack.ports import choose_ports

    wanted = [own or usual for own, usual in zip(asked, USUAL_PORTS, strict=True)]
    while True:
        try:
            return choose_ports(*wanted)
        except PortTaken as error:
            if error.port in asked or error.port not in wanted:
                raise
            wanted[wanted.index(error.port)] = 0


def _adapters(wished: Sequence[str]) -> dict[str, Path]:
    """The example adapters and those of `--adapter NAME=DIR`. Raises UsageError."""
    from adapter_slots.registry import NAME_RULE, is_name

    adapters = examples.adapters()
    for text in wished:
        name, separator, folder = text.partition("=")
        if not separator or not folder:
            raise UsageError(f"--adapter takes NAME=DIR, found {text!r}")
        if not is_name(name):
            raise UsageError(f"--adapter {text}: a name is {NAME_RULE}")
        if name in adapters:
            raise UsageError(f"--adapter {text}: there is an adapter {name!r} already; choose another name")
        adapters[name] = Path(folder)
    return adapters


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
