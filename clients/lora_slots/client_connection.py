"""How a client reaches Triton: address, encryption, and what is sent along with every call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from lora_slots.errors import UsageError

ADAPTER_HEADER = "x-gateway-model-name"
"""The header by which routers of the Gateway API Inference Extension choose; HTTP's bodies have a `model`, ours is
binary, so the client says it here."""
_CRASHES = "triton_grpc_error"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's own pause after a refused connection is a second: shorter than ours, or our tries would not try
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Encryption. Files are PEM."""

    root_certificates: Path | str | None = None
    """Whom to trust; None: the well-known authorities."""
    private_key: Path | str | None = None
    """Of the client, with `certificate_chain`, where the server asks for one."""
    certificate_chain: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """As gRPC takes them. Raises UsageError: a file that cannot be read."""
        if (self.private_key is None) != (self.certificate_chain is None):
            raise UsageError("tls: private_key and certificate_chain go together")
        return grpc.ssl_channel_credentials(
            *(_read(name, getattr(self, name)) for name in ("root_certificates", "private_key", "certificate_chain"))
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a server is and how it is spoken to."""

    url: str
    """host:port of Triton's gRPC door, or of a router before it."""
    tls: Tls | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every call; values may be secrets and are in no message."""
    adapter_header: str | None = ADAPTER_HEADER
    """Metadata key that carries a request's adapter; None: none does."""

    def __post_init__(self) -> None:
        host, _, port = self.url.rpartition(":")
        if not host or not port.isdigit() or "//" in self.url:
            raise UsageError(f"{self.url}: host:port of Triton's gRPC door is expected")
        lowered = {key.lower(): value for key, value in self.metadata.items()}
        for key, value in lowered.items():
            if key == _CRASHES:
                raise UsageError(f"metadata {key}: Triton 2.51 crashes on it")
            if key.startswith("grpc-") or key.endswith("-bin") or not _is_header(key, value):
                raise UsageError(f"metadata {key[:60]!r}: letters, digits, - _ . and a value of visible ASCII")
        object.__setattr__(self, "metadata", lowered)

    def channel(self, kind: Any = grpc) -> Any:
        """A channel of `kind`, grpc or grpc.aio. Nothing is sent yet. Raises UsageError: `tls`."""
        if self.tls is None:
            return kind.insecure_channel(self.url, options=_OPTIONS)
        return kind.secure_channel(self.url, self.tls.credentials(), options=_OPTIONS)

    def headers(self, adapter: str | None) -> tuple[tuple[str, str], ...]:
        """The metadata of a call for an adapter (None: the base, or an operation)."""
        own = self.adapter_header
        if own is None or adapter is None or not _is_header(own, adapter):  # such a name exists in no registry
            return tuple(self.metadata.items())
        return ((own, adapter), *((key, value) for key, value in self.metadata.items() if key != own))


def _is_header(key: str, value: str) -> bool:
    return key.replace("-", "").replace("_", "").replace(".", "").isalnum() and all(
        " " <= c <= "~" for c in key + value
    )


def _read(name: str, path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"tls: {name} {path}: {error.strerror}") from None
