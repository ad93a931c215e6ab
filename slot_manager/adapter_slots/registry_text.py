"""The text of `adapters.yaml` <-> plain data, quickly, with the line of anything that is wrong.

A registry may have tens of thousands of entries and is read while requests are served: libyaml parses it, and the nodes
become data here, in one pass (PyYAML's own constructor takes twice as long). A key that is there twice is a complaint:
YAML would drop the first one silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PROBLEMS = 20
"""Problems told at once; the rest is counted."""
_TEXT, _INT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"
_MAP, _LIST, _MERGE = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:merge"

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
        self._twice: list[tuple[int, str]] = []
        self._made: dict[int, Any] = {}
        self._loader: Any = None
        try:
            self._loader = loader = _LOADER(text)
            self._root: yaml.Node | None = loader.get_single_node()
            self.data: Any = self._value(self._root) if self._root is not None else None
        except (
            yaml.YAMLError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # dates and tags raise what Python does
            raise TextError(f"not YAML: {' '.join(str(error).split())}") from None
        finally:
            if self._loader is not None:
                self._loader.dispose()
            self._loader = None
            self._made.clear()

    @property
    def has_duplicates(self) -> bool:
        """Whether a key is there twice; `tell` says which."""
        return bool(self._twice)

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

    def tell(self, problems: Iterable[Problem]) -> str:
        """Problems and duplicate keys in the order of their lines, each with its line and its place."""
        told = self._twice + [(self.line(p.where), _dotted(p.where) + p.what) for p in problems]
        lines = [f"line {line}: {what}" for line, what in sorted(told, key=lambda pair: pair[0])]
        return "; ".join(lines[:_PROBLEMS]) + (f"; and {len(lines) - _PROBLEMS} more" if len(lines) > _PROBLEMS else "")

    def _value(self, node: yaml.Node) -> Any:
        if node.tag == _TEXT:
            return node.value
        if node.tag == _INT and node.value.isdecimal() and node.value[0] != "0":
            return int(node.value)
        if node.tag == _LIST:
            made = self._made.get(id(node))
            if made is None:
                made = self._made[id(node)] = [self._value(item) for item in node.value]
            return made
        if node.tag == _MAP:
            made = self._made.get(id(node))
            if made is None:  # else an anchor's node, met again at one of its aliases
                made = self._made[id(node)] = self._mapping(node)
            return made
        if isinstance(node, yaml.ScalarNode):
            return self._loader.construct_object(node)
        raise TextError(f"{node.tag} in line {node.start_mark.line + 1} is not read")

    def _mapping(self, node: yaml.Node) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        merges = any(key.tag == _MERGE for key, _ in node.value)
        if merges:
            self._loader.flatten_mapping(node)
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise TextError(f"line {key.start_mark.line + 1}: a key is a name or a number")
            name = key.value if key.tag == _TEXT else self._value(key)
            if name in made and not merges:  # what is merged in is meant to be overridden
                self._twice.append((key.start_mark.line + 1, f"{str(name)[:60]!r} is there twice"))
            made[name] = self._value(value)
        return made


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, _data: Any) -> bool:
        """One list used twice is written twice: anchors are for machines."""
        return True


def dump(data: Mapping[str, Any]) -> str:
    """The text of a document: sorted, so that two of them compare well line by line."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=True, allow_unicode=True, width=120)
    return text


def _dotted(where: Where) -> str:
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step}"
    return f"{text[:120]}: " if text else ""
