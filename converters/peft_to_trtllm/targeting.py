"""Which modules and parameters the config says were adapted.

`target_parameters` (PEFT 0.17 and later) wraps single parameters, and PEFT then looks rank_pattern and alpha_pattern up
under `<module>.<parameter>`, not `<module>`. A name matches a whole tail of the path: `x == name` or `x` ends in
`.name`. Source: PEFT 0.21 `tuners/tuners_utils.py` (`_inject_parameters`, `check_target_module_exists`).

What the config leaves out and the file holds is a thing to know: PEFT passes over such tensors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from peft_to_trtllm.report import Findings, Report
from peft_to_trtllm.scale import cost_of

_MATCHING_SECONDS = 2.0
_MOST_NAMES = 4096


class Targeting:
    """The four fields of one config, checked; what cannot be read goes into `problems` or the warnings."""

    def __init__(self, config: Mapping[str, Any], report: Report) -> None:
        self._parameters = _names(config.get("target_parameters"), "target_parameters", report.problems)
        self._names: frozenset[str] | None = None
        self._pattern: re.Pattern[str] | None = None
        self._layers = _layers(config.get("layers_to_transform"))
        self._deadline = time.monotonic() + _MATCHING_SECONDS
        modules = config.get("target_modules")
        if isinstance(modules, str):
            self._read_pattern(modules, report.warnings)
        elif modules:
            self._names = frozenset(_names(modules, "target_modules", report.problems))

    def parameters(self, path: str) -> list[str]:
        """Names of the parameters of the module at `path` that target_parameters names; usually none."""
        found = []
        for name in self._parameters:
            module, _, parameter = name.rpartition(".")
            if not module or _is_tail(module, path):
                found.append(parameter)
        return sorted(set(found))

    def covers(self, path: str, layer: int) -> bool:
        """Whether PEFT, by this config, would put an adapter here; true where that cannot be told."""
        if self.parameters(path):
            return True
        if self._names is not None:
            tails = path.split(".")
            named = any(".".join(tails[i:]) in self._names for i in range(len(tails)))
            return named and (self._layers is None or layer in self._layers)
        if self._pattern is not None and time.monotonic() < self._deadline:
            return self._pattern.fullmatch(path) is not None
        return True

    def _read_pattern(self, pattern: str, warnings: Findings) -> None:
        if pattern.lower() == "all-linear":
            return
        reason = cost_of(pattern)
        if reason:
            found = f"the pattern {pattern[:80]!r} {reason}"
            advice = "every module of the file is converted, whatever this pattern says"
            warnings.add("targets", "adapter_config.json target_modules", found, advice)
            return
        self._pattern = re.compile(pattern)


def _is_tail(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _layers(value: Any) -> frozenset[int] | None:
    values = value if isinstance(value, list) else [value]
    if not value and value != 0:
        return None
    return frozenset(values) if all(type(item) is int for item in values) else None


def _names(value: Any, field: str, problems: Findings) -> tuple[str, ...]:
    if value is None:
        return ()
    good = isinstance(value, list) and len(value) <= _MOST_NAMES and all(isinstance(item, str) for item in value)
    if good:
        return tuple(value)
    text = repr(value)[:80]
    problems.add("field-type", f"adapter_config.json {field}", f"{field} is {text}", f"at most {_MOST_NAMES} names")
    return ()
