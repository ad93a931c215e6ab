"""The settings of one embedded Triton, and the addresses it got."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"  # nothing of the embedded stack listens anywhere else


@dataclass(frozen=True)
class Ports:
    """The ports of the three doors of one server, all on the loopback address."""

    http: int
    grpc: int
    metrics: int

    def doors(self) -> tuple[tuple[str, int], ...]:
        """(door, port) for each door."""
        return (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics))


ANY = Ports(0, 0, 0)


@dataclass(frozen=True)
class StackConfig:
    """How to run the embedded Triton. Ports: 0 has a free one chosen; a number is used or refused."""

    model_repository: Path | Callable[[Ports], Path]
    """An ordinary Triton model repository, every model of which is loaded; or what makes one for the ports chosen,
    called again should a start have to be tried with others."""
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    usual_ports: Ports = ANY
    """The ports tried first where 0 stands above."""
    ready_timeout_s: float = 180.0
    """All models must have loaded by then."""
    exit_timeout_s: int = 5
    """What Triton grants requests in flight when it stops."""
    complete_configs: bool = True
    """Every config.pbtxt is complete: loading skips Triton's guessing (1.1 s a model)."""
    control_models: bool = False
    """All models are loaded, and one that died can be loaded again (Triton's explicit mode); readiness is then judged
    model by model, since a model that died stays "unloading" for ever."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the server and of its Python models."""
    arguments: tuple[str, ...] = ()
    """Further arguments of tritonserver."""
    temporary: tuple[Path, ...] = ()
    """Folders that are removed with the server, however we end, such as that of a rendered model repository."""
    log_path: Path | None = None
    """Where the log goes, started anew each time; None: into the temporary folder, gone after the stop."""
