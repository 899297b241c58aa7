"""Client state that travels with orders, to workers that do not share the server's storage.

The server's store is the one that counts. A worker has a store of its own, which may be lost at any
time: with an order go the versions of client state that it needs and the worker lacks, and with the
answer comes the version that it made. A client's sessions of secure aggregation do not travel.
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
    """The version that an order would make, the one it expects, and those to be kept beside."""
    body = json.loads(message.header)["body"]
    return body["order"], body.get("expects", ""), body.get("keep", [])


def packed(store: Store, requests: Sequence[Request], there: set[Version]) -> Copies:
    """What must go along: the state that an order expects, and its answer if it was given before.

    ``there`` are the versions that the worker has; it is brought up to date.
    """
    copies: Copies = []
    for request in requests:
        for version in _versions(request.message)[:2]:
            known = (request.client, version)
            copy = None if known in there else store.copy(*known)
            if copy is not None:
                copies.append((*known, copy))
                there.add(known)
    return copies


def unpacked(
    store: Store, orders: Sequence[tuple[ClientId, Message]], copies: Copies
) -> dict[Version, tuple[int, int] | None]:
    """At the worker: put what came into its store; how each order's own version stands there."""
    for client, version, copy in copies:
        store.put(client, version, copy)
    own = [(client, _versions(message)[0]) for client, message in orders]
    return {known: store.stamp(*known) for known in own}


def made(store: Store, before: dict[Version, tuple[int, int] | None]) -> Copies:
    """At the worker, afterwards: the versions that the orders made."""
    new = [known for known, stamp in before.items() if store.stamp(*known) != stamp]
    return [(*known, store.copy(*known) or b"") for known in new]


def brought(store: Store, requests: Sequence[Request], copies: Copies, there: set[Version]) -> None:
    """Put what a worker made into the server's store, and drop there what no order can ask for."""
    for request in requests:
        version, expects, keep = _versions(request.message)
        for client, name, copy in copies:
            if (client, name) == (request.client, version):
                store.put(client, name, copy)
                store.keep(client, [version, expects, *keep])
                # A worker keeps the same ones; those it never had are not there either.
                there -= {k for k in there if k[0] == client and k[1] not in (expects, *keep)}
                there.add((client, version))
