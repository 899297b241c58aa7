"""Populations from data that is already divided among clients, and from PyTorch datasets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from coterie.data.build import target_width
from coterie.data.metadata import Values, columns_by_client
from coterie.data.population import ClientData, Population, Split, cut_into_clients
from coterie.data.raw import (
    Array,
    ClassNames,
    RawData,
    as_samples,
    encode_targets,
    same_length,
)
from coterie.data.splits import check_fraction, split_client
from coterie.errors import ConfigError, DataError


@dataclass
class _Part:
    """A part of a client's data: all of it, or one split."""

    x: Array
    y: Array
    where: str


def from_clients(
    clients: Iterable[Any],
    *,
    test_fraction: float = 0.2,
    val_fraction: float = 0.1,
    seed: int = 0,
    classes: int | Sequence[str] | None = None,
    kind: str | None = None,
    metadata: Mapping[str, Values] | None = None,
    public: Array | Tensor | None = None,
) -> Population:
    """Create a population from data that is already divided among clients.

    Each client is a pair (x, y) of NumPy arrays or tensors, a pair (train, test) of such pairs, a
    ``ClientData`` with three splits, or a PyTorch dataset. Missing splits are split off. Integer
    labels are classes 0..max (or ``classes``), float labels are regression targets. Samples with
    one dimension are rows of a table, those with two or three are images: uint8, or float32, which
    is not scaled. With ``kind="text"``, integers of shape (N, length) are words. ``metadata`` has
    columns with a value for each client, in a list or by client id or name. ``public`` are
    unlabelled samples of the clients' shape that the server runs models on.

    >>> x, y = np.zeros((10, 3)), np.arange(10) % 2
    >>> population = from_clients([(x, y), (x, y)])
    >>> population.kind, population.shape, population.targets, len(population.clients[1].test)
    ('table', (3,), 2, 2)
    """
    check_fraction("test_fraction", test_fraction)
    check_fraction("val_fraction", val_fraction)
    if kind not in (None, "text", "table", "image"):
        raise ConfigError(f"kind = {kind!r}: choose 'image', 'table' or 'text'")
    items = list(clients)
    parts_of_clients = [_parts_of(item, f"client {i}") for i, item in enumerate(items)]
    if not parts_of_clients:
        raise DataError("there are no clients: pass at least one")
    data_kind = _unify_samples(parts_of_clients, kind)
    names = _unify_targets(parts_of_clients, classes)
    splits = [
        _three_splits(parts, test_fraction, val_fraction, seed, client)
        for client, parts in enumerate(parts_of_clients)
    ]
    x, y, sizes = _lay_out(splits)
    vocabulary = None
    if data_kind == "text":
        vocabulary = tuple(str(i) for i in range(int(x.max()) + 1))
    labels = [getattr(item, "name", "") or str(i) for i, item in enumerate(items)]
    return Population(
        clients=cut_into_clients(torch.from_numpy(x), torch.from_numpy(y), sizes, labels),
        kind=data_kind,
        shape=tuple(x.shape[1:]),
        classes=names,
        targets=len(names) if names is not None else target_width(y),
        groups=None,
        public=None if public is None else public_samples(public, data_kind, x),
        vocabulary=vocabulary,
        metadata=columns_by_client(metadata or {}, labels),
    )


def public_samples(public: Array | Tensor, kind: str, like: Array) -> Tensor:
    """Check that unlabelled samples have the kind and shape of the clients', and convert them."""
    if not isinstance(public, Tensor | np.ndarray):
        raise DataError("public samples must be a single array without labels, as in public=x")
    values = public.detach().cpu().numpy() if isinstance(public, Tensor) else np.asarray(public)
    where = "the public samples"
    if kind == "text":
        array = values.astype(like.dtype)
    else:
        samples, samples_kind = as_samples(values, where)
        if samples_kind != kind:
            raise DataError(
                f"{where} are of kind '{samples_kind}', but the clients' are of kind '{kind}'"
            )
        assert isinstance(samples, np.ndarray)
        array = samples
    if not len(array):
        raise DataError("there are no public samples: pass at least one")
    if array.shape[1:] != like.shape[1:] or array.dtype != like.dtype:
        raise DataError(
            f"{where} are {array.dtype} of shape {array.shape[1:]}, but the clients' samples are "
            f"{like.dtype} of shape {like.shape[1:]}; both must be the same"
        )
    return torch.from_numpy(array)


def raw_from_dataset(dataset: Dataset[Any]) -> RawData:
    """Convert a PyTorch dataset of (sample, label) into a data set for ``build_population``.

    Samples may be tensors, arrays, images or texts. Class names are those of its ``classes``.

    >>> tensors = TensorDataset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 1]))
    >>> raw_from_dataset(tensors).classes
    ('0', '1', '2')
    """
    where = f"the {type(dataset).__name__}"
    x, y = _dataset_arrays(dataset, where)
    names = getattr(dataset, "classes", None)
    usable = isinstance(names, list | tuple) and y.dtype.kind in "iu" and y.max() < len(names)
    (targets,), classes = encode_targets([(y, where)], list(names) if usable and names else None)
    if isinstance(x, list):
        return RawData(x, targets, "text", classes)
    samples, kind = as_samples(x, where)
    return RawData(samples, targets, kind, classes)


def _parts_of(item: Any, where: str) -> list[_Part]:
    """The parts of a client's data: one (to be split), (train, test) or (train, val, test)."""
    if isinstance(item, ClientData):
        named = (("train", item.train), ("val", item.val), ("test", item.test))
        return [_part(split, f"{where}, {name}") for name, split in named]
    if isinstance(item, tuple | list) and len(item) == 2:
        if all(_is_samples_and_labels(half) for half in item):
            return [_part(item[0], f"{where}, train"), _part(item[1], f"{where}, test")]
        return [_part(item, where)]
    if isinstance(item, Dataset | Split):
        return [_part(item, where)]
    raise DataError(
        f"{where}: a {type(item).__name__} is not client data; pass (x, y), (train, test), "
        "a ClientData or a PyTorch dataset"
    )


def _is_samples_and_labels(half: Any) -> bool:
    """Whether this is a pair (x, y), rather than an array or a list of values."""
    if isinstance(half, Split | Dataset):
        return True
    pair = isinstance(half, tuple | list) and len(half) == 2
    return pair and all(isinstance(value, np.ndarray | Tensor) for value in half)


def _part(source: Any, where: str) -> _Part:
    if isinstance(source, Dataset):
        x, y = _dataset_arrays(source, where)
        if isinstance(x, list):
            raise DataError(
                f"{where}: convert texts to numbers first, or use raw_from_dataset and "
                "build_population"
            )
    elif isinstance(source, Split):
        x, y = _to_numpy(source.x, where), _to_numpy(source.y, where)
    else:
        x, y = _to_numpy(source[0], where), _to_numpy(source[1], where)
    if x.ndim == 0 or y.ndim == 0:
        raise DataError(f"{where}: a single number is not a list of samples or labels")
    if len(x) != len(y) or not where.endswith((", val", ", test")):
        same_length(x, y, where)
    return _Part(x, y, where)


def _to_numpy(value: Any, where: str) -> Array:
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where}: the rows differ in length ({error})") from error


def _dataset_arrays(dataset: Dataset[Any], where: str) -> tuple[Array | list[str], Array]:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return _to_numpy(dataset.tensors[0], where), _to_numpy(dataset.tensors[1], where)
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(f"{where}: a dataset without a length cannot be divided") from None
    samples: list[Any] = []
    labels: list[Any] = []
    for i in range(count):
        item = dataset[i]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{where}: item {i} is not (sample, label)")
        samples.append(item[0] if isinstance(item[0], str) else _to_numpy(item[0], where))
        labels.append(_to_numpy(item[1], where))
    if not samples:
        raise DataError(f"{where}: there are no samples in it")
    if isinstance(samples[0], str):
        return samples, np.stack(labels)
    for i, sample in enumerate(samples):
        if sample.shape != samples[0].shape:
            raise DataError(
                f"{where}: item {i} has shape {sample.shape}, the first one {samples[0].shape}"
            )
    return np.stack(samples), np.stack(labels)


def _unify_samples(parts_of_clients: list[list[_Part]], kind: str | None) -> str:
    """Convert all parts to one form, in place, and return the kind of data."""
    reference: _Part | None = None
    data_kind = ""
    for part in (part for parts in parts_of_clients for part in parts if len(part.y)):
        part.x, data_kind = as_samples(part.x, part.where, kind=kind)
        reference = reference or part
        if (part.x.shape[1:], part.x.dtype) != (reference.x.shape[1:], reference.x.dtype):
            raise DataError(
                f"{part.where}: samples are {part.x.dtype} of shape {part.x.shape[1:]}, those of "
                f"{reference.where} {reference.x.dtype} of shape {reference.x.shape[1:]}"
            )
    if kind is not None and kind != data_kind:
        raise DataError(f"kind = '{kind}', but the samples have the shape of a {data_kind}")
    assert reference is not None
    for part in (part for parts in parts_of_clients for part in parts if not len(part.y)):
        part.x = reference.x[:0]
    return data_kind


def _unify_targets(
    parts_of_clients: list[list[_Part]], classes: int | Sequence[str] | None
) -> ClassNames | None:
    filled = [part for parts in parts_of_clients for part in parts if len(part.y)]
    targets, names = encode_targets([(part.y, part.where) for part in filled], classes)
    for part, target in zip(filled, targets, strict=True):
        part.y = target
        if target.shape[1:] != targets[0].shape[1:]:
            raise DataError(
                f"{part.where}: targets of shape {target.shape[1:]}, those of {filled[0].where} "
                f"of shape {targets[0].shape[1:]}"
            )
    for part in (part for parts in parts_of_clients for part in parts if not len(part.y)):
        part.y = targets[0][:0]
    return names


def _three_splits(
    parts: list[_Part], test_fraction: float, val_fraction: float, seed: int, client: int
) -> list[tuple[Array, Array]]:
    """The (x, y) pairs of train, val and test."""
    if len(parts) == 3:
        return [(p.x, p.y) for p in parts]
    part = parts[0]
    if len(parts) == 1 and len(part.y) < 2:
        raise DataError(f"{part.where}: {len(part.y)} sample; each client needs at least 2")
    test = test_fraction if len(parts) == 1 else 0.0
    positions = split_client(part.y, test, val_fraction, seed, client)
    splits = [(part.x[chosen], part.y[chosen]) for chosen in positions]
    return splits if len(parts) == 1 else [*splits[:2], (parts[1].x, parts[1].y)]


def _lay_out(
    clients: list[list[tuple[Array, Array]]],
) -> tuple[Array, Array, list[tuple[int, int, int]]]:
    """Concatenate all clients' samples into two arrays, and return them with the split sizes."""
    sizes = [(len(train[1]), len(val[1]), len(test[1])) for train, val, test in clients]
    first_x, first_y = clients[0][0]
    total = sum(sum(size) for size in sizes)
    x = np.empty((total, *first_x.shape[1:]), first_x.dtype)
    y = np.empty((total, *first_y.shape[1:]), first_y.dtype)
    start = 0
    for split_x, split_y in (split for splits in clients for split in splits):
        stop = start + len(split_y)
        x[start:stop], y[start:stop] = split_x, split_y
        start = stop
    return x, y, sizes
