"""Methods that find groups by themselves, on data that make it hard or impossible."""

import pytest
import torch

import coterie
from coterie.clustering.evidence import TOO_FEW
from coterie.compose.trial import NOBODY
from coterie.errors import TrainingError

METHODS = [
    coterie.fedclust(),
    coterie.user_centric(streams="auto"),
    coterie.fl_hc(rounds=1),
    coterie.adaptive(),
    coterie.cfl(),
    coterie.pacfl(),
]
NAMES = [m.name for m in METHODS]


def people(counts, classes=3, features=4, seed=0, **kinds):
    """Clients with so many samples each, of one distribution."""
    random = torch.Generator().manual_seed(seed)
    clients = []
    for count in counts:
        x = torch.randn(count, features, generator=random)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
        if kinds.get("constant"):
            x = torch.ones_like(x)
        if kinds.get("one_class"):
            y = torch.zeros(count, dtype=torch.long)
        clients.append((x, y % classes))
    return coterie.data.from_clients(
        clients, val_fraction=kinds.get("val", 0.2), test_fraction=0.2, classes=classes
    )


def run(population, method, rounds=4, **settings):
    return coterie.simulate(
        population, "logistic", method, rounds, engine="loop", lr=0.1, batch_size=8, **settings
    )


def notes(result, key):
    events = (result.begun, *result.history)
    return [e["notes"][key] for e in events if key in e.get("notes", {})]


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_single_client_is_one_group(method):
    result = run(people([30]), method)
    assert len(set(result.groups.values())) == 1
    for evidence in notes(result, "evidence"):
        assert evidence["why"] == TOO_FEW
        assert not evidence["enough"]


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_clients_too_small_for_two_halves_are_left_out_and_placed(method):
    population = people([3, 3, 60, 60, 60])  # of three samples one is for training
    assert [len(c.train) for c in population.clients[:2]] == [1, 1]
    result = run(population, method, 6)
    assert sorted(result.groups) == [0, 1, 2, 3, 4]
    for evidence in notes(result, "evidence")[:1]:
        assert evidence["too_small"] == [0, 1]
        assert evidence["clients"] == [2, 3, 4]


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("kind", ["constant", "one_class"])
def test_nothing_to_tell_clients_apart_leaves_one_group(method, kind):
    result = run(people([40] * 6, **{kind: True}), method, 6)
    assert len(set(result.groups.values())) == 1


def test_without_validation_data_the_evidence_decides_and_says_so():
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn(80, 6, generator=random) for _ in range(8)]
    sides = torch.tensor([[1.0, 0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0, 0]])
    clients = [(x, (x @ sides[i % 2] > 0).long()) for i, x in enumerate(rows)]
    population = coterie.data.from_clients(clients, val_fraction=0.0)
    result = run(population, coterie.fedclust(), 3)
    assert [result.groups[c] for c in range(8)] == ["0/0", "0/1"] * 4
    assert notes(result, "verdict") == [{"why": NOBODY}]


@pytest.mark.parametrize("method", METHODS[:5], ids=NAMES[:5])
def test_a_client_whose_training_diverges_is_named(method):
    population = people([40] * 4)
    population.clients[2].train.x.mul_(1e30)
    with pytest.raises(TrainingError, match=r"client 2, round 1: .*no longer finite.*train\.lr"):
        run(population, method, outliers="off")
    result = run(population, method)  # the others go on without it
    assert len(result.history) == 4
    told = [e["rejected"] for e in (result.begun, *result.history) if "rejected" in e]
    assert told
    assert all(list(left_out) == ["2"] for left_out in told)
    (warning,) = [w for w in result.summary["warnings"] if "left out" in w]
    assert warning.startswith("client 2 was left out of ")
    assert "no longer finite. Lower the learning rate (train.lr)" in warning
