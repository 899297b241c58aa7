"""Groups planted in Fashion-MNIST: four permutations of the labels, each client of one of them."""

import os

import pytest
import torch

import coterie
from coterie.data import build_population, load
from coterie.models import make_model
from support import drive, experiment, models, same_bits

pytestmark = pytest.mark.skipif(
    "COTERIE_DATA" not in os.environ,
    reason="set COTERIE_DATA to a folder that holds fashion-mnist to run these",
)


@pytest.fixture(scope="module")
def people():
    raw = load("fashion-mnist", folder=os.environ["COTERIE_DATA"])
    return build_population(
        raw, clients=20, partition="iid", shift="label-permutation", shift_params={"groups": 4},
        samples=4000, public=60,
    )  # fmt: skip


def trained(method, people, folder, rounds):
    made = experiment(
        method, people, schedule={"epochs": 2, "batch_size": 16, "lr": 0.1},
        model=lambda: make_model("mlp", people.shape, people.targets, hidden=(32,)),
    )  # fmt: skip
    state, channel, _ = drive(made, folder, rounds=rounds)
    return state, models(made, state, channel)


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        (coterie.fedclust(warmup_epochs=3, trial="off"), 1),
        (coterie.user_centric("auto", trial="off"), 1),
        (coterie.fedtsdp(stages="first", public_batch=60), 2),
    ],
    ids=["fedclust", "user-centric", "fedtsdp"],
)
def test_the_four_groups_are_found(method, rounds, people, tmp_path):
    state, _ = trained(method, people, tmp_path, rounds)
    found = {(people.groups[c], g) for c, g in state.groups.items()}
    assert len(found) == len(set(state.groups.values())) == 4


def test_dc_pfl_cuts_between_groups_and_not_through_them(people, tmp_path):
    method = coterie.dc_pfl(start=3, dynamic=False, gamma=0.8)
    state, _ = trained(method, people, tmp_path, 3)
    assert len(set(state.groups.values())) > 1
    assert len({(people.groups[c], g) for c, g in state.groups.items()}) == 4


@pytest.mark.parametrize(
    "method",
    [
        coterie.fedclust(threshold=float("inf")),
        coterie.dc_pfl(dynamic=False, alpha=1, start=1),
        coterie.fedtsdp(hopkins=2.0),
        coterie.layer_wise(coterie.fedavg(), 2, share=0.0, start=1),
    ],
    ids=["fedclust", "dc-pfl", "fedtsdp", "layer-wise"],
)
def test_at_its_limit_it_is_fedavg_to_the_bit(method, people, tmp_path):
    ours = trained(method, people, tmp_path / "a", 2)[1]
    theirs = trained(coterie.fedavg(), people, tmp_path / "b", 2)[1]
    assert same_bits(ours, theirs)
    assert torch.isfinite(ours[0]).all()


def test_fedclust_at_threshold_zero_is_local_to_the_bit(people, tmp_path):
    ours = trained(coterie.fedclust(threshold=0.0), people, tmp_path / "a", 2)[1]
    theirs = trained(coterie.local(), people, tmp_path / "b", 2)[1]
    assert same_bits(ours, theirs)
