"""Sends client state with the orders, to workers that do not share the server's storage.

The server's store is authoritative. A worker's own store may be lost at any time, so an order
brings along the versions of client state that the worker needs and does not have, and the answer
brings back the version that the order made. Sessions of secure aggregation are never sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from coterie.channel.compression.codecs import Payload
from coterie.channel.wire import Message
from coterie.client.store import Store
from coterie.core.engine import Request
from coterie.core.messages import ClientId

Version = tuple[ClientId, str]
Copies = list[tuple[ClientId, str, Payload]]


def _versions(message: Message) -> tuple[str, str, list[str]]:
    """The version that an order makes, the one it expects, and the others to be kept."""
    body = json.loads(message.header)["body"]
    return body["order"], body.get("expects", ""), body.get("keep", [])


def copies_for_worker(store: Store, requests: Sequence[Request], present: set[Version]) -> Copies:
    """The state to send along: what the orders expect, and earlier answers to the same orders.

    ``present`` are the versions that the worker has; those that are sent are added to it.
    """
    copies: Copies = []
    for request in requests:
        for version in _versions(request.message)[:2]:
            key = (request.client, version)
            copy = None if key in present else store.copy(*key)
            if copy is not None:
                copies.append((*key, copy))
                present.add(key)
    return copies


def receive_at_worker(
    store: Store, orders: Sequence[tuple[ClientId, Message]], copies: Copies
) -> dict[Version, tuple[int, int] | None]:
    """Put the copies into a worker's store; return the stamps of the versions the orders make."""
    for client, version, copy in copies:
        store.put(client, version, copy)
    keys = [(client, _versions(message)[0]) for client, message in orders]
    return {key: store.stamp(*key) for key in keys}


def copies_for_server(store: Store, before: dict[Version, tuple[int, int] | None]) -> Copies:
    """The versions that the orders have made at a worker since the stamps ``before``."""
    changed = [key for key, stamp in before.items() if store.stamp(*key) != stamp]
    return [(*key, store.copy(*key) or b"") for key in changed]


def receive_at_server(
    store: Store, requests: Sequence[Request], copies: Copies, present: set[Version]
) -> None:
    """Put a worker's copies into the server's store; drop the versions no order can ask for.

    ``present`` are the versions that the worker has; it is brought up to date.
    """
    for request in requests:
        version, expects, keep = _versions(request.message)
        for client, name, copy in copies:
            if (client, name) == (request.client, version):
                store.put(client, name, copy)
                store.keep(client, [version, expects, *keep])
                # A worker keeps the same versions, of those that it had.
                present -= {k for k in present if k[0] == client and k[1] not in (expects, *keep)}
                present.add((client, version))
