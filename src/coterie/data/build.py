"""From a data set to a population: choose, partition, split, shift and encode the samples."""

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

# Rows copied at a time: enough to be fast, but few enough to avoid a second copy of the data.
ROWS_AT_A_TIME = 4096
PUBLIC_SHARE = 10  # with public = "auto", one in this many samples is public
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
    """Divide the training part of a data set among clients.

    ``samples`` is the size of a random subset to use. ``public`` is the number of unlabelled
    samples to reserve for the server: from the held-out part if the data set has one, otherwise
    from the training part, before it is partitioned; "auto" reserves a tenth of that part. With
    ``standardize``, tables are standardised by the mean and standard deviation of the training
    splits. Texts become sequences of ``length`` word numbers, from a vocabulary of at most
    ``max_vocabulary`` entries of the training splits. Tables are standardised before they are
    shifted, so noise is in units of standard deviations. The partition 'column' takes the name of
    one of the data set's columns as ``by``. ``metadata`` are columns that describe clients, such as
    their country, and have the same value in all rows of a client.

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
    chosen, public_x = _choose(raw, samples, public, seed)
    dealt = _deal(raw, chosen, clients, partition, dict(partition_params or {}), seed)
    order, sizes = _split_all(raw.y, chosen, dealt, test_fraction, val_fraction, seed)
    options = _Options(standardize, max_vocabulary, length)
    x, public_array, vocabulary, moments = _encode_all(raw, order, sizes, public_x, options)
    y = raw.y[order]
    groups = dealt.groups
    if shift is not None:
        groups = _shift_all(x, y, sizes, raw, shift, dict(shift_params or {}), groups, seed)
    elif shift_params:
        raise ConfigError("shift_params are given without a shift: choose a shift")
    names = dealt.names or tuple(str(i) for i in range(len(sizes)))
    rows = [chosen[held] for held in dealt.indices]
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
    """``x[order]`` as a contiguous array, without another copy of ``x``."""
    result = np.empty((len(order), *x.shape[1:]), x.dtype)
    for start in range(0, len(order), ROWS_AT_A_TIME):
        stop = start + ROWS_AT_A_TIME
        result[start:stop] = x[order[start:stop]]
    return result


def _check_raw(raw: RawData) -> None:
    same_length(raw.x, raw.y, "the data set")
    if raw.kind not in ("image", "table", "text"):
        raise DataError(f"unknown kind of data '{raw.kind}': choose 'image', 'table' or 'text'")
    if not isinstance(raw.x, list):
        check_finite(raw.x, "the data set")
    check_finite(raw.y, "the labels of the data set")
    if raw.classes is not None and (raw.y.min() < 0 or raw.y.max() >= len(raw.classes)):
        raise DataError(
            f"the data set's labels range from {raw.y.min()} to {raw.y.max()}, but it has "
            f"{len(raw.classes)} classes: 0..{len(raw.classes) - 1}"
        )


def _choose(
    raw: RawData, samples: int | None, public: int | Literal["auto"] | None, seed: int
) -> tuple[Array, Samples | None]:
    """Choose the positions of the samples to partition, and the public samples."""
    if public == "auto":
        total = len(raw) if raw.held_out is None else _held_out(raw)[1]
        available_for_public = len(raw) - (samples or 0) if raw.held_out is None else total
        public = max(1, min(total // PUBLIC_SHARE, available_for_public))
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
                f"public = {public}, but the {part} has only {available} samples: lower public"
            )
        shuffled = numpy_generator(seed_for(seed, "public")).permutation(available)
        chosen = np.sort(shuffled[:public])
        public_x = _take(source, chosen)
        if raw.held_out is None:
            order = np.sort(shuffled[public:])
    if samples is not None:
        if samples > len(order):
            raise DataError(
                f"samples = {samples}, but there are only {len(order)}"
                f"{f' besides the {public} public ones' if public else ''}: lower samples"
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
    chosen: Array,
    clients: int | None,
    name: str,
    params: dict[str, Any],
    seed: int,
) -> Partition:
    """Partition the chosen samples; an error if any client has fewer than two."""
    params = PARTITIONS.checked(name, params)
    if isinstance(params.get("by"), str):
        if params["by"] not in raw.columns:
            known = unknown("column", params["by"], raw.columns)
            raise DataError(f"partition '{name}': {known} (name it in columns when loading)")
        params["by"] = raw.columns[params["by"]]
    if "by" in params and len(params["by"]) == len(raw):
        params["by"] = np.asarray(params["by"])[chosen]
    dealt = PARTITIONS.find(name)(raw.y[chosen], clients, seed, **params)
    for client, held in enumerate(dealt.indices):
        if len(held) < 2:
            name_of = f" ({dealt.names[client]})" if dealt.names else ""
            raise DataError(
                f"the partition '{name}' leaves client {client}{name_of} with {len(held)} samples, "
                "but each needs at least 2: use fewer clients, more samples or another partition"
            )
    return dealt


def _split_all(
    y: Array, chosen: Array, dealt: Partition, test: float, val: float, seed: int
) -> tuple[Array, Sizes]:
    """The positions of all clients' train, val and test samples, in this order, and their sizes."""
    order: list[Array] = []
    sizes: Sizes = []
    for client, held in enumerate(dealt.indices):
        rows = chosen[held]
        splits = split_client(y[rows], test, val, seed, client)
        order += [rows[split] for split in splits]
        sizes.append((len(splits[0]), len(splits[1]), len(splits[2])))
    return np.concatenate(order), sizes


def train_rows(sizes: Sequence[tuple[int, int, int]]) -> list[slice]:
    """The slices of the clients' training splits in the order of ``_split_all``.

    >>> train_rows([(2, 1, 1), (3, 0, 1)])
    [slice(0, 2, None), slice(4, 7, None)]
    """
    starts = np.concatenate([[0], np.cumsum([sum(size) for size in sizes])]).tolist()
    return [slice(s, s + size[0]) for s, size in zip(starts, sizes, strict=False)]


def _encode_all(
    raw: RawData, order: Array, sizes: Sizes, public: Samples | None, options: _Options
) -> tuple[Array, Array | None, tuple[str, ...] | None, tuple[Array, Array] | None]:
    """Encode samples for models: clients' samples, public ones, vocabulary, mean and deviation."""
    if isinstance(raw.x, list):
        texts = [raw.x[i] for i in order]
        train_texts = (text for rows in train_rows(sizes) for text in texts[rows])
        vocabulary = build_vocabulary(train_texts, options.max_vocabulary)
        public_texts = None if public is None else [str(text) for text in public]
        encoded = None if public_texts is None else encode(public_texts, vocabulary, options.length)
        return encode(texts, vocabulary, options.length), encoded, vocabulary, None
    x = gather(raw.x, order)
    public_rows = None if public is None else np.asarray(public)
    if raw.kind == "table" and options.standardize:
        moments = _moments(x, train_rows(sizes))
        for table in (x, public_rows):
            if table is not None:
                table -= moments[0]
                table /= moments[1]
        return x, public_rows, None, moments
    return x, public_rows, None, None


def _moments(x: Array, rows: Sequence[slice]) -> tuple[Array, Array]:
    """The mean and standard deviation (1 if constant) of each column over the given rows."""
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
    """Shift the rows of all clients in place, and return the true groups."""
    groups = shift_groups(name, params, len(sizes), partition_groups)
    classes = None if raw.classes is None else len(raw.classes)
    start = 0
    shift = SHIFTS.find(name)
    for client, size in enumerate(sizes):
        rows = slice(start, start + sum(size))
        scene = Scene(raw.kind, classes, seed, client)
        x[rows], y[rows] = shift(x[rows], y[rows], groups[client], scene, **params)
        start = rows.stop
    if partition_groups is None:
        return groups
    # Both the partition and the shift define groups: combine them.
    pairs = list(zip(partition_groups, groups, strict=True))
    number_of_pair = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    return tuple(number_of_pair[pair] for pair in pairs)
