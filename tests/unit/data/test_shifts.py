"""Shifts: what each does to a client, and who is in which group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.ndimage import rotate

from coterie.data import SHIFTS, RawData, build_population
from coterie.data.shifts import Scene, group_permutations
from coterie.errors import ConfigError, DataError

IMAGE = Scene("image", 10, seed=0, client=0)


def images(samples: int = 160, size: tuple[int, int] = (6, 6)) -> RawData:
    x = np.random.default_rng(0).integers(0, 256, (samples, 1, *size)).astype(np.uint8)
    y = np.arange(samples) % 10
    return RawData(x, y, "image", tuple("0123456789"), (x[:20], y[:20]))


def pair(raw=None, **options):
    """The same population without and with a shift."""
    raw = raw or images()
    common = {"clients": 8, "partition": "iid", "public": 5, "seed": 4}
    common |= {k: options.pop(k) for k in list(options) if k in common or "partition" in k}
    return build_population(raw, **common), build_population(raw, **common, **options)


def splits(population):
    for client in population.clients:
        yield client.train, client.val, client.test


def test_rotation_by_quarter_turns_is_exact_everywhere():
    plain, shifted = pair(shift="rotation")
    assert shifted.groups == (0, 1, 2, 3, 0, 1, 2, 3)
    for group, before, after in zip(shifted.groups, splits(plain), splits(shifted), strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(other.x, torch.rot90(one.x, group, (2, 3)))
            assert torch.equal(other.y, one.y)
    assert torch.equal(plain.public, shifted.public)
    assert shifted.clients[0].train.x.is_contiguous()
    assert plain.groups is None


def test_rotation_directions_agree():
    """The interpolated rotation turns the same way as the exact one."""
    x = images().x
    by_interpolation = rotate(x, 90, axes=(3, 2), reshape=False, order=1)
    exact, _ = SHIFTS["rotation"](x, x, 1, IMAGE, groups=4)
    assert np.abs(by_interpolation.astype(int) - exact).max() <= 1


def test_rotation_by_an_eighth():
    blank = np.zeros((1, 1, 9, 9), np.uint8)
    blank[0, 0, 4, 8] = 200  # at the right edge: an eighth anticlockwise is up and to the right
    turned, _ = SHIFTS["rotation"](blank, blank, 1, IMAGE, groups=8)
    assert turned.dtype == np.uint8
    row, column = np.unravel_index(turned[0, 0].argmax(), (9, 9))
    assert row in (1, 2)
    assert column in (6, 7)


def test_rotation_of_images_that_are_not_square():
    _, shifted = pair(images(size=(4, 6)), shift="rotation", shift_params={"groups": 2})
    assert shifted.shape == (1, 4, 6)
    with pytest.raises(DataError, match="needs square images, but these are 4x6"):
        pair(images(size=(4, 6)), shift="rotation")


def test_label_permutation_is_one_bijection_a_group():
    plain, shifted = pair(shift="label-permutation", shift_params={"groups": 3})
    maps = group_permutations(10, 3, seed=4)
    assert maps[0].tolist() == list(range(10))
    assert len({tuple(m) for m in maps}) == 3
    assert all(sorted(m) == list(range(10)) for m in maps)
    for group, before, after in zip(shifted.groups, splits(plain), splits(shifted), strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(other.x, one.x)
            assert other.y.tolist() == maps[group][one.y.numpy()].tolist()


def test_label_permutations_can_be_used_up():
    assert len({tuple(p) for p in group_permutations(3, 6, seed=0)}) == 6
    with pytest.raises(DataError, match="3 classes have only 6 permutations"):
        group_permutations(3, 7, seed=0)
    assert len(group_permutations(200, 3, seed=0)) == 3


def test_noise_grows_with_the_group():
    flat = RawData(np.full((800, 1, 6, 6), 128, np.uint8), np.zeros(800, int), "image", ("a",))
    _, shifted = pair(flat, shift="noise", shift_params={"groups": 4, "level": 0.05})
    for group, (train, _, test) in zip(shifted.groups, splits(shifted), strict=True):
        for split in (train, test):
            assert float(split.x.float().std()) == pytest.approx(0.05 * group * 255, rel=0.1)
    _, loud = pair(flat, shift="noise", shift_params={"groups": 4, "level": 5.0})
    values = loud.clients[3].train.x
    assert float(((values == 0) | (values == 255)).float().mean()) > 0.9
    assert torch.equal(loud.public, torch.full_like(loud.public, 128))


def test_noise_on_tables_is_in_standard_deviations():
    x = np.random.default_rng(0).normal(0, 1000, (4000, 3)).astype(np.float32)
    raw = RawData(x, np.zeros(4000, int), "table", ("a",))
    plain, shifted = pair(raw, shift="noise", shift_params={"groups": 2, "level": 0.5})
    difference = shifted.clients[1].train.x - plain.clients[1].train.x
    assert float(difference.std()) == pytest.approx(0.5, rel=0.1)
    assert torch.equal(shifted.clients[0].train.x, plain.clients[0].train.x)
    other = shifted.clients[3].train.x - plain.clients[3].train.x
    together = torch.stack([difference[:300].flatten(), other[:300].flatten()])
    assert abs(float(torch.corrcoef(together)[0, 1])) < 0.2  # each client has its own noise


def test_groups_of_the_partition_are_kept_when_as_many():
    params = {"partition": "label-skew", "partition_params": {"groups": 4}}
    _, shifted = pair(shift="rotation", **params)
    assert shifted.groups == (0, 1, 2, 3) * 2
    _, shifted = pair(shift="rotation", shift_params={"groups": 3}, **params)
    assert len(set(shifted.groups)) == 8  # i % 4 and i % 3 together tell all eight clients apart


@pytest.mark.parametrize(
    ("raw", "shift", "params", "message"),
    [
        (None, "rotation", {"groups": 9}, "at least 9 clients, but there are 8"),
        (None, "rotation", {"groups": 0}, "groups = 0"),
        (None, "noise", {"level": -1}, "level = -1"),
        ("table", "rotation", {}, "is for images, but this is table data"),
        ("text", "noise", {}, "but this is text data"),
        ("regression", "label-permutation", {}, "this is a regression data set"),
    ],
)
def test_wrong_shifts(raw, shift, params, message):
    x = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    y = np.arange(80) % 2
    made = {
        None: images(),
        "table": RawData(x, y, "table", ("a", "b")),
        "text": RawData(["some words"] * 80, y, "text", ("a", "b")),
        "regression": RawData(x, x[:, 0], "table", None),
    }[raw]
    with pytest.raises((DataError, ConfigError), match=message):
        pair(made, shift=shift, shift_params=params)
