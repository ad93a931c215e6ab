"""Runs the gateway: opens what it needs, listens on its ports, stops in order."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from adapter_slots.registry import Registry
from lora_slots.client import ROUTER
from lora_slots.direct import ENGINE
from lora_slots.errors import UsageError
from lora_slots.gateway.core import Gateway
from lora_slots.gateway.door import Door
from lora_slots.gateway.jobs import EngineFacts
from lora_slots.gateway.routes import public_app
from lora_slots.gateway.tenants import TenantsSource
from lora_slots.text import Tokenizer
from trtllm_lora import EngineShape

log = structlog.get_logger("lora_slots.gateway")
REFRESH_S = 1.0
STOP_S = 10
"""Seconds a stop waits for streams that run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a gateway is started."""

    url: str
    """host:port of Triton's gRPC door."""
    host: str = "127.0.0.1"
    port: int = 8080
    registry: Path | None = None
    """None, as `tokenizer` and `engine`: the one that the server says it uses, if it lies on this machine."""
    tokenizer: Path | None = None
    engine: Path | None = None
    base_name: str | None = None
    """None: the name of the tokenizer's directory."""
    tenants: Path | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def open_gateway(settings: Settings) -> Gateway:
    """Connect, and read what the gateway needs. Raises UsageError, ServerError, RegistryError, TokenizerError, …"""
    if settings.tenants is None and not is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} can be reached from other machines: it needs --tenants, so that not everybody may "
            "use everything (make the file with `lora-slots tenants add`)"
        )
    door = Door(settings.url)
    try:
        engine_says = await door.parameters(ENGINE)
        router_says = await door.parameters(ROUTER)
        engine = _place(settings.engine, engine_says.get("gpt_model_path"), "--engine", "the engine's directory")
        registry = _place(settings.registry, router_says.get("registry"), "--registry", "adapters.yaml")
        tokenizer = _place(settings.tokenizer, router_says.get("base_dir"), "--tokenizer", "the tokenizer's directory")
        limits = EngineShape.from_engine_config(engine).request_limits
        gateway = Gateway(
            door,
            await asyncio.to_thread(Registry, registry),
            Tokenizer(tokenizer),
            EngineFacts(limits.max_seq_len, limits.max_input_len, limits.vocab_size),
            settings.base_name or tokenizer.resolve().name,
            TenantsSource(settings.tenants) if settings.tenants else None,
            settings.max_body_bytes,
        )
        _ = gateway.tokenizer.eos_ids, gateway.tokenizer.token_bytes  # read once, not in the first request
    except BaseException:
        await door.close()
        raise
    return gateway


def _place(given: Path | None, said: str | None, option: str, what: str) -> Path:
    if given is not None:
        return given
    if said and "$" not in said and Path(said).exists():
        return Path(said)
    raise UsageError(f"give {option}: {what}; the server's own is not on this machine")


async def follow_registry(registry: Registry) -> None:
    """Read the registry again whenever it changes."""
    while True:
        await asyncio.sleep(REFRESH_S)
        before = registry.problem
        await asyncio.to_thread(registry.refresh)
        if registry.problem and registry.problem != before:
            log.error("registry broken, the last good one stays", why=registry.problem)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def url_of(opened: socket.socket) -> str:
    """Where a listening socket is."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """One port; signals are for the gateway as a whole."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: Any) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
        )
    )


async def serve(settings: Settings, say: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM; `say` is told where. A second signal ends running streams."""
    gateway = await open_gateway(settings)
    following = asyncio.ensure_future(follow_registry(gateway.registry))
    try:
        opened = listen(settings.host, settings.port)
        server = _server(public_app(gateway, settings.cors_origins))

        def stop() -> None:
            server.force_exit = server.should_exit
            server.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        say(f"serving {gateway.base} and {len(gateway.registry.entries)} adapters on {url_of(opened)}/v1")
        await server.serve([opened])
    finally:
        following.cancel()
        await gateway.door.close()
