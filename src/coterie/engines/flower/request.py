"""A client's request to be enrolled: its name, and the public halves of keys that it made itself.

Both keys sign the whole request. A request that was edited, or combined from two, is therefore
refused, and a request can only be made by the holder of its keys. A signature cannot show whether
that holder is the right person: for that, the two sides compare the fingerprint, for example over
the telephone.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
except ImportError:
    _AVAILABLE = False
else:
    _AVAILABLE = True

FILE = "request.json"
_NAME = re.compile(r"[a-z0-9_-]{1,63}")
_PURPOSE = b"Coterie, request to be enrolled, 1\n"  # the same keys sign other things too
_LARGEST = 16384  # bytes; a request has about 700
_GROUPS, _DIGITS = 8, 4
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True)
class EnrolmentRequest:
    """What a client asks to be enrolled with: its name and the public halves of its keys."""

    name: str
    node: str  # OpenSSH, as Flower registers it
    identity: bytes  # Ed25519, for secure aggregation

    @property
    def fingerprint(self) -> str:
        """Eight groups of four hexadecimal digits, computed from the name and both keys."""
        # The signatures are left out: a request that is signed again is the same request.
        digits = hashlib.sha256(self._statement()).hexdigest()
        return " ".join(digits[i * _DIGITS : (i + 1) * _DIGITS] for i in range(_GROUPS))

    def signed(self, node: ec.EllipticCurvePrivateKey, seed: bytes) -> dict[str, Any]:
        """Sign the request; return the content of ``request.json``."""
        statement = self._statement()
        signatures = {
            "node": node.sign(statement, ec.ECDSA(hashes.SHA384())).hex(),
            "identity": Ed25519PrivateKey.from_private_bytes(seed).sign(statement).hex(),
        }
        return {**self._content(), "signatures": signatures}

    def check(self, signatures: Any) -> None:
        """Verify both keys' signatures; raise ValueError or an error of ``cryptography``."""
        statement, node = self._statement(), forms.load_ssh_public_key(self.node.encode())
        if not isinstance(node, ec.EllipticCurvePublicKey) or node.curve.name != "secp384r1":
            raise ValueError("its node key is not on the curve P-384")
        if openssh(node) != self.node:  # otherwise one key could be enrolled in two spellings
            raise ValueError("its node key is not in OpenSSH's format")
        of_node, of_identity = (bytes.fromhex(signatures[k]) for k in ("node", "identity"))
        Ed25519PublicKey.from_public_bytes(self.identity).verify(of_identity, statement)
        node.verify(of_node, statement, ec.ECDSA(hashes.SHA384()))

    def _content(self) -> dict[str, str]:
        return {"name": self.name, "node": self.node, "identity": self.identity.hex()}

    def _statement(self) -> bytes:
        return _PURPOSE + json.dumps(self._content(), sort_keys=True).encode()


def openssh(key: ec.EllipticCurvePublicKey) -> str:
    """A public key in the format of Flower and OpenSSH, without a comment."""
    return key.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH).decode()


def check_name(name: str) -> None:
    """Refuse an invalid client name; a name must be safe as the name of a folder."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a client's name: use 1 to 63 of the characters a-z, 0-9, _ and -"
        )


def read_request(path: Path) -> EnrolmentRequest:
    """Read a request and verify the signatures of both of its keys."""
    if not _AVAILABLE:
        raise ConfigError("keys need the extra: pip install 'coterie[flower]'")
    remedy = "ask the client to make it again with `coterie keys request`"
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"the request {path} cannot be read: {error.strerror}") from None
    try:
        if len(data) > _LARGEST:
            raise ValueError("it is too long")
        content = json.loads(data)
        if set(content) != {"name", "node", "identity", "signatures"}:
            raise ValueError("it does not have the fields of a request")
        request = EnrolmentRequest(
            content["name"], content["node"], bytes.fromhex(content["identity"])
        )
        if request._content() != {k: content[k] for k in ("name", "node", "identity")}:
            raise ValueError("its keys are not in the format of `coterie keys request`")
        if not _NAME.fullmatch(request.name):
            raise ValueError("its name is not valid for a client")
        request.check(content["signatures"])
    except InvalidSignature:
        raise ConfigError(
            f"the request {path} is not as its keys signed it: it was changed, or combined from "
            f"two requests; {remedy}"
        ) from None
    except (*_MALFORMED, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a valid request ({error}): {remedy}") from None
    return request
