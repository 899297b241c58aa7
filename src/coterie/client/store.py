"""Client state on disk, in versions: memory-mapped files, each written once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from coterie.channel.compression.codecs import Payload
from coterie.channel.wire import Message, Work
from coterie.core.messages import ClientId
from coterie.core.tree import read_tree, sync, write_atomic, write_tree
from coterie.core.weights import Layout
from coterie.errors import RunDirError, WireError

_NAME = re.compile(r"[a-z0-9_.]{0,64}")  # no two of these are one file, on any disk


class Store:
    """Versions of each client's state, a folder a client, a file a version.

    A version is named after the order that made it and is never changed. ``""`` is the empty state
    that everybody begins with. With a version go a digest of its order and the reply to it, so
    that an order which arrives twice is answered, not carried out, again.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout

    def read(self, client: ClientId, version: str) -> dict[str, Any]:
        """The state at this version."""
        if version == "":  # and not whatever else is nothing: it would be another version's name
            return {}
        path = self._path(client, version)
        if not path.exists():
            raise RunDirError(
                f"client {client} no longer holds version {version} of its state (in "
                f"{path.parent}): the run cannot go on from there. Start it again in a new folder"
            )
        state: dict[str, Any] = read_tree(path, self.layout)["state"]
        return state

    def holds(self, client: ClientId, version: str) -> bool:
        """Whether there is such a version, good or not."""
        return self._path(client, version).exists()

    def answered(self, client: ClientId, version: str, order: str) -> Message | None:
        """The reply already given to the order with this digest, if it made this version.

        What another order of the same name left, or a crash damaged, is no answer.
        """
        try:
            found = read_tree(self._path(client, version), self.layout)
        except RunDirError:
            return None
        if found["order"] != order:
            return None
        return Message.from_bytes(bytes(found["reply"].numpy()), Work(*found["work"]))

    def write(
        self, client: ClientId, version: str, state: Mapping[str, Any], order: str, reply: Message
    ) -> None:
        """Add a version, made by the order with this digest."""
        path = self._path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        sent = torch.frombuffer(bytearray(reply.to_bytes()), dtype=torch.uint8)
        # What the work cost goes with it: an order that came twice must not mislead a clock.
        work = (reply.work.seconds, reply.work.samples)
        tree = {"state": dict(state), "order": order, "reply": sent, "work": work}
        write_tree(path, tree, self.layout, durable=False)

    def keep(self, client: ClientId, versions: Collection[str]) -> None:
        """Drop every other version."""
        wanted = {self._path(client, v) for v in versions if v}
        for path in self._path(client, "x").parent.glob("*"):
            if path not in wanted:
                path.unlink(missing_ok=True)

    def copy(self, client: ClientId, version: str) -> bytes | None:
        """A version as it lies on disk, to be put into another store; None if there is none."""
        path = self._path(client, version)
        return path.read_bytes() if version and path.exists() else None

    def put(self, client: ClientId, version: str, copy: Payload) -> None:
        """Add a version that was copied from another store."""
        path = self._path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, bytes(copy), durable=False)

    def stamp(self, client: ClientId, version: str) -> tuple[int, int] | None:
        """Something that is another when the version was written anew."""
        try:
            found = self._path(client, version).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def flush(self, versions: Mapping[ClientId, str]) -> None:
        """Wait until these versions are on disk."""
        for client, version in versions.items():
            if version:
                sync(self._path(client, version))
                sync(self._path(client, version).parent)

    def _path(self, client: ClientId, version: str) -> Path:
        if not _NAME.fullmatch(version):  # orders come from elsewhere: they name no files
            raise WireError(f"'{version}' is no name of a version")
        return self.folder / str(client) / f"{version.replace('.', '-')}.state"
