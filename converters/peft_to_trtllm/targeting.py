"""Which modules and parameters the config says were adapted, beside what the file holds.

A module is targeted by the rules of PEFT 0.21 (`tuners/tuners_utils.py` check_target_module_exists), in this order:

    exclude_modules       a list: the path, or a tail of it after a dot; a string: re.fullmatch. Never targeted
    target_modules        null: by family, or nothing beside target_parameters; a string: re.fullmatch;
                          a list: the whole path (whatever the layer), or a tail of it after a dot in a layer of
    layers_to_transform   a number or a list; empty or null is every layer
    layers_pattern        names the list of layers; without it the first number of the path is the layer

`target_parameters` (PEFT 0.17 and later) wraps single parameters whatever the other fields say, and PEFT then looks
rank_pattern and alpha_pattern up under `<module>.<parameter>`, not `<module>`.

The tensors say better than the config where LoRA is, so both differences are things to know and refuse nothing: PEFT
passes over tensors of modules that are not targeted, and leaves modules without tensors as the base has them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from peft_to_trtllm.families import leaf_name
from peft_to_trtllm.keys import Place
from peft_to_trtllm.report import Findings, Report, ranges
from peft_to_trtllm.scale import complexity, cost_of

_MATCHING_SECONDS = 2.0
_MOST_NAMES, _MOST_PATTERNS = 4096, 64
_MOST_LEAVES, _MOST_LAYERS = 256, 1024
"""Of which the absent tensors are looked for: more than any model has."""
_MOST_STEPS = 4 * 10**9
"""Of one match of a pattern, at worst. What trainers write for vision-language models, with 4 open repetitions and 7
choices, stays below it on a path of 70 characters, and takes microseconds there."""

_Test = Callable[[str], bool]


class Targeting:
    """The fields of one config, checked; what cannot be read goes into the problems or the warnings."""

    def __init__(self, config: Mapping[str, Any], report: Report) -> None:
        self._warnings = report.warnings
        self._deadline = time.monotonic() + _MATCHING_SECONDS
        self._parameters: dict[str, set[str]] = {}
        for name in _names(config.get("target_parameters"), "target_parameters", report.problems):
            module, _, parameter = name.rpartition(".")
            self._parameters.setdefault(module, set()).add(parameter)
        targets = config.get("target_modules")
        self._names: Sequence[str] = ()
        if isinstance(targets, list):
            self._names = _names(targets, "target_modules", report.problems)
        elif targets is not None and not isinstance(targets, str):
            _names(targets, "target_modules", report.problems)
        self._is_targeted = self._targeted_by(config, targets)
        excluded = config.get("exclude_modules")
        if isinstance(excluded, str) and excluded:
            self._is_excluded = self._pattern(excluded, "exclude_modules", unknown=False) or _never
        else:
            self._is_excluded = _in(_names(excluded or None, "exclude_modules", report.problems))
        self._note_what_peft_rejects(config)

    def parameters(self, path: str) -> list[str]:
        """Names of the parameters of the module at `path` that target_parameters names; usually none."""
        if not self._parameters:
            return []
        found = (self._parameters.get(module, ()) for module in ("", *_tails(path)))
        return sorted({parameter for parameters in found for parameter in parameters})

    def covers(self, path: str) -> bool:
        """Whether PEFT, by this config, would put an adapter on a module; true where that cannot be told."""
        if self.parameters(path):
            return True
        return not self._is_excluded(path) and (self._is_targeted is None or self._is_targeted(path))

    def note_absent(self, modules: Iterable[tuple[str, Place]], num_layers: int | None, *, alike: bool) -> None:
        """Tell of modules that are targeted and have no tensors.

        Args:
            modules: path and place of every module of the file.
            num_layers: of the base, if known; else the file's highest layer is taken for the last.
            alike: whether every layer of the base has the same modules.
        """
        seen = _Seen.of(modules)
        if not seen.paths:
            return
        advice = "PEFT leaves them as the base has them; a file with all its tensors, if it was to have some"
        known = set(self._names)
        for path in seen.paths:
            known.difference_update(_tails(path))
        absent = [name for name in self._names if name in known]
        if absent:
            found = f"no tensor of {', '.join(absent[:8])}" + (f" and {len(absent) - 8} more" if absent[8:] else "")
            self._warnings.add("absent", "adapter_config.json target_modules", found, advice)
        if self._is_targeted is None or not alike or len(seen.layers) > _MOST_LEAVES:
            return
        count = num_layers or 1 + max(layer for there in seen.layers.values() for layer in there)
        every = range(min(count, _MOST_LAYERS))
        for (head, leaf), there in seen.layers.items():
            missing = [layer for layer in every if layer not in there and self.covers(f"{head}.{layer}.{leaf}")]
            if missing:
                found = f"no tensors in layers {ranges(missing)}, where the config targets it as well"
                self._warnings.add("absent", leaf, found, advice)

    def _targeted_by(self, config: Mapping[str, Any], targets: Any) -> _Test | None:
        """The test of target_modules and the layers; None where it cannot be told."""
        if targets is None:
            return None if config.get("target_parameters") is None else _never
        if isinstance(targets, str):
            return None if targets.lower() == "all-linear" else self._pattern(targets, "target_modules", unknown=True)
        whole, tails, in_layer = frozenset(self._names), _in(self._names), self._layer_test(config)
        return lambda path: path in whole or (tails(path) and in_layer(path))

    def _layer_test(self, config: Mapping[str, Any]) -> _Test:
        layers = config.get("layers_to_transform")
        wanted = layers if isinstance(layers, list) else [layers]
        if layers is None or not wanted or not all(type(item) is int for item in wanted):
            return lambda _: True
        names = config.get("layers_pattern") or []
        names = [names] if isinstance(names, str) else names
        patterns = [re.compile(r".*?\.[^.]*\.(?P<layer>\d+)\.")]
        if names:
            if not isinstance(names, list) or len(names) > _MOST_PATTERNS:
                return lambda _: True
            if any(not isinstance(name, str) or self._costly(name) for name in names):
                return lambda _: True
            try:
                patterns = [re.compile(rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\.") for name in names]
            except re.error as error:  # whole in itself, but not beside a group of that name
                self._note_cost(str(names), "layers_pattern", f"is not a valid regular expression: {error}")
                return lambda _: True

        numbers = frozenset(wanted)

        def in_layer(path: str) -> bool:
            if time.monotonic() >= self._deadline:
                return True
            found = next((match for pattern in patterns if (match := pattern.match(path))), None)
            return found is not None and int(found["layer"]) in numbers

        return in_layer

    def _pattern(self, pattern: str, field: str, *, unknown: bool) -> _Test | None:
        """re.fullmatch, or None for a pattern that is not to be run; `unknown` where a match would take too long."""
        cost = complexity(pattern, pattern)
        if isinstance(cost, str):
            self._note_cost(pattern, field, cost)
            return None
        (open_repeats, choices), compiled = cost, re.compile(pattern)

        def test(path: str) -> bool:
            if len(path) ** open_repeats << choices > _MOST_STEPS or time.monotonic() >= self._deadline:
                return unknown
            return compiled.fullmatch(path) is not None

        return test

    def _costly(self, pattern: str) -> bool:
        reason = cost_of(pattern)
        if reason:
            self._note_cost(pattern, "layers_pattern", reason)
        return reason is not None

    def _note_cost(self, pattern: str, field: str, reason: str) -> None:
        found = f"the pattern {pattern[:80]!r} {reason}"
        advice = "what the file holds is converted, whatever this pattern says"
        self._warnings.add("targets", f"adapter_config.json {field}", found, advice)

    def _note_what_peft_rejects(self, config: Mapping[str, Any]) -> None:
        is_pattern = isinstance(config.get("target_modules"), str)
        for field in ("layers_to_transform", "layers_pattern"):
            if is_pattern and config.get(field) is not None:
                found = f"{field} beside a target_modules that is a pattern"
                self._warnings.add("targets", f"adapter_config.json {field}", found, "PEFT does not load such a config")
        if config.get("layers_pattern") and config.get("layers_to_transform") is None:
            found, advice = "layers_pattern without layers_to_transform", "PEFT does not load such a config"
            self._warnings.add("targets", "adapter_config.json layers_pattern", found, advice)


class _Seen(NamedTuple):
    """The modules of a file: their paths, and in which layers each stands (one expert for all)."""

    paths: list[str]
    layers: Mapping[tuple[str, str], set[int]]
    """(path before the layer's number, path after it) -> layers."""

    @classmethod
    def of(cls, modules: Iterable[tuple[str, Place]]) -> _Seen:
        paths: list[str] = []
        layers: dict[tuple[str, str], set[int]] = {}
        leaves: dict[tuple[str, str], str] = {}
        for path, place in modules:
            leaf = ".".join(place.leaf)
            head = path[: -len(f".{place.layer}.{leaf}")]
            paths.append(path)
            leaf = leaves.setdefault((head, leaf_name(leaf)), leaf)
            layers.setdefault((head, leaf), set()).add(place.layer)
        return cls(paths, layers)


def _never(_path: str) -> bool:
    return False


def _in(names: Sequence[str]) -> _Test:
    """Whether a path, or a tail of it after a dot, is one of some names."""
    known = frozenset(names)

    return lambda path: any(tail in known for tail in _tails(path))


def _tails(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _names(value: Any, field: str, problems: Findings) -> tuple[str, ...]:
    if value is None:
        return ()
    good = isinstance(value, list) and len(value) <= _MOST_NAMES and all(isinstance(item, str) for item in value)
    if good:
        return tuple(value)
    text = repr(value)[:80]
    problems.add("field-type", f"adapter_config.json {field}", f"{field} is {text}", f"at most {_MOST_NAMES} names")
    return ()
