"""From a data set to a population: choose samples, deal them to clients, split, shift, encode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from coterie.data.metadata import constant_columns
from coterie.data.partition_steps import check_whole
from coterie.data.partitions import Partition
from coterie.data.population import Population, cut_into_clients
from coterie.data.raw import Array, RawData, Samples, check_finite, same_length
from coterie.data.shifts import Scene, shift_groups
from coterie.data.splits import check_fraction, split_client
from coterie.data.text import build_vocabulary, encode
from coterie.errors import ConfigError, DataError, unknown
from coterie.registry import PARTITIONS, SHIFTS
from coterie.seeds import numpy_generator, seed_for

# Rows moved at a time: large enough to be quick, small enough not to need a second copy of it all.
ROWS_AT_A_TIME = 4096
PUBLIC_SHARE = 10  # one of so many samples is public where nobody said how many
Sizes = list[tuple[int, int, int]]


@dataclass(frozen=True)
class _Options:
    standardize: bool
    max_vocabulary: int
    length: int


def build_population(
    raw: RawData,
    *,
    clients: int | None,
    partition: str,
    partition_params: Mapping[str, Any] | None = None,
    shift: str | None = None,
    shift_params: Mapping[str, Any] | None = None,
    test_fraction: float = 0.2,
    val_fraction: float = 0.1,
    public: int | Literal["auto"] | None = None,
    samples: int | None = None,
    standardize: bool = True,
    max_vocabulary: int = 10_000,
    length: int = 64,
    seed: int = 0,
    metadata: Sequence[str] = (),
) -> Population:
    """Divide a set's training part among clients.

    ``samples`` uses a random subset of that many. ``public`` sets that many unlabelled samples
    aside: from the held-out part if the set has one, else from the training part, before it is
    dealt out; "auto" is a tenth of that part. Tables are standardised (``standardize``) by the mean
    and standard deviation of the training splits; texts become ``length`` word numbers of a
    vocabulary of at most ``max_vocabulary`` entries, made from the training splits. A table is
    standardised before it is shifted, so noise is in standard deviations. The partition 'column'
    takes the name of one of the set's columns as ``by``. ``metadata`` are columns that describe
    clients, such as their country: each client has one value, the same in all its rows.

    >>> from coterie.data import load
    >>> population = build_population(load("digits"), clients=10, partition="iid")
    >>> len(population.clients), population.shape, len(population.clients[0].train)
    (10, (1, 8, 8), 130)
    """
    _check_raw(raw)
    check_fraction("test_fraction", test_fraction)
    check_fraction("val_fraction", val_fraction)
    check_whole("length", length, 1)
    check_whole("max_vocabulary", max_vocabulary, 3)
    kept, public_x = _choose(raw, samples, public, seed)
    dealt = _deal(raw, kept, clients, partition, dict(partition_params or {}), seed)
    order, sizes = _split_all(raw.y, kept, dealt, test_fraction, val_fraction, seed)
    options = _Options(standardize, max_vocabulary, length)
    x, public_array, vocabulary, moments = _encode_all(raw, order, sizes, public_x, options)
    y = raw.y[order]
    groups = dealt.groups
    if shift is not None:
        groups = _shift_all(x, y, sizes, raw, shift, dict(shift_params or {}), groups, seed)
    elif shift_params:
        raise ConfigError("shift_params were given without a shift: name the shift")
    names = dealt.names or tuple(str(i) for i in range(len(sizes)))
    rows = [kept[held] for held in dealt.indices]
    return Population(
        clients=cut_into_clients(torch.from_numpy(x), torch.from_numpy(y), sizes, names),
        kind=raw.kind,
        shape=tuple(x.shape[1:]),
        classes=raw.classes,
        targets=len(raw.classes) if raw.classes is not None else target_width(y),
        groups=groups,
        public=None if public_array is None else torch.from_numpy(public_array),
        vocabulary=vocabulary,
        mean=None if moments is None else torch.from_numpy(moments[0]),
        std=None if moments is None else torch.from_numpy(moments[1]),
        features=raw.features,
        metadata=constant_columns(raw.columns, metadata, rows, names),
    )


def target_width(y: Array) -> int:
    """The number of outputs of a regression."""
    return 1 if y.ndim == 1 else int(y.shape[1])


def gather(x: Array, order: Array) -> Array:
    """``x[order]`` as one contiguous array, made without a second copy of ``x``."""
    result = np.empty((len(order), *x.shape[1:]), x.dtype)
    for start in range(0, len(order), ROWS_AT_A_TIME):
        stop = start + ROWS_AT_A_TIME
        result[start:stop] = x[order[start:stop]]
    return result


def _check_raw(raw: RawData) -> None:
    same_length(raw.x, raw.y, "the data set")
    if raw.kind not in ("image", "table", "text"):
        raise DataError(f"data of the kind '{raw.kind}': choose 'image', 'table' or 'text'")
    if not isinstance(raw.x, list):
        check_finite(raw.x, "the data set")
    check_finite(raw.y, "the labels of the data set")
    if raw.classes is not None and (raw.y.min() < 0 or raw.y.max() >= len(raw.classes)):
        raise DataError(
            f"the data set's labels reach from {raw.y.min()} to {raw.y.max()}, but it has "
            f"{len(raw.classes)} classes: 0..{len(raw.classes) - 1}"
        )


def _choose(
    raw: RawData, samples: int | None, public: int | Literal["auto"] | None, seed: int
) -> tuple[Array, Samples | None]:
    """(positions of the samples to deal out, public samples)."""
    if public == "auto":
        whole = len(raw) if raw.held_out is None else _held_out(raw)[1]
        room = len(raw) - (samples or 0) if raw.held_out is None else whole
        public = max(1, min(whole // PUBLIC_SHARE, room))
    for name, number in (("samples", samples), ("public", public)):
        if number is not None:
            check_whole(name, number, 1)
    order = np.arange(len(raw))
    public_x: Samples | None = None
    if public is not None:
        source, available = (raw.x, len(raw)) if raw.held_out is None else _held_out(raw)
        if public > available or (raw.held_out is None and public >= len(raw)):
            part = "training part" if raw.held_out is None else "held-out part"
            raise DataError(
                f"public = {public}, but the {part} has {available} samples to take it from: "
                "lower public"
            )
        shuffled = numpy_generator(seed_for(seed, "public")).permutation(available)
        chosen = np.sort(shuffled[:public])
        public_x = _take(source, chosen)
        if raw.held_out is None:
            order = np.sort(shuffled[public:])
    if samples is not None:
        if samples > len(order):
            raise DataError(
                f"samples = {samples}, but only {len(order)} are there to choose from"
                f"{f' beside {public} public ones' if public else ''}: lower it"
            )
        rng = numpy_generator(seed_for(seed, "samples"))
        order = np.sort(rng.permutation(order)[:samples])
    return order, public_x


def _held_out(raw: RawData) -> tuple[Samples, int]:
    assert raw.held_out is not None
    return raw.held_out[0], len(raw.held_out[1])


def _take(x: Samples, positions: Array) -> Samples:
    return [x[i] for i in positions] if isinstance(x, list) else gather(x, positions)


def _deal(
    raw: RawData,
    kept: Array,
    clients: int | None,
    name: str,
    params: dict[str, Any],
    seed: int,
) -> Partition:
    """The partition of the kept samples, refused if it leaves a client without two samples."""
    params = PARTITIONS.checked(name, params)
    if isinstance(params.get("by"), str):
        if params["by"] not in raw.columns:
            known = unknown("column", params["by"], raw.columns)
            raise DataError(f"partition '{name}': {known} (name it in columns when loading)")
        params["by"] = raw.columns[params["by"]]
    if "by" in params and len(params["by"]) == len(raw):
        params["by"] = np.asarray(params["by"])[kept]
    dealt = PARTITIONS.find(name)(raw.y[kept], clients, seed, **params)
    for client, held in enumerate(dealt.indices):
        if len(held) < 2:
            who = f" ({dealt.names[client]})" if dealt.names else ""
            raise DataError(
                f"the partition '{name}' leaves client {client}{who} with {len(held)} samples; "
                "each needs 2 at least: use fewer clients, more samples or another partition"
            )
    return dealt


def _split_all(
    y: Array, kept: Array, dealt: Partition, test: float, val: float, seed: int
) -> tuple[Array, Sizes]:
    """(positions in the set, client after client as train, val, test; the sizes of these)."""
    order: list[Array] = []
    sizes: Sizes = []
    for client, held in enumerate(dealt.indices):
        own = kept[held]
        splits = split_client(y[own], test, val, seed, client)
        order += [own[split] for split in splits]
        sizes.append((len(splits[0]), len(splits[1]), len(splits[2])))
    return np.concatenate(order), sizes


def train_rows(sizes: Sequence[tuple[int, int, int]]) -> list[slice]:
    """Where the clients' training splits lie in the order of ``_split_all``.

    >>> train_rows([(2, 1, 1), (3, 0, 1)])
    [slice(0, 2, None), slice(4, 7, None)]
    """
    starts = np.concatenate([[0], np.cumsum([sum(size) for size in sizes])]).tolist()
    return [slice(s, s + size[0]) for s, size in zip(starts, sizes, strict=False)]


def _encode_all(
    raw: RawData, order: Array, sizes: Sizes, public: Samples | None, options: _Options
) -> tuple[Array, Array | None, tuple[str, ...] | None, tuple[Array, Array] | None]:
    """(clients' samples, public samples, vocabulary, mean and deviation) as models see them."""
    if isinstance(raw.x, list):
        texts = [raw.x[i] for i in order]
        seen = (text for rows in train_rows(sizes) for text in texts[rows])
        vocabulary = build_vocabulary(seen, options.max_vocabulary)
        open_texts = None if public is None else [str(text) for text in public]
        encoded = None if open_texts is None else encode(open_texts, vocabulary, options.length)
        return encode(texts, vocabulary, options.length), encoded, vocabulary, None
    x = gather(raw.x, order)
    open_array = None if public is None else np.asarray(public)
    if raw.kind == "table" and options.standardize:
        moments = _moments(x, train_rows(sizes))
        for table in (x, open_array):
            if table is not None:
                table -= moments[0]
                table /= moments[1]
        return x, open_array, None, moments
    return x, open_array, None, None


def _moments(x: Array, rows: Sequence[slice]) -> tuple[Array, Array]:
    """Mean and standard deviation of each column over some rows; 1 for a constant column."""
    count = sum(part.stop - part.start for part in rows)
    mean = sum(x[part].sum(axis=0, dtype=np.float64) for part in rows) / count
    squares = sum(((x[part] - mean) ** 2).sum(axis=0) for part in rows)
    deviation = np.sqrt(squares / count)
    deviation[deviation < 1e-12] = 1.0
    return mean.astype(np.float32), deviation.astype(np.float32)


def _shift_all(
    x: Array,
    y: Array,
    sizes: Sizes,
    raw: RawData,
    name: str,
    params: dict[str, Any],
    partition_groups: tuple[int, ...] | None,
    seed: int,
) -> tuple[int, ...]:
    """Shift every client's rows in place; returns the true groups."""
    groups = shift_groups(name, params, len(sizes), partition_groups)
    classes = None if raw.classes is None else len(raw.classes)
    start = 0
    shifted = SHIFTS.find(name)
    for client, size in enumerate(sizes):
        rows = slice(start, start + sum(size))
        scene = Scene(raw.kind, classes, seed, client)
        x[rows], y[rows] = shifted(x[rows], y[rows], groups[client], scene, **params)
        start = rows.stop
    if partition_groups is None:
        return groups
    # Both made groups: clients belong together when both agree.
    pairs = list(zip(partition_groups, groups, strict=True))
    place = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    return tuple(place[pair] for pair in pairs)
