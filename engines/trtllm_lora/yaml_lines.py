"""YAML with the line of every key, so that a complaint can say where. Duplicate keys are complaints, not overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_OF_TAGS = (AttributeError, IndexError, KeyError, TypeError)
"""What PyYAML raises where a tag (`!!int ""`) does not fit its value."""
Where = tuple[str | int, ...]
"""Path of a value in a document: keys and indices."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a file: where, what, and what to write instead."""

    file: str
    line: int
    where: str
    """Dotted path of the value, "" for the whole file."""
    what: str
    write: str = ""
    """What to write instead; "" if the text says it already."""
    warning: bool = False
    """True: it works, but hardly as meant."""
    rule: str = ""
    """Name of the rule that is broken; "" where the file itself, or one field alone, is wrong."""

    def __str__(self) -> str:
        """`file:line: where: what; write … [rule]`, one line."""
        place = f"{self.file}:{self.line}: " + (f"{self.where}: " if self.where else "")
        what = ("warning: " if self.warning else "") + self.what + (f"; {self.write}" if self.write else "")
        return place + what + (f" [{self.rule}]" if self.rule else "")


@dataclass(slots=True)
class Document:
    """A parsed YAML file."""

    file: str
    data: Any = None
    lines: dict[Where, int] = field(default_factory=dict)
    """Path of each value -> line (from 1) of its key or item."""
    problems: list[Problem] = field(default_factory=list)

    def line(self, where: Where) -> int:
        """Line of a value, or of the nearest mapping around it; 1 for the file."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)

    def problem(self, where: Where, what: str, write: str = "", *, warning: bool = False, rule: str = "") -> Problem:
        """A problem at a place of this document."""
        dotted = ".".join(str(step) for step in where)
        return Problem(self.file, self.line(where), dotted, what, write, warning, rule)


def read_yaml(path: Path) -> Document:
    """Read a file; what is wrong with it as YAML is in `problems`, and `data` is then None. Never raises."""
    document = Document(str(path))
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            document.problems.append(document.problem((), "is no file"))
            return document
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        document.problems.append(document.problem((), error.strerror or str(error)))
        return document
    except UnicodeDecodeError:
        document.problems.append(document.problem((), "not UTF-8 text"))
        return document
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):  # a few can stand for billions of values, or for themselves
                line = event.start_mark.line + 1 if event.start_mark else 1
                what = f"*{event.anchor} stands for another value"
                document.problems.append(Problem(document.file, line, "", what, "write that value out"))
                return document
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        document.data = yaml.safe_load(text) if root is not None else None
    except (yaml.YAMLError, RecursionError, ValueError, *_OF_TAGS) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        document.problems.append(Problem(document.file, line, "", f"not YAML: {what}"))
        return document
    if root is not None:
        _walk(root, (), document)
    if not isinstance(document.data, Mapping):
        document.problems.append(document.problem((), "a mapping of keys is expected"))
        document.data = None
    return document


def _walk(node: yaml.Node, where: Where, document: Document) -> None:
    document.lines.setdefault(where, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*where, str(key.value))
            if place in document.lines:
                first = document.lines[place]
                line = key.start_mark.line + 1
                dotted = ".".join(map(str, place))
                document.problems.append(
                    Problem(document.file, line, dotted, f"is there twice (first in line {first})")
                )
            document.lines[place] = key.start_mark.line + 1
            _walk(value, place, document)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            document.lines[(*where, i)] = item.start_mark.line + 1
            _walk(item, (*where, i), document)
