"""Populations from arrays, tensors and datasets that are already divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from coterie.data import ClientData, Split, build_population, from_clients, raw_from_dataset
from coterie.errors import ConfigError, DataError


def client(samples: int = 10, first: int = 0, classes: int = 3):
    x = np.arange(first, first + samples, dtype=np.float64)[:, None] * np.ones((1, 2))
    return x, (np.arange(first, first + samples) % classes)


def rows(*splits: Split) -> list[int]:
    return [row for split in splits for row in split.x[:, 0].int().tolist()]


def test_arrays_and_tensors():
    x, y = client(20, first=100)
    population = from_clients([client(), (torch.from_numpy(x), torch.from_numpy(y))])
    first, second = population.clients
    assert sorted(rows(first.train) + rows(first.val) + rows(first.test)) == list(range(10))
    assert sorted(rows(second.train) + rows(second.val) + rows(second.test)) == list(
        range(100, 120)
    )
    for split in (first.train, first.test, second.val):
        assert [r % 3 for r in rows(split)] == split.y.tolist()
    assert first.train.x.dtype == torch.float32
    assert (population.kind, population.shape, population.targets) == ("table", (2,), 3)
    assert population.classes == ("0", "1", "2")
    assert (len(second.train), len(second.val), len(second.test)) == (14, 2, 4)
    pointers = {c.train.x.untyped_storage().data_ptr() for c in population.clients}
    assert len(pointers) == 1


def test_another_client_changes_nothing():
    alone = from_clients([client()], seed=5).clients[0]
    together = from_clients([client(), client(50, 7)], seed=5).clients[0]
    assert torch.equal(alone.test.x, together.test.x)
    assert torch.equal(alone.val.x, together.val.x)


def test_train_test_pairs_keep_their_test():
    population = from_clients([(client(10), client(4, 50)), (client(10), client(6, 70))])
    assert rows(population.clients[1].test) == list(range(70, 76))
    assert len(population.clients[1].train) == 9
    assert len(population.clients[1].val) == 1


def test_client_data_keeps_its_splits_and_name():
    x, y = (torch.from_numpy(a) for a in client())
    empty = Split(x[:0], y[:0])
    given = ClientData(Split(x[:6], y[:6]), empty, Split(x[6:], y[6:]), name="Ann")
    kept = from_clients([given]).clients[0]
    assert rows(kept.train) == list(range(6))
    assert len(kept.val) == 0
    assert rows(kept.test) == [6, 7, 8, 9]
    assert kept.name == "Ann"


def test_datasets_images_and_regression():
    images = torch.arange(10 * 4, dtype=torch.uint8).reshape(10, 2, 2)
    dataset = TensorDataset(images, torch.arange(10) % 2)
    population = from_clients([dataset, Subset(dataset, range(4))])
    assert population.kind == "image"
    assert population.shape == (1, 2, 2)
    assert population.clients[0].train.x.dtype == torch.uint8
    floats = from_clients([(np.zeros((5, 3, 4, 4)), np.zeros(5, int))])
    assert floats.clients[0].train.x.dtype == torch.float32
    assert floats.kind == "image"
    targets = from_clients([(np.zeros((5, 2)), np.zeros((5, 3)))])
    assert (targets.classes, targets.targets) == (None, 3)
    assert targets.clients[0].train.y.dtype == torch.float32


def test_declared_classes_and_tokens():
    assert from_clients([client()], classes=["a", "b", "c", "d"]).targets == 4
    assert from_clients([client()], classes=7).targets == 7
    tokens = np.arange(20).reshape(10, 2)
    population = from_clients([(tokens, np.zeros(10, int))], kind="text")
    assert population.kind == "text"
    assert len(population.vocabulary) == 20
    assert population.clients[0].train.x.dtype == torch.int64


def bad(x, y):
    return [client(), (x, y)]


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ([], {}, "there are no clients"),
        (bad(np.zeros((0, 2)), np.zeros(0, int)), {}, "client 1: there are no samples"),
        (bad(np.zeros((3, 2)), np.zeros(4, int)), {}, "client 1: 3 samples but 4 labels"),
        (bad(np.array([[1, np.nan]] * 2), [0, 1]), {}, "client 1: nan at row 0, column 1"),
        (bad(np.array([[1, np.inf]] * 2), [0, 1]), {}, "client 1: inf at row 0, column 1"),
        (bad(np.zeros((2, 2)), [0, -1]), {}, "client 1: the label -1 at row 1"),
        (bad(np.zeros((2, 2)), [0, 3]), {"classes": 3}, "client 1: the label 3 at row 1"),
        (bad(np.zeros((2, 2)), [0.5, 1]), {}, "must all be of one type"),
        (bad(np.zeros((2, 3)), [0, 1]), {}, r"client 1: samples are .* \(3,\), those of client 0"),
        (bad(np.zeros((1, 2)), [0]), {}, "client 1: 1 sample"),
        (bad(np.zeros(2), [0, 1]), {}, "client 1: samples of shape"),
        (bad([[1, 2], [3]], [0, 1]), {}, "client 1: the rows differ in length"),
        ([client(), 5], {}, "client 1: a int is not client data"),
        ([client(), (1, 2)], {}, "client 1: a single number"),
        ([(client(), (np.zeros((2, 2)), np.array([0, 9])))], {"classes": 3}, "client 0, test"),
        ([(np.zeros((2, 2)), np.zeros((2, 1)))] * 2, {"kind": "image"}, "shape of a table"),
        ([(np.zeros((2, 2)), [0, 1])], {"kind": "text"}, "client 0: text must be whole"),
        ([(np.array([[-1]] * 2), [0, 1])], {"kind": "text"}, "token number -1 is negative"),
        ([(np.zeros((2, 2)), [0, 1])], {"kind": "sound"}, "kind = 'sound'"),
        ([(np.zeros((2, 2)), [0, 1])], {"test_fraction": 2}, "test_fraction = 2"),
        ([(np.zeros((2, 2)), np.zeros(2)), (np.zeros((2, 2)), np.zeros((2, 2)))], {}, "client 1"),
    ],
)
def test_wrong_clients_are_named(clients, options, message):
    with pytest.raises((DataError, ConfigError), match=message):
        from_clients(clients, **options)


class Pictures(Dataset):
    classes = ("cat", "dog", "eel")

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return Image.fromarray(np.full((4, 5, 3), i, np.uint8)), i % 2


class Plain(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_a_dataset_with_a_partition():
    raw = raw_from_dataset(Pictures())
    assert raw.x.shape == (40, 3, 4, 5)
    assert raw.x.dtype == np.uint8
    assert raw.x[7].max() == 7
    assert raw.classes == ("cat", "dog", "eel")
    population = build_population(raw, clients=4, partition="iid")
    assert population.targets == 3
    texts = raw_from_dataset(Plain([("one", "a"), ("two", "b")]))
    assert (texts.kind, texts.x, texts.classes) == ("text", ["one", "two"], ("a", "b"))
    floats = raw_from_dataset(Plain([(torch.zeros(3), 0.5), (torch.ones(3), torch.tensor(1.5))]))
    assert (floats.kind, floats.classes, floats.y.tolist()) == ("table", None, [0.5, 1.5])


class Endless(IterableDataset):
    def __iter__(self):
        yield 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Plain([]), "no samples"),
        (Plain([(torch.zeros(3), 1), (torch.zeros(4), 1)]), "item 1 has shape"),
        (Plain([5]), r"item 0 is not \(sample, label\)"),
        (Endless(), "without a length"),
    ],
)
def test_wrong_datasets(dataset, message):
    with pytest.raises(DataError, match=message):
        raw_from_dataset(dataset)


def test_float_labels_may_be_declared_classes():
    x = np.zeros((4, 2))
    assert from_clients([(x, np.array([0.0, 1, 1, 0]))], classes=2).classes == ("0", "1")
    with pytest.raises(DataError, match="whole numbers when classes are declared"):
        from_clients([(x, np.array([0.5, 1, 1, 0]))], classes=2)
    with pytest.raises(ConfigError, match="at least one class"):
        from_clients([(x, np.zeros(4, int))], classes=0)
    with pytest.raises(ConfigError, match="name each class once"):
        from_clients([(x, np.zeros(4, int))], classes=["a", "a"])
    with pytest.raises(DataError, match="numbers or texts"):
        from_clients([(x, np.array([None] * 4))])
