"""Identities: each client's long-term signature key, and the roster of all public keys.

In a simulation they are derived from the run's seed. Otherwise a private key is drawn once from the
operating system's generator and kept in a file that only its owner can read. The roster holds the
public halves and must reach every client over a channel that the server cannot tamper with.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from coterie.channel.privacy.entropy import Entropy
from coterie.core.messages import ClientId
from coterie.core.tree import write_atomic
from coterie.errors import RunDirError

KEYS = "identities"  # a folder next to the clients' states


class Roster(Mapping[ClientId, bytes]):
    """The public keys of all clients, each derived or read when it is first needed."""

    def __init__(self, entropy: Entropy, folder: Path, clients: Collection[ClientId]) -> None:
        self.entropy, self.folder, self.clients = entropy, folder / KEYS, clients
        self._known: dict[ClientId, bytes] = {}

    def __getitem__(self, client: ClientId) -> bytes:
        if client not in self.clients:
            raise KeyError(client)
        if client not in self._known:
            if self.entropy.kind == "system":
                self._known[client] = _read(self.folder / f"{client}.pub")
            else:
                self._known[client] = _public(self.private(client))
        return self._known[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def private(self, client: ClientId) -> bytes:
        """A client's private signature key, for use by that client only."""
        if self.entropy.kind == "system":
            return _read(self.folder / f"{client}.key")
        return self.entropy.stream("identity", client)(32)

    def check(self) -> None:
        """Refuse key files that are damaged."""
        for client in self.clients if self.entropy.kind == "system" else ():
            private, public = (self.folder / f"{client}.{end}" for end in ("key", "pub"))
            if public.exists() and _public(_read(private)) != _read(public):
                raise RunDirError(
                    f"{private} and {public.name} do not match: one of them is damaged. Put back a "
                    "copy, or start the run again in a new folder"
                )

    def prepare(self) -> None:
        """Draw the keys that do not exist yet; does nothing in a simulation."""
        if self.entropy.kind != "system":
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for client in self.clients:
            private, public = (self.folder / f"{client}.{end}" for end in ("key", "pub"))
            if public.exists():  # written last, so the key is complete
                continue
            private.unlink(missing_ok=True)
            key = self.entropy.stream("identity")(32)
            descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key)
            write_atomic(public, _public(key), durable=False)


def training_salt(private: bytes, run: str) -> str:
    """A secret seed for the randomness of one client's training in one run."""
    return hmac.new(private, f"training of {run}".encode(), hashlib.sha256).hexdigest()


def _public(private: bytes) -> bytes:
    """The public half of a private key; empty if the key is invalid."""
    from coterie.channel.privacy.secagg.crypto import public_identity

    try:
        return public_identity(private)
    except ValueError:
        return b""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunDirError(f"the signature key {path} cannot be read: {error.strerror}") from None
