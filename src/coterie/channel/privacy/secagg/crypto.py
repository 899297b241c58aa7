"""Cryptographic primitives from the package ``cryptography``, which only this module imports."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from coterie.errors import ConfigError

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    _AVAILABLE = False
else:
    _AVAILABLE = True

Random = Callable[[int], bytes]

KEY = 32
NONCE = 12
TAG = 16


def require() -> None:
    """Raise ConfigError if the package ``cryptography`` is not installed."""
    if not _AVAILABLE:
        raise ConfigError("secure aggregation needs the extra: pip install 'coterie[privacy]'")


def public_identity(seed: bytes) -> bytes:
    """The Ed25519 public key for a private seed of 32 bytes."""
    require()
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def signed(seed: bytes, statement: bytes) -> bytes:
    """The Ed25519 signature of a statement: 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(seed).sign(statement)


def verifies(identity: bytes, signature: bytes, statement: bytes) -> bool:
    """Whether the owner of this public key signed this statement."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, statement)
    except (InvalidSignature, ValueError):  # ValueError: the key is not valid
        return False
    return True


def public_key(secret: bytes) -> bytes:
    """The X25519 public key of a secret of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreed(secret: bytes, public: bytes, purpose: bytes) -> bytes | None:
    """The shared key of two parties for a purpose; None if the other's public key is weak."""
    try:
        key = X25519PublicKey.from_public_bytes(public)
        common = X25519PrivateKey.from_private_bytes(secret).exchange(key)
    except ValueError:  # a point of small order, with which every shared key would be zero
        return None
    return derived(common, purpose)


def strong(public: bytes) -> bool:
    """Whether shared keys with the owner of this X25519 public key would be secret."""
    return agreed(hashlib.sha256(b"any secret will do").digest(), public, b"") is not None


def derived(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key of 32 bytes for one purpose, by HKDF-SHA256."""
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=purpose).derive(secret)


def sealed(key: bytes, nonce: bytes, content: bytes, about: bytes) -> bytes:
    """The nonce, followed by the content encrypted with AES-256-GCM and authenticated context."""
    return nonce + AESGCM(key).encrypt(nonce, content, about)


def unsealed(key: bytes, box: bytes, about: bytes) -> bytes | None:
    """Decrypt a box; None if its content or its context was changed."""
    try:
        return AESGCM(key).decrypt(box[:NONCE], box[NONCE:], about)
    except InvalidTag:
        return None


class Keystream:
    """The keystream of AES-256-CTR from a given block on; the key must have no other use."""

    SPARE = 15
    """Extra bytes that a buffer must have, since some versions require one more block."""

    def __init__(self, key: bytes, block: int = 0) -> None:
        counter = block.to_bytes(16, "big")
        self._cipher = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()

    def into(self, buffer: bytearray, zeros: memoryview) -> None:
        """Fill the start of a buffer with the next bytes, as many as there are ``zeros``."""
        self._cipher.update_into(zeros, buffer)
