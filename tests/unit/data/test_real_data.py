"""Facts known of the real sets; skipped unless COTERIE_DATA names a folder with them."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.data import build_population, describe, load


@pytest.mark.parametrize(
    ("name", "per_class"),
    [
        ("fashion-mnist", [6000] * 10),
        ("mnist", [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
    ],
)
def test_idx_sets(real_data, name, per_class):
    if not (real_data / name).is_dir():
        pytest.skip(f"{name} is not in {real_data}")
    raw = load(name, real_data)
    assert raw.x.shape == (60000, 1, 28, 28)
    assert raw.held_out[0].shape == (10000, 1, 28, 28)
    assert np.bincount(raw.y).tolist() == per_class


def test_a_thousand_clients_cost_one_copy(real_data):
    if not (real_data / "fashion-mnist").is_dir():
        pytest.skip(f"fashion-mnist is not in {real_data}")
    raw = load("fashion-mnist", real_data)
    population = build_population(
        raw, clients=1000, partition="dirichlet", partition_params={"alpha": 0.1}, public=500
    )
    storages = {
        split.x.untyped_storage().data_ptr(): split.x.untyped_storage().nbytes()
        for client in population.clients
        for split in (client.train, client.val, client.test)
    }
    assert list(storages.values()) == [60000 * 28 * 28]
    assert describe(population)["samples"]["min"] >= 10


@pytest.mark.e2e  # 60,000 pictures in one archive: test_user_sets has a few of them
def test_cifar_10_images(real_data):
    if not (real_data / "cifar-10").is_dir():
        pytest.skip(f"cifar-10 is not in {real_data}")
    raw = load("cifar-10", real_data)
    assert raw.x.shape == (50000, 3, 32, 32)
    assert np.bincount(raw.y).tolist() == [5000] * 10
    assert raw.held_out[0].shape == (10000, 3, 32, 32)
    assert raw.classes[6] == "frog"
