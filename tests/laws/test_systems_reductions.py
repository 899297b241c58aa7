"""The four systems and layer-wise aggregation, where they must coincide with something simpler."""

from dataclasses import replace

import pytest
import torch

import coterie
from coterie.client import client as client_module
from coterie.engines.loop import Loop
from coterie.experiment.experiment import execute
from faulty import Faulty
from support import digits, drive, experiment, models, same_bits

PEOPLE = digits(clients=6)
PARTIAL = {"rounds": 4, "cohort": 0.5}
cohorts = pytest.mark.parametrize("settings", [{"rounds": 3}, PARTIAL], ids=["all", "half"])


def trained(method, folder, population=PEOPLE, engine=None, **changes):
    made = experiment(method, population, **changes)
    state, channel, _ = drive(made, folder, engine)
    return models(made, state, channel)


FEDAVG = {
    "fedclust, infinite threshold": lambda: coterie.fedclust(threshold=float("inf")),
    "fedclust, one cluster": lambda: coterie.fedclust(clusters=1, warmup_epochs=2),
    "dc-pfl, one group": lambda: coterie.dc_pfl(dynamic=False, gamma=1, alpha=1),
    "dc-pfl, one group soon": lambda: coterie.dc_pfl(dynamic=False, gamma=1, alpha=1, start=1),
    "dc-pfl, nothing ever quiet": lambda: coterie.dc_pfl(dynamic=False, share=0, start=1),
    "fedtsdp, never clusters": lambda: coterie.fedtsdp(hopkins=2.0),
    "layer-wise, nothing ever quiet": lambda: coterie.layer_wise(
        coterie.fedavg(), alpha=2, share=0.0, start=1
    ),
}
LOCAL = {
    "fedclust, threshold 0": lambda: coterie.fedclust(threshold=0.0),
    "fedclust, a cluster each": lambda: coterie.fedclust(clusters=6, warmup_epochs=1),
}


@cohorts
@pytest.mark.parametrize("name", FEDAVG)
def test_is_fedavg_to_the_bit(name, settings, tmp_path):
    ours = trained(FEDAVG[name](), tmp_path / "a", settings=settings)
    theirs = trained(coterie.fedavg(), tmp_path / "b", settings=settings)
    assert same_bits(ours, theirs)


@cohorts
@pytest.mark.parametrize("name", LOCAL)
def test_is_local_to_the_bit(name, settings, tmp_path):
    ours = trained(LOCAL[name](), tmp_path / "a", settings=settings)
    theirs = trained(coterie.local(), tmp_path / "b", settings=settings)
    assert same_bits(ours, theirs)


def test_what_is_not_at_its_limit_differs(tmp_path):
    fedavg = trained(coterie.fedavg(), tmp_path / "a")
    local = trained(coterie.local(), tmp_path / "b")
    for i, method in enumerate(
        [
            coterie.fedclust(clusters=2),
            coterie.dc_pfl(dynamic=False, gamma=0.9, alpha=1, start=1),
            coterie.fedtsdp(hopkins=0.0, eps_outputs=0.01, stages="first", shrink=0.5),
            coterie.user_centric(streams=2),
        ]
    ):
        ours = trained(method, tmp_path / str(i))
        assert not same_bits(ours, fedavg)
        assert not same_bits(ours, local)


# --- alone after the first round: DC-PFL is `local`, whatever is lost ----------------------------


@pytest.mark.parametrize("alpha", [1, 2])
@pytest.mark.parametrize("lost", [None, (2, "1.0"), (0, "1.0"), (0, "2.0"), (2, "2.0"), (2, "3.0")])
def test_dc_pfl_cut_at_zero_is_local_to_the_bit(lost, alpha, tmp_path):
    """With one round before the tree, each begins at what it trained from θ⁰, and goes on alone."""

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, order: (c, order) == lost)

    method = coterie.dc_pfl(dynamic=False, gamma=0, start=1, alpha=alpha)
    ours = trained(method, tmp_path / "a", engine=lossy, settings={"rounds": 4})
    theirs = trained(coterie.local(), tmp_path / "b", engine=lossy, settings={"rounds": 4})
    assert same_bits(ours, theirs)


def test_dc_pfl_cut_at_zero_is_local_for_a_part_of_the_clients_too(tmp_path):
    """Those outside the one cohort that met begin at θ⁰, their former group's model."""
    settings = {"rounds": 6, "cohort": 3}
    method = coterie.dc_pfl(dynamic=False, gamma=0, start=1, alpha=1)
    ours = trained(method, tmp_path / "a", settings=settings)
    theirs = trained(coterie.local(), tmp_path / "b", settings=settings)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("client", [0, 2])
def test_a_group_that_sent_nothing_begins_at_the_model_of_the_group_it_came_from(client, tmp_path):
    """A client whose last reply before the tree was lost has the mean of the round before."""

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, order: (c, order) == (client, "2.0"))

    method = coterie.dc_pfl(dynamic=False, gamma=0, start=2, alpha=1)
    ours = trained(method, tmp_path / "a", engine=lossy, settings={"rounds": 2})
    once = trained(coterie.fedavg(), tmp_path / "b", settings={"rounds": 1})
    assert torch.equal(ours[client], once[client])
    assert not torch.equal(ours[1], once[1])


def test_who_was_absent_when_the_tree_was_built_still_has_a_model(tmp_path):
    settings = {"rounds": 2, "cohort": 3}
    made = experiment(coterie.dc_pfl(dynamic=False, gamma=0.5, start=2), PEOPLE, settings=settings)
    state, channel, _ = drive(made, tmp_path)
    assert len(set(state.groups.values())) > 3  # more than the last cohort had members
    assert set(state.groups.values()) <= set(state.models)
    start = made.plan(tmp_path).start.vector
    assert not any(torch.equal(m, start) for m in models(made, state, channel))


# --- random streams ------------------------------------------------------------------------------


def seeds_used(method, folder):
    """Every training's seeds by the order it belongs to: those before round 1 apart."""
    used, original = [], client_module.fit

    def spy(model, training, criterion):
        used.append((training.order_seed, training.dropout_seed))
        return original(model, training, criterion)

    client_module.fit = spy
    try:
        made = experiment(method, PEOPLE, settings={"rounds": 2})
        drive(made, folder)
    finally:
        client_module.fit = original
    return used


def test_the_warm_up_has_streams_of_its_own(tmp_path):
    plain = seeds_used(coterie.fedavg(), tmp_path / "a")
    warmed = seeds_used(coterie.fedclust(clusters=2, warmup_epochs=1), tmp_path / "b")
    assert warmed[6:] == plain
    assert not {s for pair in warmed[:6] for s in pair} & {s for pair in plain for s in pair}
    probed = seeds_used(coterie.user_centric(), tmp_path / "c")
    assert probed == plain


def test_the_warm_up_counts_as_no_round(tmp_path):
    result = execute(
        experiment(coterie.fedclust(threshold=float("inf")), PEOPLE, settings={"rounds": 2})
    )
    plain = execute(experiment(coterie.fedavg(), PEOPLE, settings={"rounds": 2}))
    for ours, theirs in zip(result.history, plain.history, strict=True):
        assert ours["round"] == theirs["round"]
        assert ours["received"] == theirs["received"]
        assert ours["bytes"] == theirs["bytes"]


# --- user-centric --------------------------------------------------------------------------------


def certain(method):
    """The same method whose clients report hardly any deviation: others are infinitely far."""

    def gradient(client, arrays, config):
        upload = method.tasks["gradient"](client, arrays, config)
        return replace(upload, metrics={**upload.metrics, "variance": 1e-12})

    return replace(method, tasks={**method.tasks, "gradient": gradient})


@cohorts
def test_user_centric_with_gradients_far_apart_is_local(settings, tmp_path):
    ours = trained(certain(coterie.user_centric()), tmp_path / "a", settings=settings)
    theirs = trained(coterie.local(), tmp_path / "b", settings=settings)
    assert same_bits(ours, theirs)


@cohorts
def test_one_stream_in_parallel_is_one_stream(settings, tmp_path):
    one = trained(coterie.user_centric(streams=1), tmp_path / "a", settings=settings)
    exact = trained(
        coterie.user_centric(streams=1, parallel=True), tmp_path / "b", settings=settings
    )
    assert same_bits(one, exact)


def test_two_streams_in_parallel_are_not_two_streams(tmp_path):
    two = trained(coterie.user_centric(streams=2), tmp_path / "a")
    exact = trained(coterie.user_centric(streams=2, parallel=True), tmp_path / "b")
    assert not same_bits(two, exact)


def test_user_centric_among_identical_clients_is_fedavg(tmp_path):
    """The same data, shown in different orders: after one round equal to 1e-6."""
    twins = replace(PEOPLE, clients=(PEOPLE.clients[0],) * 4, groups=None)
    theirs = trained(coterie.fedavg(), tmp_path / "b", twins, settings={"rounds": 1})
    for i, method in enumerate(
        [
            coterie.user_centric(),
            coterie.user_centric(streams=3),
            coterie.user_centric("auto", select="silhouette"),
        ]
    ):
        ours = trained(method, tmp_path / str(i), twins, settings={"rounds": 1})
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-6)
            assert not torch.equal(a, torch.zeros_like(a))


# --- layer-wise ----------------------------------------------------------------------------------


def test_layer_wise_every_round_is_the_method_itself():
    for method in (coterie.fedavg(), coterie.ifca(k=2)):
        assert coterie.layer_wise(method, alpha=1) is method
