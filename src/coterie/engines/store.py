"""Client state on disk, in versions: memory-mapped files, each written once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from coterie.door.wire import Message
from coterie.errors import RunDirError
from coterie.federation import ClientId
from coterie.tree import read_tree, sync, write_atomic, write_tree
from coterie.weights import Layout


class Store:
    """Versions of each client's state, a folder a client, a file a version.

    A version is named after the order that made it and is never changed. ``""`` is the empty state
    that everybody begins with. The reply that came with a version is kept beside it until the
    next one, so that an order which arrives twice is answered, not carried out, again.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout

    def read(self, client: ClientId, version: str) -> dict[str, Any]:
        """The state at this version."""
        if not version:
            return {}
        path = self._path(client, version)
        if not path.exists():
            raise RunDirError(
                f"client {client} no longer holds version {version} of its state (in "
                f"{path.parent}): the run cannot go on from there. Start it again in a new folder"
            )
        state: dict[str, Any] = read_tree(path, self.layout)
        return state

    def answered(self, client: ClientId, version: str) -> Message | None:
        """The reply already given to the order that made this version."""
        reply = self._path(client, version).with_suffix(".reply")
        if self._path(client, version).exists() and reply.exists():
            return Message.from_bytes(reply.read_bytes())
        return None

    def write(
        self, client: ClientId, version: str, state: Mapping[str, Any], reply: Message
    ) -> None:
        """Add a version: the reply first, so that a version without its reply never exists."""
        path = self._path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path.with_suffix(".reply"), reply.to_bytes(), durable=False)
        write_tree(path, dict(state), self.layout, durable=False)

    def keep(self, client: ClientId, versions: Collection[str], newest: str) -> None:
        """Drop every other version, and every reply but the newest."""
        wanted = {self._path(client, v) for v in versions if v}
        wanted.add(self._path(client, newest).with_suffix(".reply"))
        for path in self._path(client, newest).parent.glob("*"):
            if path not in wanted:
                path.unlink(missing_ok=True)

    def flush(self, versions: Mapping[ClientId, str]) -> None:
        """Wait until these versions are on disk."""
        for client, version in versions.items():
            if version:
                sync(self._path(client, version))
                sync(self._path(client, version).parent)

    def _path(self, client: ClientId, version: str) -> Path:
        return self.folder / str(client) / f"{version.replace('.', '-')}.state"
