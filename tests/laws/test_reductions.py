"""Where two methods must coincide, to the bit."""

import pytest
import torch

import coterie
from support import digits, drive, experiment, models, same_bits, with_groups


def trained(method, folder, **changes):
    made = experiment(method, **changes)
    state, channel, _ = drive(made, folder)
    return models(made, state, channel)


PARTIAL = {"settings": {"rounds": 3, "cohort": 0.5}}


@pytest.mark.parametrize(
    ("method", "equal"),
    [
        (lambda: coterie.fedprox(mu=0), coterie.fedavg),
        (lambda: coterie.ifca(k=1), coterie.fedavg),
        (lambda: coterie.fedper(k=0), coterie.fedavg),
        (lambda: coterie.fedper(k=2), coterie.local),
    ],
    ids=["fedprox mu=0", "ifca k=1", "fedper k=0", "fedper all"],
)
@pytest.mark.parametrize("changes", [{}, PARTIAL], ids=["all", "half"])
def test_limits_coincide_to_the_bit(method, equal, changes, tmp_path):
    ours = trained(method(), tmp_path / "a", **changes)
    theirs = trained(equal(), tmp_path / "b", **changes)
    assert same_bits(ours, theirs)


def test_oracle_with_one_group_is_fedavg(tmp_path):
    one = with_groups(digits(), [0] * 6)
    assert same_bits(
        trained(coterie.oracle(), tmp_path / "a", population=one),
        trained(coterie.fedavg(), tmp_path / "b", population=one),
    )


def test_strengths_that_are_not_zero_do_differ(tmp_path):
    fedavg = trained(coterie.fedavg(), tmp_path / "a")
    for i, method in enumerate(
        [coterie.fedprox(mu=0.5), coterie.fedper(k=1), coterie.local(), coterie.ifca(k=2)]
    ):
        assert not same_bits(trained(method, tmp_path / str(i)), fedavg)


def test_more_clients_never_change_one_clients_stream(tmp_path):
    many = digits(clients=6)
    few = coterie.Population(
        many.clients[:4], many.kind, many.shape, many.classes, many.targets, many.groups[:4]
    )
    all_six = trained(coterie.local(), tmp_path / "a", population=many)
    first_four = trained(coterie.local(), tmp_path / "b", population=few)
    assert same_bits(all_six[:4], first_four)


def test_seed_decides_everything(tmp_path):
    runs = [
        trained(coterie.fedavg(), tmp_path / str(i), settings={"rounds": 2, "seed": seed})
        for i, seed in enumerate((1, 1, 2))
    ]
    assert same_bits(runs[0], runs[1])
    assert not torch.equal(runs[0][0], runs[2][0])


def orders_of_samples(folder, settings, people):
    """The order in which each client's samples were shown, by round."""
    from coterie.client import client as module

    seen = []
    original = module.fit

    def spy(model, training, criterion):
        seen.append((training.order_seed, training.dropout_seed))
        return original(model, training, criterion)

    module.fit = spy
    try:
        drive(experiment(coterie.fedavg(), people, settings=settings), folder)
    finally:
        module.fit = original
    return seen


def test_every_client_and_round_has_batches_and_dropout_of_its_own(tmp_path):
    seen = orders_of_samples(tmp_path, {"rounds": 3}, digits(clients=4))
    assert len(seen) == 12
    flat = [seed for pair in seen for seed in pair]
    assert len(set(flat)) == 24
