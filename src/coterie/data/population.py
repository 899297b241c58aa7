"""Populations: the data of all clients, stored once.

All samples are in one tensor, in the order client 0 train, val, test, client 1 train, ... Clients'
splits are views of it, so that a thousand clients need no more memory than their data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from coterie.lazy import named


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

    clients: tuple[ClientData, ...]
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
        splits = [(len(c.train), len(c.val), len(c.test)) for c in self.clients]
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
        for client in self.clients:
            for split in (client.train, client.val, client.test):
                yield split.x
                yield split.y
        if self.public is not None:
            yield self.public


def cut_into_clients(
    x: Tensor, y: Tensor, sizes: Sequence[tuple[int, int, int]], names: Sequence[str]
) -> tuple[ClientData, ...]:
    """Cut ``x`` and ``y`` into clients, as views: client by client, each as train, val, test.

    >>> import torch
    >>> clients = cut_into_clients(torch.arange(6), torch.arange(6), [(2, 0, 1), (1, 1, 1)], "ab")
    >>> clients[1].train.x, clients[1].name
    (tensor([3]), 'b')
    """
    clients = []
    start = 0
    for name, (train, val, test) in zip(names, sizes, strict=True):
        ends = (start + train, start + train + val, start + train + val + test)
        starts = (start, *ends[:2])
        first, second, third = (Split(x[a:b], y[a:b]) for a, b in zip(starts, ends, strict=True))
        clients.append(ClientData(first, second, third, name=name))
        start = ends[2]
    return tuple(clients)
