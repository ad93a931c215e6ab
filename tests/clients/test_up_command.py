"""`lora-slots up`: what is refused before anything starts, by the option's own name."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from lora_slots import cli


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--slots 0", "--slots"),
        ("--slots many", "--slots"),
        ("--idle-s nan", "--idle-s"),
        ("--idle-s inf", "--idle-s"),
        ("--idle-s -1", "--idle-s"),
        ("--http-port 65536", "--http-port"),
        ("--grpc-port -1", "--grpc-port"),
        ("--metrics-port x", "--metrics-port"),
        ("--http-port 9000 --grpc-port 9000", "Give --grpc-port another number"),
        ("--adapter mine", "--adapter takes NAME=DIR"),
        ("--adapter pirate=.", "there is an adapter 'pirate' already"),
        ("--registry /no/such/file", "--registry: /no/such/file"),
        ("--registry x --adapter mine=.", "with --registry, add it to that file"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, one line with the option as it was typed, and nothing is made in the cache."""
    refused(["--check", *options.split()], words, tmp_path, monkeypatch, capsys)


def test_a_prompt_that_nobody_would_see_answered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up --json` serves and asks nothing."""
    refused(["--json", "--prompt", "hi"], "ask by --check --json", tmp_path, monkeypatch, capsys)


def refused(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`up` ends with 1 and one line that has the words, before it makes anything."""
    monkeypatch.setenv("LORA_SLOTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["lora-slots", "up", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().err
    assert left.value.code == 1
    assert said.startswith("lora-slots: ")
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_the_systems_errors_are_told_without_their_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no part has put into words of its own: the file and the reason, exit code 1."""

    def full() -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")

    monkeypatch.setattr("lora_slots.address.find", full)
    monkeypatch.setattr(sys, "argv", ["lora-slots", "slots", "status"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    assert capsys.readouterr().err == "lora-slots: /some/file: No space left on device\n"
