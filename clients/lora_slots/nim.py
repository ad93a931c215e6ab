"""Settings from the environment: our own names, and those of NIM 1.x, so that deployments move by changing the image.

An option (a parameter of `lora_router`, an option of `lora-slots up`) goes before LORA_SLOTS_*, that before NIM_*. Any
wrong value is named with its variable, all at once. Other LORA_SLOTS_* are left alone: Kubernetes makes some for a
service of that name.

    LORA_SLOTS_<NAME>           the parameter <name> of lora_router (adapter_slots.Settings)
    LORA_SLOTS_PEFT_SOURCE      NIM_PEFT_SOURCE            directory, or s3://bucket/prefix, of a folder per adapter
    LORA_SLOTS_PEFT_REFRESH_S   NIM_PEFT_REFRESH_INTERVAL  look for changes of it so often, seconds; not set: never
    LORA_SLOTS_NUM_SLOTS        NIM_MAX_GPU_LORAS          adapters in slots at most
    LORA_SLOTS_HOST_ADAPTERS    NIM_MAX_CPU_LORAS          adapters in host memory at most, of the largest size there is
    LORA_SLOTS_MAX_LORA_RANK    NIM_MAX_LORA_RANK          adapters of a higher rank are refused
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from adapter_slots.settings import Settings, SettingsError
from trtllm_lora import EngineShape
from trtllm_lora.modules import dims
from trtllm_lora.shape import ITEM_BYTES

PREFIX = "LORA_SLOTS_"
NIM_NAMES: Mapping[str, str] = {
    "peft_source": "NIM_PEFT_SOURCE",
    "peft_refresh_s": "NIM_PEFT_REFRESH_INTERVAL",
    "num_slots": "NIM_MAX_GPU_LORAS",
    "host_adapters": "NIM_MAX_CPU_LORAS",
    "max_lora_rank": "NIM_MAX_LORA_RANK",
}
"""Our name -> NIM's."""
_CONFIG_ROW_BYTES = 16
_REGION_BYTES = 4096
"""What an adapter takes in shared memory beside its weights and rows."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says. Variables are kept for messages."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of `lora_router`, as text."""
    peft_source: str | None = None
    peft_refresh_s: float | None = None
    host_adapters: int | None = None
    max_lora_rank: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Our name -> the variable that was taken."""

    def check_rank(self, shape_rank: int) -> None:
        """Raise SettingsError if a higher rank is asked for than the engine was built for."""
        if self.max_lora_rank is not None and self.max_lora_rank > shape_rank:
            raise SettingsError(
                f"{self.variables['max_lora_rank']}={self.max_lora_rank}: the engine was built for ranks up to "
                f"{shape_rank}; a higher one needs another engine"
            )

    def host_bytes(self, shape: EngineShape) -> int | None:
        """Room in host memory for `host_adapters` of the largest adapters; None if it was not asked for."""
        if self.host_adapters is None:
            return None
        rank = min(self.max_lora_rank or shape.max_lora_rank, shape.max_lora_rank)
        width = rank * max(sum(dims(module, shape)) for module in shape.lora_modules)  # every row is padded to it
        rows = shape.num_layers * len(shape.lora_modules)
        return self.host_adapters * (rows * (width * ITEM_BYTES[shape.dtype] + _CONFIG_ROW_BYTES) + _REGION_BYTES)

    def completed(self, given: Mapping[str, str], shape: Callable[[str], EngineShape]) -> dict[str, str]:
        """Parameters of `lora_router` as given, and what they leave out from the environment.

        Args:
            shape: reads the engine in a directory.

        Raises:
            SettingsError: the environment and the engine contradict each other.
        """
        merged = {**self.parameters, **{name: text for name, text in given.items() if text.strip()}}
        if "engine_dir" in merged and (self.max_lora_rank is not None or self.host_adapters is not None):
            engine = shape(merged["engine_dir"])
            self.check_rank(engine.max_lora_rank)
            if "host_bytes" not in merged and (room := self.host_bytes(engine)) is not None:
                merged["host_bytes"] = str(room)
        return merged

    def told(self, error: SettingsError) -> SettingsError:
        """The error of a parameter, with the variable that it came from."""
        came = [f"{name} is from {self.variables[name]}" for name in self.parameters if f"{name} " in f"{error}:"]
        return SettingsError(f"{error} ({'; '.join(came)})") if came else error


def read(environ: Mapping[str, str]) -> Environment:
    """What `environ` says. Raises SettingsError: every value that cannot be used, with its variable."""
    texts: dict[str, tuple[str, str]] = {}
    kinds = {f.name: str(f.type) for f in fields(Settings)}
    for name in (*kinds, *(name for name in NIM_NAMES if name not in kinds)):
        for variable in filter(None, (f"{PREFIX}{name.upper()}", NIM_NAMES.get(name))):
            if environ.get(variable, "").strip():
                texts[name] = variable, environ[variable].strip()
                break
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, (variable, text) in texts.items():
        try:
            values[name] = _EXTRA[name](text) if name in _EXTRA else _parameter(name, text)
        except ValueError as error:
            problems.append(f"{variable}={text[:80]}: {error}")
    problems += _contradictions(texts, values)
    if problems:
        raise SettingsError("\n".join(problems))
    return Environment(
        parameters={name: texts[name][1] for name in values if name in kinds},
        **{name: value for name, value in values.items() if name not in kinds},
        variables={name: variable for name, (variable, _) in texts.items()},
    )


def _contradictions(texts: Mapping[str, tuple[str, str]], values: Mapping[str, Any]) -> list[str]:
    found = []
    gpu, cpu = values.get("num_slots"), values.get("host_adapters")
    if gpu is not None and cpu is not None and cpu < gpu:
        found.append(f"{texts['host_adapters'][0]}={cpu}: must not be below {texts['num_slots'][0]}={gpu}")
    both = [texts[name][0] for name in ("registry", "peft_source") if name in texts]
    if len(both) == 2 and all(variable.startswith(PREFIX) for variable in both):
        found.append(f"{both[0]} and {both[1]} both say where adapters come from: give one of the two")
    if "host_bytes" in values and cpu is not None and texts["host_adapters"][0].startswith(PREFIX):
        found.append(f"{texts['host_bytes'][0]} and {texts['host_adapters'][0]} say the same: give one of the two")
    return found


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("a whole number, 1 or more, is expected")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (math.isfinite(number) and number > 0):
        raise ValueError("a number of seconds above 0 is expected")
    return number


def _source(text: str) -> str:
    scheme = text.partition("://")[0] if "://" in text else ""
    if scheme in ("http", "https"):
        raise ValueError(
            "an entity store cannot be read; a directory or s3://bucket/prefix of a folder for each adapter can"
        )
    if scheme not in ("", "s3") or (scheme == "s3" and not text.removeprefix("s3://").strip("/")):
        raise ValueError("a directory, or s3://bucket/prefix, is expected")
    return text


def _parameter(name: str, text: str) -> Any:
    """A parameter's value, by the rules of Settings. Raises ValueError."""
    needed = {"engine_dir": "-", "registry": "-", "engine_url": "-"}
    try:
        return getattr(Settings.parse({**needed, name: text}), name)
    except SettingsError as error:
        raise ValueError(str(error).partition(f"{name}: ")[2]) from None


_EXTRA: Mapping[str, Callable[[str], Any]] = {
    "peft_source": _source,
    "peft_refresh_s": _seconds,
    "host_adapters": _count,
    "max_lora_rank": _count,
    "num_slots": _count,
}
"""How what Settings does not know, or knows less strictly, is read."""
