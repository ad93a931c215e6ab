"""The text of `adapters.yaml` <-> plain data, quickly, with the line of anything that is wrong.

libyaml's parser is ten times as fast as Python's, and a registry may have tens of thousands of entries. A key that is
there twice is a complaint: YAML would drop the first one silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_PROBLEMS = 20
"""Problems told at once; the rest is counted."""

Where = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    where: Where
    what: str


class TextError(ValueError):
    """The text is not YAML; the message is one line."""


class Document:
    """A parsed text: its data, and the nodes it was made of, for lines."""

    def __init__(self, text: str) -> None:
        """Raises TextError."""
        loader = _LOADER(text)
        try:
            self._root: yaml.Node | None = loader.get_single_node()
            self.data: Any = loader.construct_document(self._root) if self._root is not None else None
        except (
            yaml.YAMLError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # dates and tags raise what Python does
            raise TextError(f"not YAML: {' '.join(str(error).split())}") from None
        finally:
            loader.dispose()

    def duplicates(self) -> Iterator[Problem]:
        """Keys that are there twice."""
        seen: set[int] = set()
        stack: list[tuple[Where, yaml.Node | None]] = [((), self._root)]
        while stack:
            where, node = stack.pop()
            if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
                continue
            seen.add(id(node))  # an anchor's node is met again at each of its aliases
            if isinstance(node, yaml.SequenceNode):
                stack += [((*where, i), item) for i, item in enumerate(node.value)]
                continue
            keys: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in keys:
                    yield Problem((*where, name), f"{name!r} is there twice (again in line {key.start_mark.line + 1})")
                keys.add(name)
                stack.append(((*where, name), value))

    def line(self, where: Where) -> int:
        """Line (from 1) of a value's key, or of the nearest one around it."""
        node, line = self._root, 1
        for step in where:
            if isinstance(node, yaml.MappingNode):
                found = next(((k, v) for k, v in node.value if str(k.value) == str(step)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                found = (node.value[step], node.value[step])
            else:
                found = None
            if found is None:
                return line
            line, node = found[0].start_mark.line + 1, found[1]
        return line

    def tell(self, problems: list[Problem]) -> str:
        """Problems in the order of their lines, each with its line and its place."""
        told = sorted(((self.line(problem.where), problem) for problem in problems), key=lambda pair: pair[0])
        lines = [f"line {line}: {_dotted(p.where)}{p.what}" for line, p in told[:_PROBLEMS]]
        return "; ".join(lines) + (f"; and {len(told) - _PROBLEMS} more" if len(told) > _PROBLEMS else "")


def dump(data: Mapping[str, Any]) -> str:
    """The text of a document: sorted, in the form that is easy to compare line by line."""
    text: str = yaml.dump(data, Dumper=_DUMPER, sort_keys=True, allow_unicode=True, width=120)
    return text


def _dotted(where: Where) -> str:
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step}"
    return f"{text[:120]}: " if text else ""
