"""The command line as a whole: each command explains itself, its examples are valid, a real shell completes it."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lora_slots.cli import COMMANDS as COMMANDS_ALONE
from lora_slots.cli import application
from lora_slots.convert_command import parser as convert_parser

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("lora-slots")
ALWAYS_JSON = {"adapters schema", "engine schema"}
"""Commands without --json: what they print is JSON anyway."""


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("cli_reference", ROOT / "ci" / "cli_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


APP = application()
REFERENCE = _reference()
COMMANDS: dict[str, Any] = {" ".join(words): command for words, command in REFERENCE.commands()}
EXAMPLES = [line for command in COMMANDS.values() for line in REFERENCE.examples(command.help)]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    """`--help` ends with 0; it has an example that is valid, and words for every argument and option."""
    command = COMMANDS[name]
    done = CliRunner().invoke(APP, [*name.split(), "--help"])
    assert done.exit_code == 0, done.output
    if name == "convert":
        assert "lora-slots convert ./my_adapter" in " ".join(done.output.split())
        return
    assert REFERENCE.examples(command.help), "no example"
    assert [param.name for param in command.params if not param.help and param.name != "help"] == []


def test_one_command_alone_is_the_same() -> None:
    """What starts alone, to start sooner, is what all together have under its name."""
    whole: Any = typer.main.get_command(application())
    assert {*whole.commands} == {*COMMANDS_ALONE, "merge-advice"}
    for word in COMMANDS_ALONE:
        alone: Any = typer.main.get_command(application(word))
        assert word in alone.commands
        assert set(alone.commands) <= {word, "merge-advice"}
    unknown: Any = typer.main.get_command(application("nonsense"))
    assert list(unknown.commands) == list(whole.commands)


def test_a_command_starts_without_what_others_need() -> None:
    """`engine check` imports no numpy, no client of Triton and no other command."""
    profile = ROOT / "engines" / "profiles" / "smollm2-135m.yaml"
    program = f"""
import sys
from lora_slots.cli import main
sys.argv = ["lora-slots", "engine", "check", {str(profile)!r}]
try:
    main()
finally:
    others = {{"numpy", "tritonclient", "boto3", "lora_slots.up_command", "lora_slots.plan_command"}}
    print(sorted(others & {{*sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 profiles are good", "[]"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_nothing_in_a_help_is_taken_for_markup(name: str) -> None:
    """rich swallows `[merge]` as a tag of its own, and whoever installs by the help gets half of it."""
    command = COMMANDS[name]
    texts = [command.help or "", *(param.help or "" for param in command.params)]
    assert [text for text in texts if re.search(r"(?<!\\)\[[a-z#/@][^\[]*\]", text)] == []


def test_every_command_has_json() -> None:
    """Every leaf of the tree, save those that print nothing but JSON."""
    without = {
        name for name, command in COMMANDS.items() if not any("--json" in param.opts for param in command.params)
    }
    assert without == ALWAYS_JSON


@pytest.mark.parametrize("line", sorted(set(EXAMPLES)))
def test_every_example_can_be_meant(line: str) -> None:
    """The command exists and takes these arguments and options; nothing is run."""
    parses(line)


def parses(line: str) -> None:
    """Raises whatever the parser does."""
    words = shlex.split(line.rpartition(" | ")[2].partition(" > ")[0])
    assert words[0] == "lora-slots"
    if words[1] == "convert":
        convert_parser().parse_args(words[2:])
        return
    name = next(
        name for name in sorted(COMMANDS, key=len, reverse=True) if f"{' '.join(words[1:])} ".startswith(f"{name} ")
    )
    COMMANDS[name].make_context(name, words[1 + len(name.split()) :])


def test_the_reference_has_every_command() -> None:
    """docs/cli.md, which `make docs` writes."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    headings = {line.lstrip("# ") for line in text.splitlines() if line.startswith("##")}
    assert {f"lora-slots {name}" for name in COMMANDS} <= headings


def in_bash(script: str) -> str:
    """What a bash script prints, with the command on its PATH."""
    environment = {**os.environ, "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/bash", "--norc", "-c", script], capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lora-slots pre", ["prewarm"]),
        ("lora-slots slots ", ["drain", "evict", "explain", "pin", "pools", "status", "unpin", "warm"]),
        ("lora-slots adapters alias ", ["remove", "set"]),
        ("lora-slots prewarm --wait", ["--wait-ready"]),
        ("lora-slots convert --e", ["--engine", "--explain"]),
        ("lora-slots convert ./my_adapter --engine /e --d", ["--dtype"]),
        ("lora-slots convert --dtype ", ["bfloat16", "float16", "float32"]),
    ],
)
def test_bash_completes(typed: str, offered: list[str]) -> None:
    """What `--show-completion` prints, given to bash and called as bash calls it."""
    words = typed.split(" ")
    script = f"""
        completion="$(lora-slots --show-completion; true)"
        eval "$completion"
        complete -p lora-slots >/dev/null
        COMP_WORDS=({" ".join(shlex.quote(word) for word in words)}) COMP_CWORD={len(words) - 1}
        $(complete -p lora-slots | sed 's/.*-F \\([^ ]*\\).*/\\1/') lora-slots
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    assert sorted(in_bash(script).split()) == offered


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 1, ""),
        (("--version",), 0, ""),
        (("explode",), 1, "lora-slots: No such command 'explode'"),
        (("slots", "status", "--url"), 1, "--url"),
        (
            ("slots", "status", "--url", "nowhere"),
            1,
            "lora-slots: nowhere: host:port of Triton's gRPC door is expected",
        ),
        (("adapters", "show", "x", "--registry", "/no/file"), 1, "/no/file"),
        (("convert", "/no/adapter", "--base", "/no/base", "--check"), 1, "/no/"),
    ],
)
def test_exit_codes_are_as_documented(arguments: tuple[str, ...], code: int, said: str) -> None:
    """What a user can mend is words and a code, and never a traceback."""
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
