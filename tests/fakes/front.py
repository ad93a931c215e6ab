"""A router in front of a real Triton: it passes gRPC through, notes what it was sent, and can break what it passes."""

from __future__ import annotations

import datetime
import ipaddress
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tritonclient.grpc import service_pb2, service_pb2_grpc

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))


@dataclass
class Fault:
    """What becomes of streams to `model`."""

    kind: str
    """refuse (UNAVAILABLE by gRPC), say (`text` as Triton's own error), cut (broken off after `after` responses), end
    (ended in order after so many), hang."""
    times: int = 1_000_000
    text: str = ""
    after: int = 0
    model: str = "ensemble"


@dataclass
class Call:
    """One stream that was passed through, or broken."""

    model: str
    request_id: str
    headers: dict[str, str]
    over: threading.Event = field(default_factory=threading.Event)
    """The client has gone, or has had everything."""
    responses: int = 0


@dataclass
class Front:
    """What it saw, and what it shall break next; both may be used at any time."""

    url: str
    seen: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, model: str) -> list[Call]:
        """The calls of one model."""
        with self.lock:
            return [call for call in self.seen if call.model == model]

    def note(self, call: Call) -> Fault | None:
        """A call came in; the fault that falls on it."""
        with self.lock:
            self.seen.append(call)
            for fault in self.faults:
                if fault.model == call.model and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def front(upstream: str, credentials: grpc.ServerCredentials | None = None) -> Iterator[Front]:
    """A router before the Triton at `upstream` (host:port), for as long as the block runs."""
    with grpc.insecure_channel(upstream, options=OPTIONS) as channel, ThreadPoolExecutor(64) as pool:
        server = grpc.server(pool, options=OPTIONS)
        port = (
            server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else server.add_secure_port("127.0.0.1:0", credentials)
        )
        made = Front(f"127.0.0.1:{port}")
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(made, channel), server)
        server.start()
        try:
            yield made
        finally:
            server.stop(None).wait()


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, made: Front, channel: grpc.Channel) -> None:
        self._front = made
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def ModelReady(self, request: Any, _: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC's name
        return self._stub.ModelReady(request)

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        request = next(requests)
        call = Call(request.model_name, request.id, {key: str(value) for key, value in context.invocation_metadata()})
        context.add_callback(call.over.set)
        fault = self._front.note(call)
        if fault and fault.kind == "refuse":
            context.abort(grpc.StatusCode.UNAVAILABLE, fault.text or "no healthy upstream")
        if fault and fault.kind == "say":
            yield service_pb2.ModelStreamInferResponse(error_message=fault.text)
            return
        if fault and fault.kind == "hang":
            call.over.wait()
            return
        passed = self._stub.ModelStreamInfer(iter((request,)))
        if not context.add_callback(passed.cancel):  # the client has gone already
            passed.cancel()
        for answer in passed:
            if fault and call.responses == fault.after:
                if fault.kind == "cut":
                    context.abort(grpc.StatusCode.UNAVAILABLE, "upstream connect error or disconnect: reset")
                return
            call.responses += 1
            yield answer


@dataclass(frozen=True)
class Identity:
    """A key and a certificate, as PEM files."""

    key: Path
    certificate: Path


def identity(folder: Path, name: str) -> Identity:
    """A certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    made = Identity(folder / f"{name}.key", folder / f"{name}.pem")
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return made


def server_credentials(own: Identity, clients: Identity | None = None) -> grpc.ServerCredentials:
    """TLS as a server; with `clients`, only those whose certificate it is."""
    return grpc.ssl_server_credentials(
        [(own.key.read_bytes(), own.certificate.read_bytes())],
        root_certificates=clients.certificate.read_bytes() if clients else None,
        require_client_auth=clients is not None,
    )
