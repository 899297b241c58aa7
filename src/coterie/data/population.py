"""Populations: the data of all clients, stored once.

All samples are in one tensor, in the order client 0 train, val, test, client 1 train, ... Clients'
splits are views of it, which are made when they are asked for, so that a hundred thousand clients
need no more memory than their data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.lazy import named

_RECENT = 4096  # clients whose views are kept


@dataclass(frozen=True, repr=False)
class Split:
    """Samples with their labels or regression targets.

    ``x`` holds uint8 images (N,C,H,W), float32 tables (N,F) or int64 token ids (N,L); ``y`` holds
    int64 labels (N,), or float32 targets (N,) or (N,k).

    >>> import torch
    >>> len(Split(torch.zeros(3, 4), torch.tensor([0, 1, 0])))
    3
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def __repr__(self) -> str:
        return f"<Split: {len(self):,} samples of shape {tuple(self.x.shape[1:])}>"


@dataclass(frozen=True, repr=False)
class ClientData:
    """One client's three splits; ``name`` is for reports only."""

    train: Split
    val: Split
    test: Split
    name: str = ""

    def __repr__(self) -> str:
        counts = (
            f"{len(self.train):,} train, {len(self.val):,} val, {len(self.test):,} test samples"
        )
        return f"<ClientData{f' {self.name!r}' if self.name else ''}: {counts}>"


class Clients(Sequence[ClientData]):
    """Clients whose splits are slices of two tensors, made when a client is asked for.

    ``ends`` has a row for each client: where its train, val and test samples end. Each client
    begins where the one before it ends.
    """

    def __init__(self, x: Tensor, y: Tensor, ends: NDArray[np.int64], names: Sequence[str]) -> None:
        self.x, self.y, self.ends, self.names = x, y, ends, names
        self._recent: dict[int, ClientData] = {}

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> ClientData: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ClientData, ...]: ...
    def __getitem__(self, index: int | slice) -> ClientData | tuple[ClientData, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        place = range(len(self))[index]
        if place not in self._recent:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            self._recent[place] = self._cut(place)
        return self._recent[place]

    def _cut(self, place: int) -> ClientData:
        ends = self.ends[place].tolist()
        starts = (int(self.ends[place - 1][2]) if place else 0, *ends[:2])
        pairs = zip(starts, ends, strict=True)
        first, second, third = (Split(self.x[a:b], self.y[a:b]) for a, b in pairs)
        return ClientData(first, second, third, name=self.names[place])

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """The numbers of train, val and test samples of each client."""
        flat = np.diff(self.ends.reshape(-1), prepend=0)
        return [(a, b, c) for a, b, c in flat.reshape(-1, 3).tolist()]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recent": {}}


@dataclass(frozen=True, repr=False)
class Population:
    """The data of all clients, and what a model needs to know about it.

    ``kind`` is "image", "table" or "text", and ``shape`` the shape of a sample. ``classes`` are the
    class names, or None for regression, and ``targets`` is the number of a model's outputs.
    ``groups`` is the true hidden group of each client, if the scenario has groups; ``public`` are
    unlabelled samples. ``mean`` and ``std`` are those used to standardise a table, and ``features``
    its column names. ``metadata`` has columns with a value for each client, such as its site, by
    client id.
    """

    clients: Sequence[ClientData]
    kind: str
    shape: tuple[int, ...]
    classes: tuple[str, ...] | None
    targets: int
    groups: tuple[int, ...] | None = None
    public: Tensor | None = None
    vocabulary: tuple[str, ...] | None = None
    mean: Tensor | None = None
    std: Tensor | None = None
    features: tuple[str, ...] | None = None
    metadata: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """The numbers of train, val and test samples of each client."""
        if isinstance(self.clients, Clients):
            return self.clients.sizes
        return [(len(c.train), len(c.val), len(c.test)) for c in self.clients]

    def share(self) -> None:
        """Move all data to shared memory, so that worker processes use a single copy.

        Views of a tensor share its storage, so moving one of them moves all.
        """
        for tensor in self._tensors():
            if tensor.numel():
                tensor.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def lines(self) -> list[str]:
        """The population in a few lines: its clients, their samples, and what is known of them."""
        splits = self.sizes
        train, val, test = (
            (sum(part) for part in zip(*splits, strict=True)) if splits else (0, 0, 0)
        )
        totals = [sum(each) for each in splits] or [0]
        kind = {"image": "images", "table": "rows", "text": "texts"}.get(self.kind, self.kind)
        labels = "targets are numbers" if self.classes is None else f"{len(self.classes)} classes"
        few, many = min(totals), max(totals)
        each = f"{few:,} each" if few == many else f"{few:,} to {many:,} each"
        lines = [
            f"{len(self.clients)} clients, {sum(totals):,} samples, {each}",
            f"{train:,} for training, {val:,} for validation, {test:,} for testing",
            f"{kind} of shape {'×'.join(map(str, self.shape)) or '1'}, {labels}",
        ]
        if self.groups is not None:
            lines.append(f"{len(set(self.groups))} true groups")
        if self.public is not None:
            lines.append(f"{len(self.public):,} public samples")
        if self.metadata:
            lines.append(f"metadata: {', '.join(list(self.metadata)[:8])}")
        return lines

    def __repr__(self) -> str:
        return "\n".join(["<Population", *(f"  {line}" for line in self.lines), ">"])

    def _repr_html_(self) -> str:
        return str(named("coterie.report.object_cards:population_card")(self))

    def _tensors(self) -> Iterator[Tensor]:
        if isinstance(self.clients, Clients):
            yield from (self.clients.x, self.clients.y)
        for client in () if isinstance(self.clients, Clients) else self.clients:
            for split in (client.train, client.val, client.test):
                yield split.x
                yield split.y
        if self.public is not None:
            yield self.public


def cut_into_clients(
    x: Tensor, y: Tensor, sizes: Sequence[tuple[int, int, int]], names: Sequence[str]
) -> Clients:
    """Cut ``x`` and ``y`` into clients, as views: client by client, each as train, val, test.

    >>> import torch
    >>> clients = cut_into_clients(torch.arange(6), torch.arange(6), [(2, 0, 1), (1, 1, 1)], "ab")
    >>> clients[1].train.x, clients[1].name
    (tensor([3]), 'b')
    """
    if len(sizes) != len(names):
        raise ValueError(f"{len(sizes)} clients have {len(names)} names")
    ends = np.cumsum(np.array(sizes, dtype=np.int64).reshape(-1)).reshape(-1, 3)
    return Clients(x, y, ends, names)
