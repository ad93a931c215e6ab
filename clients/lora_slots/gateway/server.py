"""Runs the gateway: opens what it needs, listens on its ports, stops in order."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from adapter_slots.registry import Registry
from lora_slots.client_wire import ROUTER
from lora_slots.direct import ENGINE
from lora_slots.errors import ServerError, UsageError
from lora_slots.gateway.admin import admin_app
from lora_slots.gateway.core import Conversion, Gateway
from lora_slots.gateway.door import Door
from lora_slots.gateway.edge import check_origins, is_loopback
from lora_slots.gateway.jobs import EngineFacts
from lora_slots.gateway.names import reads_as_base
from lora_slots.gateway.protocol import MOST_CONNECTIONS, protocol
from lora_slots.gateway.routes import public_app
from lora_slots.gateway.tenants import TenantsSource
from lora_slots.text import Tokenizer
from trtllm_lora import EngineShape

log = structlog.get_logger("lora_slots.gateway")
PREPROCESSING = "preprocessing"
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
    admin_host: str = "127.0.0.1"
    admin_port: int = 8081
    registry: Path | str | None = None
    """None, as `tokenizer` and `engine`: the one that the server says it uses, if it lies on this machine."""
    tokenizer: Path | None = None
    engine: Path | None = None
    base_name: str | None = None
    """None: the name of the tokenizer's directory."""
    tenants: Path | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 60.0
    max_connections: int = MOST_CONNECTIONS
    """Of each port."""
    s3_endpoint_url: str | None = None
    """Of S3 that is not AWS, for a registry or adapters there."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a gateway serves, and what."""

    base: str
    adapters: Sequence[str]
    url: str
    """With the /v1 of OpenAI's API."""
    admin_url: str


async def open_gateway(settings: Settings) -> Gateway:
    """Connect, and read what the gateway needs. Raises UsageError, ServerError, RegistryError, TokenizerError, …"""
    tenants = TenantsSource(settings.tenants) if settings.tenants else None
    _refuse_open_doors(settings, tenants)
    check_origins(settings.cors_origins)
    door = Door(settings.url)
    try:
        engine_says = await door.parameters(ENGINE)
        router_says = await door.parameters(ROUTER)
        text_says = await _parameters_if_there(door, PREPROCESSING)
        engine = _place(settings.engine, engine_says.get("gpt_model_path"), "--engine", "the engine's directory")
        registry = _registry(settings.registry, router_says.get("registry"))
        texts = _place(settings.tokenizer, text_says.get("tokenizer_dir"), "--tokenizer", "the tokenizer's directory")
        tokenizer = Tokenizer(texts)
        limits = EngineShape.from_engine_config(engine).request_limits
        gateway = Gateway(
            door,
            await asyncio.to_thread(Registry, registry, endpoint_url=settings.s3_endpoint_url),
            tokenizer,
            EngineFacts(limits.max_seq_len, limits.max_input_len, limits.vocab_size),
            settings.base_name or texts.resolve().name,
            tenants,
            settings.max_body_bytes,
            settings.body_timeout_s,
            Conversion(texts, engine) if not router_says.get("disk_dir") else None,
        )
        _ = tokenizer.eos_ids, tokenizer.token_bytes, tokenizer.least_tokens("")  # read once, not in the first request
    except BaseException:
        await door.close()
        raise
    return gateway


async def _parameters_if_there(door: Door, model: str) -> Mapping[str, str]:
    try:
        return await door.parameters(model)
    except ServerError:  # a server for direct clients alone has no text steps
        return {}


def _refuse_open_doors(settings: Settings, tenants: TenantsSource | None) -> None:
    """Raises UsageError: a port without keys that other machines could reach."""
    if not is_loopback(settings.host) and (tenants is None or not tenants.current().keys):
        raise UsageError(
            f"--host {settings.host} can be reached from other machines: it needs --tenants with a tenant's key, so "
            "that not everybody may use everything (`lora-slots tenants add NAME` makes one)"
        )
    if not is_loopback(settings.admin_host) and (tenants is None or not tenants.current().admin_keys):
        raise UsageError(
            f"--admin-host {settings.admin_host} can be reached from other machines: it needs --tenants with a key of "
            "the admin port (`lora-slots tenants key --admin` makes one)"
        )


def _place(given: Path | None, said: str | None, option: str, what: str) -> Path:
    if given is not None:
        return given
    if said and "$" not in said and Path(said).exists():
        return Path(said)
    raise UsageError(f"give {option}: {what}; the server's own is not on this machine")


def _registry(given: Path | str | None, said: str | None) -> Path | str:
    if given is not None:
        return given if "://" in str(given) else Path(given)
    if said and "://" in said:
        return said
    return _place(None, said, "--registry", "adapters.yaml, a file or s3://bucket/key")


async def follow_files(gateway: Gateway) -> None:
    """Read the registry again whenever it changes, and say when it or the tenants' file is broken."""
    registry, tenants = gateway.registry, gateway.tenants
    told: set[str] = set()
    content = None
    while True:
        if registry.content is not content:
            content = registry.content
            if hidden := [name for name in content.names if reads_as_base(name, gateway.base)]:
                log.error("not served: the names read as the base model", names=hidden[:8], base=gateway.base)
        await asyncio.sleep(registry.interval_s or REFRESH_S)
        await asyncio.to_thread(registry.refresh)
        if tenants is not None:
            tenants.current()
        problems = {problem for problem in (registry.problem, tenants.problem if tenants else None) if problem}
        for problem in problems - told:
            log.error("a file is broken, the last good one stays in use", why=problem)
        told = problems


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


def _server(app: Any, settings: Settings) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=protocol(settings.body_timeout_s, settings.max_connections),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
        )
    )


async def _end_requests(servers: Iterable[_Server]) -> None:
    """Cancel requests that a stop did not wait for, so that they give their leases back while there is a connection."""
    left = [task for server in servers for task in server.server_state.tasks]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def serve(settings: Settings, ready: Callable[[Serving], object]) -> int:
    """Serve until SIGINT or SIGTERM, and return its number; `ready` hears where. A second one ends running requests."""
    gateway = await open_gateway(settings)
    gc.collect()
    gc.freeze()  # what there is now stays; looking through it for garbage again and again costs every token
    following = asyncio.ensure_future(follow_files(gateway))
    try:
        with listen(settings.host, settings.port) as door, listen(settings.admin_host, settings.admin_port) as admin:
            servers = {
                _server(public_app(gateway, settings.host, settings.cors_origins), settings): door,
                _server(admin_app(gateway, settings.admin_host, settings.s3_endpoint_url), settings): admin,
            }

            told: list[int] = []

            def stop(number: int) -> None:
                told.append(number)
                for server in servers:
                    if server.should_exit:
                        for task in server.server_state.tasks:
                            task.cancel()
                    server.should_exit = True

            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
            ready(Serving(gateway.base, sorted(gateway.registry.entries), f"{url_of(door)}/v1", url_of(admin)))
            await asyncio.gather(*(server.serve([opened]) for server, opened in servers.items()))
            await _end_requests(servers)
            return told[0] if told else 0
    finally:
        following.cancel()
        await gateway.door.close()
