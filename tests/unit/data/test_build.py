"""Populations: one storage, true to the data, seeded, and built from training splits only."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie.data
from coterie.data import PARTITIONS, ClientData, Population, RawData, Split, build_population
from coterie.data.text import build_vocabulary, words
from coterie.errors import ConfigError, DataError


def numbered_images(samples: int = 200, classes: int = 5, held_out: int = 0) -> RawData:
    """Each image carries its own number in two pixels, so that it can be traced."""

    def part(first: int, count: int):
        x = np.zeros((count, 1, 2, 2), np.uint8)
        numbers = np.arange(first, first + count)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = numbers % 256, numbers // 256
        return x, (numbers % classes).astype(np.int64)

    x, y = part(0, samples)
    names = tuple(f"class {i}" for i in range(classes))
    return RawData(x, y, "image", names, part(samples, held_out) if held_out else None)


def numbers_of(x: torch.Tensor) -> list[int]:
    pixels = x.to(torch.int64)
    return (pixels[:, 0, 0, 0] + 256 * pixels[:, 0, 0, 1]).tolist()


def splits_of(population: Population) -> list[Split]:
    return [s for c in population.clients for s in (c.train, c.val, c.test)]


def everything(population: Population) -> list[int]:
    return [n for split in splits_of(population) for n in numbers_of(split.x)]


def test_every_sample_is_somewhere_once_with_its_label():
    raw = numbered_images()
    population = build_population(raw, clients=7, partition="dirichlet")
    assert sorted(everything(population)) == list(range(200))
    for split in splits_of(population):
        assert [n % 5 for n in numbers_of(split.x)] == split.y.tolist()
    assert population.kind == "image"
    assert population.shape == (1, 2, 2)
    assert population.targets == 5
    assert population.classes == raw.classes
    assert population.groups is None


def test_clients_hold_what_the_partition_dealt():
    raw = numbered_images()
    dealt = PARTITIONS["shards"](raw.y, 10, 3)
    population = build_population(raw, clients=10, partition="shards", seed=3)
    for client, held in zip(population.clients, dealt.indices, strict=True):
        own = [n for s in (client.train, client.val, client.test) for n in numbers_of(s.x)]
        assert sorted(own) == held.tolist()


def test_all_clients_are_views_of_one_storage():
    population = build_population(numbered_images(), clients=7, partition="iid")
    splits = splits_of(population)
    for part in ("x", "y"):
        tensors = [getattr(split, part) for split in splits]
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
        assert all(t.is_contiguous() for t in tensors)
        offset = 0
        for tensor in tensors:
            assert tensor.storage_offset() == offset
            offset += tensor.numel()
        assert tensors[0].untyped_storage().nbytes() == offset * tensors[0].element_size()
    assert splits[0].x.dtype == torch.uint8
    assert splits[0].y.dtype == torch.int64


def test_share_moves_all_of_it_and_keeps_the_values():
    population = build_population(numbered_images(held_out=9), clients=7, partition="iid", public=4)
    before = [(split.x.clone(), split.y.clone()) for split in splits_of(population)]
    population.share()
    for split, (x, y) in zip(splits_of(population), before, strict=True):
        assert split.x.is_shared()
        assert split.y.is_shared()
        assert torch.equal(split.x, x)
        assert torch.equal(split.y, y)
    assert population.public is not None
    assert population.public.is_shared()
    assert len({s.x.untyped_storage().data_ptr() for s in splits_of(population)}) == 1


def test_share_accepts_an_empty_split():
    empty = Split(torch.zeros(0, 2), torch.zeros(0))
    full = Split(torch.zeros(2, 2), torch.zeros(2))
    Population((ClientData(full, empty, empty),), "table", (2,), None, 1, None, None, None).share()
    assert full.x.is_shared()


def test_seeds_decide():
    raw = numbered_images()

    def built(seed):
        return everything(build_population(raw, clients=5, partition="iid", seed=seed))

    assert built(1) == built(1)
    assert built(1) != built(2)


def test_the_data_set_is_not_changed():
    raw = numbered_images(held_out=20)
    x, y = raw.x.copy(), raw.y.copy()
    for shift in ("rotation", "label-permutation", "noise"):
        build_population(raw, clients=4, partition="iid", shift=shift, public=5)
    assert np.array_equal(raw.x, x)
    assert np.array_equal(raw.y, y)
    table = RawData(
        np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2, "table", "ab"
    )
    build_population(table, clients=2, partition="iid")
    assert np.array_equal(table.x, np.arange(40).reshape(20, 2))


def test_fractions():
    population = build_population(
        numbered_images(), clients=4, partition="iid", test_fraction=0.4, val_fraction=0.0
    )
    assert {len(c.test) for c in population.clients} == {20}
    assert {len(c.val) for c in population.clients} == {0}
    with pytest.raises(ConfigError, match="val_fraction = 1"):
        build_population(numbered_images(), clients=4, partition="iid", val_fraction=1)


def test_samples_is_a_subset():
    raw = numbered_images()
    chosen = everything(build_population(raw, clients=4, partition="iid", samples=60))
    assert len(set(chosen)) == 60
    assert max(chosen) > 100
    with pytest.raises(DataError, match="samples = 201, but there are only 200"):
        build_population(raw, clients=4, partition="iid", samples=201)


def test_public_comes_from_the_held_out_part():
    raw = numbered_images(held_out=30)
    population = build_population(raw, clients=4, partition="iid", public=12)
    open_numbers = numbers_of(population.public)
    assert len(set(open_numbers)) == 12
    assert min(open_numbers) >= 200
    assert len(everything(population)) == 200
    with pytest.raises(DataError, match="public = 31, but the held-out part has only 30"):
        build_population(raw, clients=4, partition="iid", public=31)


def test_public_is_taken_out_of_the_training_part_otherwise():
    population = build_population(
        numbered_images(), clients=4, partition="iid", public=30, samples=100
    )
    held, open_numbers = set(everything(population)), set(numbers_of(population.public))
    assert len(held) == 100
    assert len(open_numbers) == 30
    assert not held & open_numbers
    with pytest.raises(DataError, match="there are only 170"):
        build_population(numbered_images(), clients=4, partition="iid", public=30, samples=180)
    with pytest.raises(DataError, match="public = 200"):
        build_population(numbered_images(), clients=4, partition="iid", public=200)


def table(samples: int = 60) -> RawData:
    rng = np.random.default_rng(0)
    x = rng.normal(50, 9, (samples, 3)).astype(np.float32)
    x[:, 2] = 7
    site = np.array(["north", "south", "west"])[np.arange(samples) % 3]
    return RawData(x, np.arange(samples) % 2, "table", ("a", "b"), columns={"site": site})


def test_tables_are_standardised_by_training_splits_only():
    raw = table()
    population = build_population(raw, clients=3, partition="iid", public=6)
    train = torch.cat([client.train.x for client in population.clients])
    assert train[:, :2].mean(0).numpy() == pytest.approx(0, abs=1e-5)
    assert train[:, :2].std(0, unbiased=False).numpy() == pytest.approx(1, abs=1e-5)
    assert (train[:, 2] == 0).all()
    everyone = torch.cat([split.x for split in splits_of(population)])
    assert abs(float(everyone[:, 0].mean())) > 1e-4
    # Public data is scaled by the same numbers: undoing them gives raw rows back.
    plain = build_population(raw, clients=3, partition="iid", public=6, standardize=False)
    raw_train = torch.cat([client.train.x for client in plain.clients])
    mean, deviation = raw_train.mean(0), raw_train.std(0, unbiased=False)
    undone = population.public[:, :2] * deviation[:2] + mean[:2]
    assert undone.numpy() == pytest.approx(plain.public[:, :2].numpy(), rel=1e-4)


def test_by_column():
    population = build_population(
        table(), clients=None, partition="column", partition_params={"by": "site"}, samples=50
    )
    assert [client.name for client in population.clients] == ["north", "south", "west"]
    assert sum(len(split) for split in splits_of(population)) == 50
    with pytest.raises(DataError, match="unknown column 'sit'; did you mean 'site'"):
        build_population(table(), clients=3, partition="column", partition_params={"by": "sit"})


def test_regression():
    raw = table()
    for y, width in ((np.ones(60, np.float32), 1), (np.ones((60, 2), np.float32), 2)):
        population = build_population(
            RawData(raw.x, y, "table", None), clients=3, partition="quantity"
        )
        assert population.classes is None
        assert population.targets == width
        assert population.clients[0].train.y.dtype == torch.float32


def texts(samples: int = 40) -> RawData:
    rows = [f"common word{i} {'yes' if i % 2 else 'no'}!" for i in range(samples)]
    return RawData(rows, np.arange(samples) % 2, "text", ("no", "yes"))


def test_vocabulary_is_of_the_training_splits_only():
    population = build_population(texts(), clients=4, partition="iid", length=5, public=3)
    vocabulary = population.vocabulary
    assert vocabulary[:2] == ("<pad>", "<unknown>")
    assert set(vocabulary[2:4]) == {"common", "!"}
    assert population.shape == (5,)
    numbered = {word for word in vocabulary if word.startswith("word")}
    trained = sum(len(client.train) for client in population.clients)
    assert len(numbered) == trained < 37
    for client in population.clients:
        assert client.train.x.dtype == torch.int64
        assert (client.train.x != 1).all()
        assert (client.test.x[:, 1] == 1).all()  # its own word was never seen
        assert (client.test.x[:, 4] == 0).all()  # four words, then padding
    assert population.public.shape == (3, 5)


def test_text_options():
    small = build_population(texts(), clients=4, partition="iid", length=2, max_vocabulary=5)
    assert len(small.vocabulary) == 5
    assert small.shape == (2,)
    assert words("Two  words") == ["two", "words"]
    assert build_vocabulary(["z z a", "y z a b"], most=5)[2:] == ("z", "a", "b")
    with pytest.raises(ConfigError, match="length = 0"):
        build_population(texts(), clients=4, partition="iid", length=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition": "idd"}, "unknown partition 'idd'; did you mean 'iid'"),
        ({"partition_params": {"alfa": 1}}, "'iid' takes no parameters, but 'alfa'"),
        ({"partition": "dirichlet", "partition_params": {"alfa": 1}}, "did you mean 'alpha'"),
        ({"partition": "column"}, "needs the parameter 'by'"),
        ({"shift": "rotate"}, "unknown shift 'rotate'; did you mean 'rotation'"),
        ({"shift": "rotation", "shift_params": {"group": 2}}, "did you mean 'groups'"),
        ({"shift_params": {"groups": 2}}, "without a shift"),
        ({"clients": 101}, "leaves client 99 with 1 samples"),
        ({"clients": 300}, "300 clients"),
        ({"samples": 0}, "samples = 0"),
        ({"public": -1}, "public = -1"),
    ],
)
def test_wrong_requests(change, message):
    with pytest.raises((ConfigError, DataError), match=message):
        build_population(numbered_images(), **{"clients": 4, "partition": "iid", **change})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (RawData(np.ones((3, 2)), np.zeros(2, int), "table", ("a",)), "3 samples but 2 labels"),
        (RawData(np.ones((0, 2)), np.zeros(0, int), "table", ("a",)), "no samples"),
        (RawData(np.array([[np.nan]]), np.zeros(1, int), "table", ("a",)), "nan at row 0"),
        (RawData(np.ones((1, 1)), np.array([1]), "table", ("a",)), "from 1 to 1, but it has 1"),
        (RawData(np.ones((1, 1)), np.array([0]), "sound", ("a",)), "kind of data 'sound'"),
    ],
)
def test_wrong_raw_data(raw, message):
    with pytest.raises(DataError, match=message):
        build_population(raw, clients=1, partition="iid")


def test_a_client_with_too_little_is_named():
    raw = table(7)
    raw.columns["site"][:] = ["north"] * 6 + ["south"]
    with pytest.raises(DataError, match=r"leaves client 1 \(south\) with 1 samples"):
        build_population(raw, clients=2, partition="column", partition_params={"by": "site"})


def test_heavy_packages_are_imported_only_where_they_are_used():
    for path in Path(coterie.data.__file__).parent.glob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(statement, "names", [])]
            module = getattr(statement, "module", None) or ""
            for name in [module, *names]:
                assert name.split(".")[0] not in ("sklearn", "scipy", "PIL", "pooch"), path
