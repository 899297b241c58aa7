"""The server's own samples: where they come from when nobody says, and data of one's own."""

import numpy as np
import pytest
import torch

import coterie
from coterie.data import RawData, build_population, from_clients, load
from coterie.errors import ConfigError, DataError
from coterie.experiment.compare.entries import Populations, entries_of
from coterie.experiment.compare.sweep import Sweep
from coterie.experiment.config import experiment_of, parse, population_of, with_public
from coterie.experiment.experiment import execute
from support import digits, experiment


def with_test_part(held_out=40):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (200, 1, 8, 8)).astype(np.uint8)
    y = np.arange(200) % 4
    names = ("a", "b", "c", "d")
    return RawData(x, y, "image", names, (x[:held_out] // 2, y[:held_out]))


def images(population):
    return [client.train.x for client in population.clients]


def test_a_tenth_of_the_official_test_part_and_nobody_gets_other_clients():
    raw = with_test_part()
    plain, public = (
        build_population(raw, clients=4, partition="iid", public=p) for p in (None, "auto")
    )
    assert public.public.shape == (4, 1, 8, 8)
    known = {sample.tobytes() for sample in raw.held_out[0]}
    assert all(sample.numpy().tobytes() in known for sample in public.public)
    assert all(a.equal(b) for a, b in zip(images(plain), images(public), strict=True))


def test_without_a_test_part_a_tenth_of_all_is_set_aside():
    public = build_population(load("digits"), clients=4, partition="iid", public="auto")
    assert len(public.public) == 179
    dealt = sum(len(s) for c in public.clients for s in (c.train, c.val, c.test))
    assert dealt == 1797 - 179


def test_samples_that_were_asked_for_come_first():
    public = build_population(
        load("digits"), clients=4, partition="iid", public="auto", samples=1700
    )
    assert len(public.public) == 97
    with pytest.raises(DataError, match="besides the 1 public ones"):
        build_population(load("digits"), clients=4, partition="iid", public="auto", samples=1797)


@pytest.mark.parametrize("method", ["fedtsdp", "flis", "flis+fedprox"])
def test_methods_that_need_public_samples_have_them_without_further_settings(method):
    config = parse({"data": {"clients": 4, "samples": 200}, "method": {"name": method}})
    made = experiment_of(config)
    assert len(made.population.public) == 179
    assert experiment_of(parse({"data": {"clients": 4}})).population.public is None


def test_a_number_that_was_given_stays():
    config = parse({"data": {"public": 7}, "method": {"name": "fedtsdp"}})
    assert with_public(config, True) is config
    assert len(population_of(config).public) == 7
    assert with_public(parse({}), False).data.public is None


def compared(*methods, **data):
    def configure(asked, assignments):
        method = {"name": asked[1], **asked[2]}
        return parse({"data": {"clients": 4, **data}, "method": method})

    return entries_of(Sweep(methods=",".join(methods)), configure, Populations())


def test_all_methods_of_a_comparison_have_the_same_clients():
    entries = compared("fedavg", "fedtsdp")
    assert [e.config.data.public for e in entries] == ["auto", "auto"]
    fedavg, fedtsdp = (population_of(e.config) for e in entries)
    assert all(a.equal(b) for a, b in zip(images(fedavg), images(fedtsdp), strict=True))
    assert [e.config.data.public for e in compared("fedavg", "ifca:k=2")] == [None, None]
    assert [e.config.data.public for e in compared("fedavg", "flis", public=9)] == [9, 9]


def own(count=4):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(30, 5)).astype(np.float32), np.arange(30) % 3) for _ in range(count)]


def test_public_samples_of_ones_own():
    x = np.zeros((12, 5), np.float32)
    assert from_clients(own(), public=x).public.shape == (12, 5)
    result = coterie.simulate(
        own(), model="logistic", method="fedtsdp", public=torch.from_numpy(x), rounds=2,
        engine="loop",
    )  # fmt: skip
    assert len(result.history) == 2


def test_own_data_without_public_samples_are_refused():
    with pytest.raises(ConfigError, match=r"fedtsdp needs public samples.*public=x"):
        coterie.simulate(own(), model="logistic", method="fedtsdp", rounds=1, engine="loop")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.zeros((3, 4), np.float32), "shape"),
        (np.zeros((0, 5), np.float32), "there are no public samples"),
        ((np.zeros((3, 5), np.float32), np.zeros(3)), "without labels"),
        (np.zeros((3, 1, 5, 5), np.uint8), "kind 'image'"),
    ],
)
def test_public_samples_that_are_unlike_the_clients(wrong, says):
    with pytest.raises(DataError, match=says):
        from_clients(own(), public=wrong)


# --- FedTSDP at its defaults ----------------------------------------------------------------------

BUSY = {"epochs": 3, "batch_size": 10, "lr": 0.1, "momentum": 0.0}


@pytest.mark.parametrize("shift", ["label-permutation", "rotation"])
def test_fedtsdp_finds_planted_groups_at_its_defaults(shift):
    people = build_population(
        load("digits"), clients=8, partition="iid", shift=shift, shift_params={"groups": 2},
        samples=800, public=100, seed=1,
    )  # fmt: skip
    method = coterie.fedtsdp(hopkins=0.3)
    result = execute(experiment(method, people, schedule=BUSY, settings={"rounds": 3}))
    truth = people.groups
    assert len(set(result.groups.values())) == 2
    assert len({(truth[c], g) for c, g in result.groups.items()}) == 2


def test_fedtsdp_asks_for_halves_at_first_and_after_twice_as_many_rounds():
    people = digits(clients=6, groups=2)
    method = coterie.fedtsdp(hopkins=0.0)
    result = execute(experiment(method, people, settings={"rounds": 8}))
    asked = [e["round"] for e in result.history if "stages" in e["notes"]]
    assert asked == [1, 2, 4, 8]  # rounds count from 1; from round r the next is 2r


def test_alike_clients_stay_together_and_train_as_in_fedavg():
    people = digits(clients=6, groups=1)
    same = list(people.clients[:1]) * 6
    people = coterie.Population(
        tuple(same), people.kind, people.shape, people.classes, people.targets, public=people.public
    )
    ours, theirs = (
        execute(experiment(m, people, settings={"rounds": 4}))
        for m in (coterie.fedtsdp(hopkins=0.0), coterie.fedavg())
    )
    assert len(set(ours.groups.values())) == 1
    assert [e["notes"]["shared_layers"] for e in ours.history] == [2.0] * 4
    assert ours.weights(0).vector.equal(theirs.weights(0).vector)
    assert any("second stage changed nothing" in w for w in ours.summary["warnings"])


def test_samples_given_to_a_run_come_before_those_of_its_population():
    first, second = np.zeros((5, 6), np.float32), np.ones((4, 6), np.float32)
    people = from_clients([(np.eye(12, 6, dtype=np.float32), np.arange(12) % 3)] * 3, public=first)
    settings = {"method": "fedtsdp", "model": "logistic", "rounds": 1, "engine": "loop"}
    for given, held in ((None, first), (second, second)):
        result = coterie.simulate(people, public=given, **settings)
        assert result.plan.population.public.tolist() == held.tolist()
