"""The text of `adapters.yaml` <-> plain data, quickly, with the line of anything that is wrong.

A registry may have tens of thousands of entries and is read while requests are served. So data is made from libyaml's
events: several times as fast as from PyYAML's nodes, and without the hundreds of thousands of objects over which the
garbage collector would hold up every other thread. Nodes are made only where they are needed: for a text with anchors,
and to find the lines of problems. A key that is there twice is a complaint: YAML would drop the first one silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PROBLEMS = 20
"""Problems told at once; the rest is counted."""
_DEPTH = 32
"""Lists and mappings within each other at most; a registry has six."""
_TEXT, _INT, _MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "merge"))
_NO_KEY = object()

Where = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    where: Where
    what: str


class TextError(ValueError):
    """The text is not YAML; the message is one line, and says where, mostly."""

    @property
    def line(self) -> int:
        """Line (from 1) of what is wrong; 1 where the message does not say it."""
        lines: list[str] = re.findall(r"\bline (\d+)", str(self))
        return int(lines[-1]) if lines else 1


class Document:
    """A parsed text: its data, and where everything in it stands."""

    def __init__(self, text: str) -> None:
        """Raises TextError."""
        self._text = text
        self._twice: list[tuple[int, str]] = []
        loader = None
        try:
            loader = _LOADER(text)
            self.data: Any = self._from_events(loader)
        except _Anchors:
            self.data = self._from_nodes()
        except (
            yaml.YAMLError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # dates and tags raise what Python does
            raise _text_error(error) from None
        finally:
            if loader is not None:
                loader.dispose()

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

    def told(self, problems: Iterable[Problem]) -> list[tuple[int, str]]:
        """Problems and duplicate keys in the order of their lines: each with its line, and its place and what it is."""
        told = self._twice + [(self.line(p.where), _dotted(p.where) + p.what) for p in problems]
        return sorted(told, key=lambda pair: pair[0])

    def tell(self, problems: Iterable[Problem]) -> str:
        """The same as one line."""
        lines = [f"line {line}: {what}" for line, what in self.told(problems)]
        return "; ".join(lines[:_PROBLEMS]) + (f"; and {len(lines) - _PROBLEMS} more" if len(lines) > _PROBLEMS else "")

    @cached_property
    def _root(self) -> yaml.Node | None:
        root: yaml.Node | None = yaml.compose(self._text, Loader=_LOADER)
        return root

    def _from_events(self, loader: Any) -> Any:
        """One pass; `within` is the list or mapping being filled, `key` its key that has no value yet."""
        root, documents = None, 0
        within: Any = None
        key: Any = _NO_KEY
        stack: list[Any] = []
        plain: dict[str, Any] = {}
        while True:
            event = loader.get_event()
            kind = type(event)
            if kind is yaml.ScalarEvent:
                value = _scalar(loader, event, plain)
                if isinstance(within, dict) and key is _NO_KEY:
                    if value in within:
                        self._twice.append((event.start_mark.line + 1, f"{str(value)[:60]!r} is there twice"))
                    key = value
                    continue
            elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
                value = _collection(event, len(stack), is_key=isinstance(within, dict) and key is _NO_KEY)
            elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                within = stack.pop()
                continue
            elif kind is yaml.StreamEndEvent:
                return root
            elif kind is yaml.AliasEvent:
                raise _Anchors
            else:
                documents += kind is yaml.DocumentStartEvent
                if documents > 1:
                    raise TextError(f"line {event.start_mark.line + 1}: one document is expected")
                continue
            if isinstance(within, dict):
                within[key] = value
                key = _NO_KEY
            elif within is None:
                root = value
            else:
                within.append(value)
            if kind is not yaml.ScalarEvent:
                stack.append(within)
                within = value

    def _from_nodes(self) -> Any:
        """With anchors, aliases, merge keys and tags, as PyYAML reads them; duplicates of merged keys are meant."""
        try:
            data = yaml.load(self._text, Loader=_LOADER)  # noqa: S506 - a safe one
            self._find_duplicates()
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            raise _text_error(error) from None
        return data

    def _find_duplicates(self) -> None:
        seen: set[int] = set()
        stack = [self._root]
        while stack:
            node = stack.pop()
            if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
                continue
            seen.add(id(node))  # an anchor's node is met again at each of its aliases
            if isinstance(node, yaml.SequenceNode):
                stack += node.value
                continue
            keys: set[str] = set()
            for name, value in node.value:
                if name.value in keys and isinstance(name, yaml.ScalarNode):
                    self._twice.append((name.start_mark.line + 1, f"{name.value[:60]!r} is there twice"))
                keys.add(str(name.value))
                stack.append(value)


class _Anchors(Exception):
    """The text is one for nodes."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, _data: Any) -> bool:
        """One list used twice is written twice: anchors are for machines."""
        return True


def dump(data: Mapping[str, Any]) -> str:
    """The text of a document: sorted, so that two of them compare well line by line."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=True, allow_unicode=True, width=120)
    return text


def _collection(event: Any, depth: int, *, is_key: bool) -> dict[Any, Any] | list[Any]:
    if event.anchor or not event.implicit:
        raise _Anchors
    if is_key:
        raise TextError(f"line {event.start_mark.line + 1}: a key is a name or a number")
    if depth >= _DEPTH:
        raise TextError(f"line {event.start_mark.line + 1}: more than {_DEPTH} lists within each other")
    return {} if type(event) is yaml.MappingStartEvent else []


def _scalar(loader: Any, event: Any, plain: dict[str, Any]) -> Any:
    """A scalar's value; `plain` keeps those of texts without quotes, most of which come again and again."""
    if event.anchor:
        raise _Anchors
    text = event.value
    if event.implicit[0] and text in plain:
        return plain[text]
    value = _read_scalar(loader, event, text)
    if event.implicit[0]:
        plain[text] = value
    return value


def _read_scalar(loader: Any, event: Any, text: str) -> Any:
    if not event.implicit[0]:
        if event.tag is None or event.tag == "!":
            return text  # in quotes
        return loader.construct_object(yaml.ScalarNode(event.tag, text, event.start_mark, event.end_mark))
    tag = loader.resolve(yaml.ScalarNode, text, event.implicit)
    if tag == _TEXT:
        return text
    if tag == _INT and text.isdecimal() and text[0] != "0":
        return int(text)
    if tag == _MERGE:
        raise _Anchors
    return loader.construct_object(yaml.ScalarNode(tag, text, event.start_mark, event.end_mark))


def _text_error(error: Exception) -> TextError:
    text = " ".join(str(error).split())
    return TextError(text if isinstance(error, TextError) else f"not YAML: {text or type(error).__name__}")


def _dotted(where: Where) -> str:
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step}"
    return f"{text[:120]}: " if text else ""
