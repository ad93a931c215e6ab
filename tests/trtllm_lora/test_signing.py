"""Signatures over digests: what is signed, whom to believe, and keys that must not be used."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from fakes.bundles import small_bundle
from hypothesis import given
from hypothesis import strategies as st

from trtllm_lora import open_bundle
from trtllm_lora.bundle_writing import set_signature
from trtllm_lora.errors import SignatureError
from trtllm_lora.signing import (
    PrivateKey,
    PublicKey,
    check_signature,
    new_key,
    public_file,
    read_private_key,
    read_public_key,
)

DIGEST = "5f" * 32
GOLDEN_SEED = bytes(range(32))
GOLDEN = (
    "ed25519:56475aa75463474c:Se3IA4+uSNuKLLPTCJ0gAU9OdTp/JmwLqkPbVB5Kff066YMRTVEu1HvotHzTuT7Y7YjJG2rSohAM9nB0DCCHBA=="
)
"""Of DIGEST by the key with GOLDEN_SEED: made once, so that a change of the form is seen."""


def trusted(*keys: PrivateKey) -> dict[str, PublicKey]:
    """Key id -> key."""
    return {key.public.id: key.public for key in keys}


def test_the_bytes_that_are_signed_are_those_of_the_specification() -> None:
    """docs/bundle-format.md B9, checked with the library alone: nothing of ours takes part."""
    key = Ed25519PrivateKey.from_private_bytes(GOLDEN_SEED)
    _, key_id, value = GOLDEN.split(":")
    message = b"lora-slots signature 1\n" + DIGEST.encode("ascii")
    Ed25519PublicKey.from_public_bytes(key.public_key().public_bytes_raw()).verify(base64.b64decode(value), message)
    assert PrivateKey(key).sign(DIGEST) == GOLDEN
    assert PrivateKey(key).public.id == key_id


def test_a_signature_is_of_one_digest_and_one_key(tmp_path: Path) -> None:
    """Good under its own; under another digest, or when its key is not trusted, it is refused by name."""
    ours, theirs = new_key(tmp_path / "ours"), new_key(tmp_path / "theirs")
    signature = ours.sign(DIGEST)
    check_signature(DIGEST, signature, trusted(ours, theirs))
    with pytest.raises(SignatureError, match=f"by key {ours.public.id} is not one of digest 6f6f"):
        check_signature("6f" * 32, signature, trusted(ours))
    with pytest.raises(SignatureError, match=f"{ours.public.id}', which is not trusted; trusted: {theirs.public.id}"):
        check_signature(DIGEST, signature, trusted(theirs))
    forged = signature.replace(ours.public.id, theirs.public.id)
    with pytest.raises(SignatureError, match="is not one of digest"):
        check_signature(DIGEST, forged, trusted(theirs))


@pytest.mark.parametrize("junk", [None, "", "x", "ed25519:a", "rsa:a:b", 3, ["ed25519", "a", "b"], {"a": 1}])
def test_what_is_no_signature_is_refused(junk: object, tmp_path: Path) -> None:
    """Whatever a manifest has there."""
    with pytest.raises(SignatureError, match=r"not signed|not of the form"):
        check_signature(DIGEST, junk, trusted(new_key(tmp_path / "k")))


@given(st.data())
def test_no_altered_signature_is_good(data: st.DataObject) -> None:
    """Property: any other text in place of the signature's value fails."""
    key = PrivateKey(Ed25519PrivateKey.from_private_bytes(GOLDEN_SEED))
    head, _, value = GOLDEN.rpartition(":")
    raw = bytearray(base64.b64decode(value))
    raw[data.draw(st.integers(0, 63))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SignatureError):
        check_signature(DIGEST, f"{head}:{base64.b64encode(bytes(raw)).decode()}", trusted(key))


def test_only_digests_are_signed(tmp_path: Path) -> None:
    """A text that is no digest could be anything."""
    for text in ("", "a", DIGEST.upper(), DIGEST + "\n", "é" * 64):
        with pytest.raises(SignatureError, match="is no digest"):
            new_key(tmp_path / f"key-{len(text)}-{text[:1].encode().hex()}").sign(text)


def test_keys_are_kept_safe(tmp_path: Path) -> None:
    """The private key's file is for its owner alone; one that others may read is not used, none is overwritten."""
    file = tmp_path / "release.key"
    made = new_key(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_private_key(file).sign(DIGEST) == made.sign(DIGEST)
    with pytest.raises(SignatureError, match="is there already"):
        new_key(file)
    assert read_private_key(file).public == made.public
    for mode in (0o640, 0o604, 0o644, 0o620):
        file.chmod(mode)
        with pytest.raises(SignatureError, match=f"mode {mode:04o}.*0600"):
            read_private_key(file)


def test_a_public_key_has_three_forms(tmp_path: Path) -> None:
    """Base64, PEM text, the path of a PEM file; where paths have no place a path is told."""
    made = new_key(tmp_path / "k").public
    pem = public_file(tmp_path / "k")
    assert read_public_key(made.text) == read_public_key(pem.read_text()) == read_public_key("k.pub", tmp_path) == made
    with pytest.raises(SignatureError, match="base64 of 32 bytes, or PEM text"):
        read_public_key("k.pub")
    with pytest.raises(SignatureError, match=r"no public key.*nothing\.pub"):
        read_public_key("nothing.pub", tmp_path)


def test_a_wrong_file_is_told(tmp_path: Path) -> None:
    """A private key where a public one belongs, and the reverse; other kinds; a password; no key at all."""
    new_key(tmp_path / "k")
    with pytest.raises(SignatureError, match=r"private one, whose \.pub"):
        read_public_key("k", tmp_path)
    (tmp_path / "k.pub").chmod(0o600)
    with pytest.raises(SignatureError, match="not a private key"):
        read_private_key(tmp_path / "k.pub")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = serialization.BestAvailableEncryption(b"secret")
    others = {
        "another kind": generate_private_key(65537, 2048).private_bytes(pem, pkcs8, serialization.NoEncryption()),
        "has a password": Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, locked),
        "not a private key": b"hello",
    }
    for words, content in others.items():
        (tmp_path / "other").write_bytes(content)
        (tmp_path / "other").chmod(0o600)
        with pytest.raises(SignatureError, match=words):
            read_private_key(tmp_path / "other")
    with pytest.raises(SignatureError, match="No such file"):
        read_private_key(tmp_path / "nowhere")


def test_a_signed_bundle_is_the_same_content(tmp_path: Path) -> None:
    """A signature is a label: digest and task id stay, the bundle opens and verifies, nothing is left beside it."""
    bundle = small_bundle(tmp_path, "ant")
    before = sorted(file.name for file in bundle.path.iterdir())
    signed = set_signature(bundle, new_key(tmp_path / "k").sign(bundle.digest))
    opened = open_bundle(bundle.path)
    opened.verify()
    assert opened.manifest == signed.manifest
    assert (opened.digest, opened.task_id, opened.signature) == (bundle.digest, bundle.task_id, signed.signature)
    assert sorted(file.name for file in bundle.path.iterdir()) == before
    assert small_bundle(tmp_path, "ant").signature == signed.signature, "writing it again keeps the signed one"
