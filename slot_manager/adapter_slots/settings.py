"""Settings of a slot manager as Triton hands them over: the `parameters` of `lora_router/config.pbtxt`.

Every wrong or unknown value is named at once. Seconds unless the name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from adapter_slots.policy import POLICIES
from adapter_slots.pools import Pools
from adapter_slots.records import MachineConfig, Timing
from trtllm_lora import CacheGeometry, ContractError, EngineShape
from trtllm_lora.geometry import DEFAULT_HOST_BYTES, DEFAULT_MAX_RANK, DEFAULT_OPTIMAL_RANK

FIRST_TOKEN_S = 30.0


class SettingsError(ValueError):
    """The parameters of `lora_router` cannot be used; the message lists every reason, `problems` one by one."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Settings(Timing):
    """What `lora_router` is told. Parameter names are the field names."""

    engine_dir: str
    """Directory (or config.json) of the engine behind `tensorrt_llm`."""
    registry: str
    """`adapters.yaml`: a file, or s3://bucket/key."""
    engine_url: str
    """gRPC host:port of the Triton that serves `tensorrt_llm`."""
    registry_refresh_s: float = 0.0
    """Look for a changed registry at most this often; 0: every tick for a file, every 10 s in an object store."""
    base_model: str | None = None
    """`name@revision` of the base the engine was built from: adapters trained on another one are refused. Without it
    the registry's `base_model` counts."""
    num_slots: int = 8
    """Adapters in the engine's working set at most."""
    host_bytes: int = 2 * 2**30
    """Bytes of adapters in shared memory at most."""
    policy: str = "lru"
    """lru or gdsf."""
    cold: str = "wait"
    """What a request for a cold adapter does unless it says otherwise: wait or fail."""
    wait_s: float = 30.0
    """A request waits this long at most for its adapter."""
    first_token_s: float = FIRST_TOKEN_S
    """The engine may take this long to begin an answer. A lease whose end nobody reports is given up this long, and
    four times what its longest answer takes, after it was granted."""
    bind_timeout_s: float = 60.0
    to_disk_timeout_s: float = 120.0
    to_host_timeout_s: float = 30.0
    disk_dir: str | None = None
    """Where remote adapters are kept on this machine; without it all must be beside the registry."""
    disk_bytes: int = 64 * 2**30
    s3_endpoint_url: str | None = None
    """For S3 that is not AWS; credentials come from where AWS tools look for them."""
    base_dir: str | None = None
    """The base model's directory, or config.json, by which raw PEFT adapters are converted."""
    state_file: str | None = None
    """Keeps the warm set over restarts."""
    lora_cache_host_memory_bytes: int = DEFAULT_HOST_BYTES
    """As given to `tensorrt_llm`: the two must agree, or the mirror is wrong."""
    lora_cache_optimal_adapter_size: int = DEFAULT_OPTIMAL_RANK
    lora_cache_max_adapter_size: int = DEFAULT_MAX_RANK
    lora_cache_device_pages: int | None = None
    """Pages of the device cache where known (the engine's log says); None: the host cache decides."""

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> Settings:
        """Settings from Triton's string parameters; an empty string means "not given".

        Raises:
            SettingsError: unknown, missing or unreadable parameters, all of them.
        """
        known = {f.name: str(f.type) for f in fields(cls)}
        given = {key: text for key, text in parameters.items() if text.strip()}
        problems = [f"{key}: no such parameter" for key in sorted(set(given) - set(known))]
        values: dict[str, str | int | float] = {}
        for name, kind in known.items():
            if name not in given:
                continue
            try:
                read = str if kind.startswith("str") else float if kind == "float" else int
                values[name] = read(given[name])
            except ValueError:
                problems.append(f"{name}: a number is expected, found {given[name]!r}")
        missing = [name for name in ("engine_dir", "registry", "engine_url") if name not in values]
        problems += [f"{name}: missing" for name in missing if name not in {p.split(":")[0] for p in problems}]
        choices: dict[str, tuple[str, ...]] = {"policy": tuple(POLICIES), "cold": ("wait", "fail")}
        problems += [
            f"{name}: {values[name]!r} is none of {', '.join(allowed)}"
            for name, allowed in choices.items()
            if values.get(name, allowed[0]) not in allowed
        ]
        problems += [
            f"{name}: {what} is expected, found {given[name]!r}"
            for name, value in values.items()
            if not isinstance(value, str) and (what := _unusable(name, value, known[name]))
        ]
        if problems:
            raise SettingsError("lora_router parameters: " + "; ".join(problems), problems)
        return cls(**values)  # type: ignore[arg-type]

    def shape(self) -> EngineShape:
        """The engine, from its `config.json`. Raises SettingsError."""
        try:
            return EngineShape.from_engine_config(Path(self.engine_dir))
        except ContractError as error:
            raise SettingsError(f"lora_router: {error}") from None

    def geometry(self, shape: EngineShape) -> CacheGeometry:
        """Page layout of the engine's LoRA cache. Raises SettingsError."""
        try:
            return CacheGeometry.of(
                shape,
                optimal_rank=self.lora_cache_optimal_adapter_size,
                max_rank=self.lora_cache_max_adapter_size,
            )
        except ContractError as error:
            raise SettingsError(f"lora_router: {error}") from None

    def machine(self, geometry: CacheGeometry, pools: Pools) -> MachineConfig:
        """Bounds of the slot machine. Raises SettingsError."""
        try:
            pages = geometry.num_pages(self.lora_cache_host_memory_bytes)
            return MachineConfig(
                num_slots=self.num_slots,
                cache_pages=min(pages, self.lora_cache_device_pages or pages),
                host_bytes=self.host_bytes,
                pools=pools,
                **{f.name: getattr(self, f.name) for f in fields(Timing)},
            )
        except (ContractError, ValueError) as error:
            raise SettingsError(f"lora_router: {error}") from None


def _unusable(name: str, value: int | float, kind: str) -> str:
    """What is expected instead of a number with which nothing could be done; "" if it is good."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    least: float = 1 if kind.startswith("int") and name != "low_watermark" else 0
    least = 0.001 if name == "tick_s" else least
    return f"at least {least:g}" if value < least else ""
