"""What engines share: one thread for torch, and the division of requests into units of work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from coterie.core.engine import Request
from coterie.core.messages import ClientId

TOGETHER = 1000  # samples that scoring requests of one model are batched to


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in this process.

    Bits then do not depend on the number of cores, and a server's spinning threads do not take the
    cores from its workers.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def units(
    requests: Sequence[Request],
    train: Mapping[ClientId, int],
    held: Mapping[ClientId, int],
    batch_clients: int = 1,
) -> list[list[Request]]:
    """Divide requests into units of work, the largest clients first.

    Up to ``batch_clients`` of them are trained together, about as many in each unit. Requests to
    score one model are batched in client-id order up to ``TOGETHER`` held-out samples. Neither rule
    knows the number of workers, so a unit, and with it every bit of its outcome, is the same on
    each engine.
    """
    single = sorted(
        (r for r in requests if not r.together), key=lambda r: (-train[r.client], r.client)
    )
    batches: list[list[Request]] = []
    open_batch: dict[tuple[int, ...], tuple[list[Request], int]] = {}
    for request in sorted((r for r in requests if r.together), key=lambda r: r.client):
        model = tuple(id(p) for p in request.message.payloads)
        batch, size = open_batch.get(model, ([], 0))
        if not batch:
            batches.append(batch)
        batch.append(request)
        size += held[request.client]
        open_batch[model] = (batch, size) if size < TOGETHER else ([], 0)
    count = -(-len(single) // batch_clients)
    ends = [i * len(single) // max(1, count) for i in range(count + 1)]
    return [single[i:j] for i, j in itertools.pairwise(ends)] + batches
