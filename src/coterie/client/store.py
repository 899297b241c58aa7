"""Client state on disk: a memory-mapped file for each version, written once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from coterie.channel.compression.codecs import Payload
from coterie.channel.wire import Message, Work, digest_of
from coterie.core.messages import ClientId
from coterie.core.tree import read_tree, sync, write_atomic, write_tree
from coterie.core.weights import Layout
from coterie.errors import RunDirError, WireError

_NAME = re.compile(r"[a-z0-9_.]{0,64}")  # no two of these are one file, on any disk


class Store:
    """The versions of the clients' states: a folder for each client, a file for each version.

    A version is named after the order that made it and never changes. ``""`` is the empty state
    that every client begins with. A version is stored with a digest of its order and the reply to
    it, so that an order that arrives twice is answered again but not carried out again.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout

    def read(self, client: ClientId, version: str) -> dict[str, Any]:
        """Read the state of a client at this version."""
        if version == "":  # no other false value: it would be the name of another version
            return {}
        path = self._path(client, version)
        if not path.exists():
            raise RunDirError(
                f"client {client} no longer has version {version} of its state (in "
                f"{path.parent}), so the run cannot continue from there. Start it again in a new "
                "folder"
            )
        state: dict[str, Any] = read_tree(path, self.layout)["state"]
        return state

    def answered(self, client: ClientId, version: str, order: Message) -> Message | None:
        """The reply stored with this version, if this order made it.

        None if the file is missing or damaged, or was made by another order of the same name.
        """
        path = self._path(client, version)
        if not path.exists():
            return None
        try:
            stored = read_tree(path, self.layout)
        except RunDirError:
            return None
        if stored["order"] != digest_of(order):
            return None
        return Message.from_bytes(bytes(stored["reply"].numpy()), Work(*stored["work"]))

    def write(
        self,
        client: ClientId,
        version: str,
        state: Mapping[str, Any],
        order: Message,
        reply: Message,
    ) -> None:
        """Add the version that this order made."""
        path = self._path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        sent = torch.frombuffer(bytearray(reply.to_bytes()), dtype=torch.uint8)
        # Stored as well, so that the reply to a repeated order reports the same work to a clock.
        work = (reply.work.seconds, reply.work.samples)
        tree = {"state": dict(state), "order": digest_of(order), "reply": sent, "work": work}
        write_tree(path, tree, self.layout, durable=False)

    def keep(self, client: ClientId, versions: Collection[str]) -> None:
        """Keep these versions of a client's state and delete all others."""
        kept = {self._path(client, v) for v in versions if v}
        for path in self._path(client, "x").parent.glob("*"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def copy(self, client: ClientId, version: str) -> bytes | None:
        """The bytes of a version's file, for another store; None if there is no such version."""
        path = self._path(client, version)
        return path.read_bytes() if version and path.exists() else None

    def put(self, client: ClientId, version: str, copy: Payload) -> None:
        """Add a version that was copied from another store."""
        path = self._path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, bytes(copy), durable=False)

    def stamp(self, client: ClientId, version: str) -> tuple[int, int] | None:
        """A value that changes when the version's file is written again; None without a file."""
        try:
            status = self._path(client, version).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def flush(self, versions: Mapping[ClientId, str]) -> None:
        """Wait until these versions are on disk."""
        for client, version in versions.items():
            if version:
                sync(self._path(client, version))
                sync(self._path(client, version).parent)

    def _path(self, client: ClientId, version: str) -> Path:
        if not _NAME.fullmatch(version):  # names come with orders and must not lead to other files
            raise WireError(f"'{version}' is not a valid name of a version")
        return self.folder / str(client) / f"{version.replace('.', '-')}.state"
