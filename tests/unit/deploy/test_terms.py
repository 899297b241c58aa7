"""What server and clients agree on: whose data is like whose, labels, and what may travel."""

from dataclasses import replace

import pytest
import torch

from coterie.core.weights import Layout, Weights
from coterie.data import ClientData, Population, Split
from coterie.deploy.terms import (
    Described,
    digest_of_start,
    in_common,
    seen_from_client,
    seen_from_server,
    shell,
    travelling,
    unlike,
)
from coterie.errors import DataError
from coterie.experiment.config import Config, parse
from support import digits

INF, NAN = float("inf"), float("nan")


def described(classes=("0", "1"), **changes):
    made = Described("table", (3,), "float32", "int64", (), classes, 2, 0, (8, 1, 2))
    return replace(made, **changes)


def people(classes, labels):
    """One client with these labels, of which a third each is for training, validation, test."""
    y = torch.tensor(labels)
    part = len(y) // 3
    splits = [Split(torch.zeros(len(p), 3), p) for p in torch.split(y, part)]
    return Population((ClientData(*splits),), "table", (3,), classes, len(classes or [1]))


# --- descriptions --------------------------------------------------------------------------------


def test_a_description_has_sizes_and_names_and_no_samples():
    population = digits(clients=3, samples=90)
    own = population.clients[1]
    found = Described.of(population, 1)
    assert found.sizes == (len(own.train), len(own.val), len(own.test))
    assert (found.kind, found.shape, found.samples, found.labels) == (
        "image", population.shape, str(own.train.x.dtype).split(".")[1], "int64",
    )  # fmt: skip
    assert found.classes == tuple("0123456789")
    assert found.groups == population.groups[1]
    assert Described.from_json(found.to_json()) == found
    assert len(str(found.to_json())) < 400


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [1, 2]},
        {"sizes": [0, 2, 3]},
        {"sizes": [5, -1, 3]},
        {"sizes": [2**50, 0, 0]},
        {"sizes": ["many", 0, 0]},
        {"sizes": None},
        {"samples": "object"},
        {"samples": "__class__"},
        {"labels": "float16"},
        {"shape": 5},
        {"shape": ["x"]},
        {"classes": 5},
        {"groups": "a"},
        {"targets": None},
        {"sizes": [INF, 0, 0]},
        {"sizes": [5, 0, 2**31 + 1]},
        {"sizes": [NAN, 0, 0]},
        {"shape": [INF]},
        {"shape": [2**26 + 1]},
        {"shape": [2**20, 2**20]},
        {"shape": [1] * 9},
        {"shape": [0]},
        {"shape": [-3, -3]},
        {"width": [2**17]},
        {"width": [[[]]]},
        {"classes": []},
        {"classes": ["c"] * 10_001},
        {"targets": 10**9},
        {"targets": 0},
        {"vocabulary": 10**9},
        {"vocabulary": -1},
        {"groups": INF},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_description_that_makes_no_sense_is_refused(change):
    with pytest.raises(DataError, match="is invalid"):
        Described.from_json({**described().to_json(), **change})


@pytest.mark.parametrize("tree", [None, [], 5, "text", {}], ids=str)
def test_what_is_no_description_is_refused(tree):
    with pytest.raises(DataError, match="is invalid"):
        Described.from_json(tree)


def test_names_of_any_length_are_cut():
    told = {**described().to_json(), "name": "x" * 10**6, "classes": ["y" * 10**6]}
    found = Described.from_json(told)
    assert len(found.name) == len(found.classes[0]) == 200


# --- in common -----------------------------------------------------------------------------------


def common(*given):
    """What clients have in common who all fit."""
    found, odd = in_common(dict(enumerate(given)))
    assert odd == {}
    return found


def test_classes_of_all_are_the_classes():
    found = common(described(("0", "2")), described(("1", "10")), described(("2",)))
    assert found.classes == ("0", "1", "2", "10")  # as numbers
    assert found.targets == 4
    found = common(described(("well", "ill")), described(("dead", "10")))
    assert found.classes == ("10", "dead", "ill", "well")  # as words
    found = common(described(("1", "-3")), described(("2",)))
    assert found.classes == ("-3", "1", "2")


def test_equal_classes_keep_their_order():
    assert common(described(("well", "ill")), described(("well", "ill"))).classes == ("well", "ill")


def test_the_order_does_not_depend_on_who_comes_first():
    ways = [("07", "1"), ("7", "1"), ("3",)]
    found = {
        common(*map(described, order)).classes for order in (ways, ways[::-1], ways[1:] + ways[:1])
    }
    assert found == {("1", "3", "07", "7")}


ODD = [
    ({"shape": (4,)}, "its data is of shape (4,), not (3,)"),
    ({"kind": "image"}, "its data is of kind image, not table"),
    ({"samples": "uint8"}, "its data is of samples uint8, not float32"),
    ({"labels": "float32"}, "its data is of labels float32"),
    ({"width": (2,)}, "its data is of width (2,)"),
    ({"classes": None}, "it predicts numbers where the other clients predict classes"),
]


@pytest.mark.parametrize(("change", "told"), ODD)
@pytest.mark.parametrize("place", [0, 2], ids=["first", "last"])
def test_who_does_not_fit_most_is_named_and_the_others_go_on(change, told, place):
    three = [described(("0", "2")), described(("1",))]
    three.insert(place, described(**{"classes": ("x", "y"), **change}))
    found, odd = in_common({2 * i: own for i, own in enumerate(three)})
    assert list(odd) == [2 * place]
    assert told in odd[2 * place]
    assert found.shape == (3,)
    assert found.classes == ("0", "1", "2")  # none of the one that is odd
    assert unlike(three[place], three[1]) == odd[2 * place]


def test_numbers_to_predict_are_as_many():
    two, three = (described(None, targets=n, labels="float32") for n in (2, 3))
    assert unlike(two, three) == "it predicts 2 numbers, not 3"
    assert unlike(two, replace(two, sizes=(1, 1, 1), name="x", vocabulary=4, groups=2)) == ""


@pytest.mark.parametrize("classes", [("a",), None])
def test_a_vocabulary_is_the_largest(classes):
    assert common(*(described(classes, vocabulary=n) for n in (7, 9))).vocabulary == 9


# --- populations ---------------------------------------------------------------------------------


def test_shells_have_the_sizes_and_cost_nothing():
    like = described(shape=(3, 512, 512), samples="uint8")
    made = shell(like, (10**6, 10, 20), "far")
    assert [len(s) for s in (made.train, made.val, made.test)] == [10**6, 10, 20]
    assert made.train.x.shape == (10**6, 3, 512, 512)
    assert made.train.x.untyped_storage().nbytes() == 1
    assert made.train.y.untyped_storage().nbytes() == 8
    assert (made.train.x.dtype, made.train.y.dtype) == (torch.uint8, torch.int64)
    assert made.name == "far"
    assert shell(described(None, labels="float32", width=(2,)), (4, 0, 0)).train.y.shape == (4, 2)


def test_the_server_sees_sizes_and_the_absent_as_empty():
    both = {0: described(name="a", groups=1), 2: described(name="c", groups=0, sizes=(5, 0, 1))}
    like = common(*both.values())
    found = seen_from_server(like, both, 4)
    assert [len(c.train) for c in found.clients] == [8, 0, 5, 0]
    assert [c.name for c in found.clients] == ["a", "", "c", ""]
    assert found.groups is None  # not of everybody
    assert seen_from_server(like, {0: both[0], 1: both[2]}, 2).groups == (1, 0)


def test_labels_are_numbered_as_everybody_s():
    own = people(("b", "d"), [0, 1, 1, 0, 1, 0])
    like = described(("a", "b", "c", "d"), targets=4)
    found = seen_from_client(like, own, 0, 2, 4, 7)
    mine = found.clients[2]
    assert mine.train.y.tolist() == [1, 3]
    assert mine.val.y.tolist() == [3, 1]
    assert mine.test.y.tolist() == [3, 1]
    assert [len(c.train) for c in found.clients] == [7, 7, 2, 7]
    assert (found.classes, found.targets) == (("a", "b", "c", "d"), 4)
    assert own.clients[0].train.y.tolist() == [0, 1]  # its own are as they were


def test_equal_classes_are_left_alone():
    own = people(("b", "d"), [0, 1, 1, 0, 1, 0])
    found = seen_from_client(described(("b", "d")), own, 0, 0, 1, 2)
    assert found.clients[0] is own.clients[0]


def test_numbers_to_predict_stay_as_they_are():
    own = people(None, [0.5, 1.5, 2.5])
    found = seen_from_client(described(None, labels="float32"), own, 0, 1, 2, 1)
    assert found.clients[1].train.y.tolist() == [0.5]
    assert found.classes is None


def test_a_class_that_nobody_knows_is_named():
    own = people(("b", "x"), [0, 1, 1])
    with pytest.raises(DataError, match=r"does not know: \['x'\]"):
        seen_from_client(described(("a", "b")), own, 0, 0, 2, 1)


# --- what travels --------------------------------------------------------------------------------


def test_no_path_of_the_server_travels():
    asked = {
        "data": {"folder": "/srv/secret", "samples": 9},
        "model": {"start": "/srv/secret/start.safetensors", "hidden": [4], "init": "he"},
        "availability": {"name": "trace", "file": "/srv/secret/trace.csv"},
        "clock": {"name": "links"},
        "run": {"engine": "ray", "address": "secret:10001", "workers": 3, "seed": 5},
        "stop": {"bytes": 1e9},
    }  # fmt: skip
    told = travelling(parse(asked).model_dump())
    assert "secret" not in str(told)
    again = parse(told)  # and what is left is a configuration
    assert again.run.seed == 5
    assert again.data.samples == 9
    assert again.model.parameters == {"hidden": [4]}
    assert again.model.init == "he"
    assert again.run.engine == Config().run.engine
    assert again.clock.name == "none"
    assert again.stop.bytes is None


def test_first_weights_are_known_by_every_bit():
    layout = Layout.of(torch.nn.Linear(3, 2))
    one = Weights(layout, torch.arange(8.0))
    other = one.vector.clone()
    other[5] = torch.nextafter(other[5], torch.tensor(9.0))
    assert digest_of_start(one) == digest_of_start(Weights(layout, torch.arange(8.0)))
    assert digest_of_start(one) != digest_of_start(Weights(layout, other))
