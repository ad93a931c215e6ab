"""Signatures over digests: ed25519, so that a server serves only what a key it trusts has released.

What is signed are the bytes `lora-slots signature 1\\n` followed by the digest's 64 hexadecimal digits in ASCII. The
digest covers every byte of the adapter (docs/bundle-format.md, B5 and B9), so nothing else has to be signed; the words
before it keep a signature from meaning anything in another protocol. A signature is written as one line of text:

    ed25519:<key id>:<base64 of the 64 bytes>

The key id is the first 16 hexadecimal digits of sha256 over the public key's 32 bytes. It is a label: it names the key
in messages, and proves nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from trtllm_lora.errors import SignatureError

ALGORITHM = "ed25519"
_DOMAIN = b"lora-slots signature 1\n"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PEM = "-----BEGIN"
_KEY_BYTES = 64 * 1024
"""A key file is not longer."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key that verifies. Its text is the base64 of its 32 bytes."""

    raw: bytes

    @property
    def id(self) -> str:
        """Names the key: 16 hexadecimal digits."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    @property
    def text(self) -> str:
        """Base64 of the 32 bytes: what stands in `trusted_keys`."""
        return base64.b64encode(self.raw).decode()


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A key that signs."""

    _key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        """The key that verifies what this one signs."""
        return PublicKey(self._key.public_key().public_bytes_raw())

    def sign(self, digest: str) -> str:
        """The signature of a digest, as text.

        Raises:
            SignatureError: not a digest.
        """
        value = base64.b64encode(self._key.sign(signed_bytes(digest))).decode()
        return f"{ALGORITHM}:{self.public.id}:{value}"


def signed_bytes(digest: str) -> bytes:
    """What a signature covers. Raises SignatureError if it is no digest (64 lower-case hexadecimal digits)."""
    if not _DIGEST.fullmatch(digest):
        raise SignatureError(f"{digest[:80]!r} is no digest: 64 lower-case hexadecimal digits")
    return _DOMAIN + digest.encode("ascii")


def check_signature(digest: str, signature: object, trusted: Mapping[str, PublicKey]) -> None:
    """Hold a signature against the trusted keys (key id -> key).

    Raises:
        SignatureError: there is none, it is not of the form, its key is not trusted, or it is not of this digest.
    """
    if signature is None:
        raise SignatureError(f"not signed; trusted keys: {_names(trusted.values())}")
    parts = signature.split(":") if isinstance(signature, str) else []
    if len(parts) != 3 or parts[0] != ALGORITHM:
        raise SignatureError(f"its signature is not of the form {ALGORITHM}:<key id>:<base64>")
    _, key_id, value = parts
    key = trusted.get(key_id)
    if key is None:
        raise SignatureError(
            f"signed by key {key_id[:16]!r}, which is not trusted; trusted: {_names(trusted.values())}"
        )
    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(base64.b64decode(value, validate=True), signed_bytes(digest))
    except (InvalidSignature, binascii.Error, ValueError):
        raise SignatureError(f"its signature by key {key_id} is not one of digest {digest[:12]}") from None


def new_key(file: Path) -> PrivateKey:
    """Make a key pair: the private key at `file` (mode 0600), the public one at `file`.pub, both PEM.

    Raises:
        SignatureError: one of the files is there already, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    beside = public_file(file)
    for name in (file, beside):
        if os.path.lexists(name):
            raise SignatureError(f"{name} is there already: a key is never overwritten")
    try:
        _write_new(file, private, 0o600)
        _write_new(beside, public, 0o644)
    except OSError as error:
        raise SignatureError(f"{file}: cannot be written: {error.strerror}") from None
    return PrivateKey(key)


def public_file(file: Path) -> Path:
    """Where the public half of a private key's file lies."""
    return file.with_name(file.name + ".pub")


def read_private_key(file: Path) -> PrivateKey:
    """Read a private key (PEM, PKCS#8, ed25519, without a password).

    Raises:
        SignatureError: not there, not such a key, or anybody but its owner may read it.
    """
    data, mode = _read(file)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SignatureError(
            f"{file}: others may read this private key (mode {stat.S_IMODE(mode):04o}); it must be 0600: "
            f"chmod 600 {file.name}, or make a new one if they may have read it"
        )
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError:
        raise SignatureError(f"{file}: the private key has a password, and this program cannot ask for it") from None
    except (ValueError, UnsupportedAlgorithm):
        raise SignatureError(f"{file}: not a private key (PEM, PKCS#8, ed25519)") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(f"{file}: a private key of another kind; ed25519 expected")
    return PrivateKey(key)


def read_public_key(text: str, folder: Path | None = None) -> PublicKey:
    """A public key from its base64, its PEM, or the path of a PEM file (relative to `folder`; None: no files).

    Raises:
        SignatureError: none of these.
    """
    plain = text.strip()
    if plain.startswith(_PEM):
        return _public_pem(plain.encode(), "the PEM text")
    try:
        raw = base64.b64decode(plain, validate=True)
        if len(raw) == 32:
            return PublicKey(raw)
    except (binascii.Error, ValueError):
        pass
    if folder is None:
        raise SignatureError(f"{plain[:60]!r} is no public key: base64 of 32 bytes, or PEM text, is expected here")
    file = folder / plain
    try:
        data, _ = _read(file)
    except SignatureError as error:
        raise SignatureError(f"{plain[:60]!r} is no public key (base64 of 32 bytes), and no file: {error}") from None
    return _public_pem(data, str(file))


def _public_pem(data: bytes, where: str) -> PublicKey:
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        private = b"PRIVATE KEY" in data
        hint = "it is a private one, whose .pub file belongs here" if private else "PEM expected"
        raise SignatureError(f"{where}: not a public key; {hint}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise SignatureError(f"{where}: a public key of another kind; ed25519 expected")
    return PublicKey(key.public_bytes_raw())


def _read(file: Path) -> tuple[bytes, int]:
    """Content and mode of one and the same file."""
    try:
        with file.open("rb") as source:
            return source.read(_KEY_BYTES), os.fstat(source.fileno()).st_mode
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no path"
        raise SignatureError(f"{file}: {why}") from None


def _write_new(file: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _names(keys: Iterable[PublicKey]) -> str:
    return ", ".join(sorted(key.id for key in keys)) or "none"
