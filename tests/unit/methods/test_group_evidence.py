"""Groups as a question: which ones, how sure, how stable, what they mean, whether they help."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coterie
from coterie.errors import ConfigError, DataError
from coterie.experiment.experiment import execute
from coterie.experiment.find_groups import FoundGroups, find_groups, labels_of, loss_of
from coterie.methods.group_evidence import IMPOSSIBLE, explains, meaning, stability
from support import digits, experiment

QUICK = {"engine": "loop", "lr": 0.1, "batch_size": 16}


def turned(clients=8, groups=4, **more):
    return digits(clients=clients, groups=groups, samples=100 * clients, **more)


@pytest.fixture(scope="module")
def rotations():
    return find_groups(turned(), **QUICK)


# --- planted truth ------------------------------------------------------------------------------


def test_planted_rotations_are_found_in_every_draw_and_it_pays(rotations):
    assert list(rotations.groups.values()) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert rotations.stability == {"draws": 3, "groups": [4, 4, 4], "agreement": 1.0, "same": 3}
    assert rotations.pays is True
    assert rotations.verdict.startswith("There are 4 groups (reproducibility 1.00, the same in 3 ")
    assert "Training them separately pays off: validation loss" in rotations.verdict
    assert rotations.cost["rounds"] == 3
    assert rotations.between == []


def test_clients_that_are_alike_are_one_group_and_nothing_is_trained():
    found = find_groups(turned(groups=1), **QUICK)
    assert set(found.groups.values()) == {0}
    assert found.stability["groups"] == [1, 1, 1]
    assert found.verdict.startswith("There is one group: no grouping predicts")
    assert found.cost["rounds"] == 0
    assert found.trial == {}
    assert found.pays is None
    assert found.advice[0].startswith("Train one model for all")


def without_time(found):
    told = found.to_dict()
    del told["cost"]["seconds"]
    return told


def test_the_pool_gives_the_same_bits_as_the_loop():
    people = turned()
    loop = find_groups(people, **{**QUICK, "engine": "loop"})
    pool = find_groups(people, **{**QUICK, "engine": "pool", "workers": 2})
    assert without_time(loop) == without_time(pool)


def skewed():
    """Two groups of clients: one has mostly the digits 0 to 4, the other 5 to 9."""
    rng = np.random.default_rng(0)
    pool = turned(clients=2, groups=1, seed=3)
    x = torch.cat([c.train.x for c in pool.clients])
    y = torch.cat([c.train.y for c in pool.clients])
    people = []
    for client in range(8):
        low = np.flatnonzero((y.numpy() < 5) == (client < 4))
        rows = rng.choice(low, 60)
        people.append((x[rows], y[rows]))
    return people


def test_all_representations_tell_label_skew_from_labels_that_are_named_differently():
    skew = find_groups(skewed(), by="all", trial=False, seeds=1, **QUICK)
    assert "label skew" in skew.meaning
    assert list(skew.groups.values()) == [0] * 4 + [1] * 4
    assert skew.representations["labels"]["groups"] == 2

    alike = digits(clients=8, groups=1, samples=1600, seed=1)
    permuted = [
        (c.train.x, c.train.y if i < 4 else (c.train.y + 3) % 10)
        for i, c in enumerate(alike.clients)
    ]
    named = find_groups(permuted, by="all", trial=False, seeds=1, **QUICK)
    assert "concept shift" in named.meaning
    assert list(named.groups.values()) == [0] * 4 + [1] * 4
    assert named.representations["labels"]["groups"] == 1
    assert named.representations["final-layer"]["agreement"] == 1.0


def test_a_representation_that_is_impossible_is_said_and_the_others_go_on():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 60, 3, generator=g)
    people = [(own, own[:, 0] * (1 if i < 4 else -1)) for i, own in enumerate(x)]
    found = find_groups(people, by="all", trial=False, engine="loop")
    assert found.representations["labels"] == {"impossible": IMPOSSIBLE["labels"]}
    assert list(found.groups.values()) == [0] * 4 + [1] * 4
    assert "concept shift" in found.meaning
    assert "and inputs show no groups by themselves" in found.meaning  # of labels nobody knows
    with pytest.raises(ConfigError, match="targets of client 0 are numbers"):
        find_groups(people, by="labels", engine="loop")


# --- the method ---------------------------------------------------------------------------------


def test_it_ends_by_itself_however_many_rounds_are_asked_for():
    method = coterie.group_evidence(seeds=1, steps=40)
    many = execute(experiment(method, turned(), settings={"rounds": 20}))
    assert many.rounds == 3
    assert many.summary["stopped"] == "the question about groups is answered"
    off = execute(experiment(coterie.group_evidence(seeds=1, steps=40, trial="off"), turned()))
    assert off.rounds == 0
    assert len(set(off.groups.values())) == off.begun["notes"]["evidence"]["groups"] > 1


def counted(method, task):
    """The same method, and a list that grows with each order for this task."""
    calls = []
    inner = method.tasks[task]

    def count(client, arrays, config):
        calls.append((client.id, dict(config)))
        return inner(client, arrays, config)

    return replace(method, tasks={**method.tasks, task: count}), calls


def test_the_number_of_steps_is_found_once_and_used_for_every_draw():
    method, asked = counted(coterie.group_evidence(by="model", trial="off"), "steps")
    method, halves = counted(method, "halves")
    result = execute(experiment(method, turned(), schedule={"batch_size": 16}))
    assert sorted(c for c, _ in asked) == list(range(8))
    steps = result.begun["notes"]["evidence"]["steps"]
    assert {config["probe_steps"] for _, config in halves} == {steps}
    assert [config["draw"] for c, config in halves if c == 0] == [0, 1, 2]


def test_local_compute_is_counted_over_all_draws():
    people = turned()
    method = coterie.group_evidence(by="model", seeds=3, steps=30, trial="off")
    made = experiment(method, people, schedule={"batch_size": 1000})
    notes = execute(made).begun["notes"]
    # Thirty full batches of each half, of three divisions.
    assert notes["samples"] == 3 * 30 * sum(len(c.train) for c in people.clients)


def test_a_client_too_small_for_two_halves_joins_the_nearest_group(rotations):
    people = turned()
    donor = people.clients[5]  # of group 1
    tiny = replace(donor, train=coterie.Split(donor.train.x[:1], donor.train.y[:1]), name="tiny")
    more = replace(people, clients=(*people.clients, tiny), groups=None)
    found = find_groups(more, trial=False, seeds=1, **QUICK)
    assert found.evidence["too_small"] == [8]
    assert found.groups[8] == 1
    assert found.result.groups[8] == found.result.groups[5]
    assert "tiny" in found.advice[0]
    assert 8 not in found.certainty


# --- what it means ------------------------------------------------------------------------------

ONE, TWO, CROSS = [0] * 8, [0] * 4 + [1] * 4, [0, 1] * 4
FINE = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("model", "labels", "data", "word"),
    [
        (ONE, ONE, ONE, "No representation finds groups"),
        (TWO, TWO, ONE, "label skew"),
        (TWO, TWO, TWO, "label skew"),  # inputs differ with labels
        (TWO, ONE, TWO, "covariate shift"),
        (FINE, ONE, TWO, "covariate shift"),  # a subspace is the same upside down
        (TWO, ONE, ONE, "concept shift"),
        (ONE, ONE, TWO, "models trained on them do not: one model can serve"),
        (ONE, TWO, ONE, "label skew), but models"),
        (TWO, CROSS, ONE, "labels by themselves, form different groups"),
        (TWO, ONE, CROSS, "inputs by themselves, form different groups"),
        (TWO, CROSS, CROSS, "labels and inputs by themselves"),
    ],
)
def test_what_groups_of_several_representations_mean(model, labels, data, word):
    assert word in meaning({"model": model, "labels": labels, "data": data})


def test_what_could_not_be_compared_is_not_said_to_be_alike():
    assert "and inputs show no groups" in meaning({"model": TWO, "data": ONE})
    assert meaning({"model": TWO, "data": TWO}).endswith(": models differ by group.")
    assert meaning({"model": TWO}) == "Models differ by group; why they do was not compared."


def test_one_grouping_explains_another_that_divides_its_groups():
    assert explains(TWO, FINE)
    assert not explains(FINE, TWO)
    assert not explains(CROSS, FINE)
    assert not explains(TWO, list(range(8)))  # everybody alone divides anything


def answer(labels, clients=None):
    found = SimpleNamespace(labels=np.array(labels), groups=max(labels) + 1)
    return SimpleNamespace(clients=clients or list(range(len(labels))), evidence=found)


def test_stability_is_the_mean_agreement_of_all_pairs():
    same = stability([answer([0, 0, 1, 1]), answer([0, 0, 1, 1])])
    assert same == {"draws": 2, "groups": [2, 2], "agreement": 1.0, "same": 2}
    # By hand: (aabb, abab) has -0.5, aabb with itself 1, one group with anything 0.
    mixed = stability([answer([0, 0, 1, 1]), answer([0, 0, 1, 1]), answer([0, 1, 0, 1])])
    assert mixed == {"draws": 3, "groups": [2, 2, 2], "agreement": 0.0, "same": 2}
    one = stability([answer([0, 0, 1, 1]), answer([0, 0, 0, 0])])
    assert (one["agreement"], one["same"]) == (0.0, 1)
    assert stability([answer([0, 1])])["agreement"] == 1.0
    # A client that one draw lost is left out of the comparison.
    lost = stability([answer([0, 0, 1, 1]), answer([0, 1, 1], [0, 2, 3])])
    assert lost["agreement"] == 1.0


# --- the words ----------------------------------------------------------------------------------


def told(groups=2, same=3, draws=3, counts=None, trial=None, enough=True, why="", certainty=()):
    return FoundGroups(
        groups=dict.fromkeys(range(6), 0) | ({3: 1, 4: 1, 5: 1} if groups > 1 else {}),
        names={c: f"site {c}" for c in range(6)},
        certainty=dict(enumerate(certainty or [0.5] * 6)),
        evidence={"groups": groups, "kappa": {"2": 0.91, "3": 0.91}, "enough": enough, "why": why},
        stability={
            "draws": draws,
            "same": same,
            "groups": counts or [groups] * draws,
            "agreement": 0.6,
        },
        trial=trial or {},
        representations={},
        meaning="",
        cost={"bytes": {"down": 1, "up": 1}, "samples": 1, "rounds": 3, "seconds": 1.0},
        exposure=[],
        result=None,
    )


def trial(losses, chosen, cuts=(1, 2, 6)):
    return {"cuts": list(cuts), "losses": losses, "chosen": chosen, "why": "a reason"}


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (told(), "There are 2 groups (reproducibility 0.91, the same in 3 of 3 draws). Whether "),
        (told(same=2, counts=[2, 2, 1]), "but the 3 draws disagree: 2, 2, 1 groups, agreement 0.6"),
        (told(draws=1, same=1), "(reproducibility 0.91, one draw)"),
        (told(), "Whether training them separately pays off was not tried."),
        (
            told(trial={"why": "no client has validation data: there is no way"}),
            "Whether training them separately pays off is not known: no client has validation "
            "data.",
        ),
        (
            told(trial=trial([0.72, 0.47, 0.5], 2)),
            "Training them separately pays off: validation loss 0.47 instead of 0.72.",
        ),
        (
            told(trial=trial([0.72, 0.75, 0.9], 1)),
            "Training them separately does not pay off after 3 rounds: validation loss 0.75 "
            "instead of 0.72",
        ),
        (
            told(trial=trial([0.72, 0.71, 0.9], 1)),
            "Training them separately does not clearly pay off after 3 rounds: validation loss "
            "0.71",
        ),
        (
            told(trial=trial([0.72, 0.7, 0.5], 6)),
            "0.70 instead of 0.72; after so short a training each client alone has 0.50.",
        ),
        (
            told(groups=3, trial=trial([0.72, 0.52, 0.5], 2, cuts=(1, 2, 3))),
            "pays off: validation loss 0.50 instead of 0.72; 2 groups have 0.52",
        ),
        (
            told(trial=trial([0.72, 0.74, 0.5], 3, cuts=(1, 2, 3))),
            "does not pay off: validation loss 0.74 instead of 0.72; 3 groups have 0.50.",
        ),
        (
            told(groups=1, enough=False, why="too little data to tell: halves differ"),
            "There is too little data to tell whether there are groups: halves differ.",
        ),
        (
            told(groups=1, why="no grouping is better"),
            "There is one group: no grouping is better (",
        ),
    ],
)
def test_the_verdict_in_words(found, sentence):
    assert sentence in found.verdict


def test_who_sits_between_two_groups_is_said():
    found = told(certainty=[0.5, -0.1, 0.5, 0.5, 0.5, 0.5])
    assert found.between == [1]
    assert found.to_dict()["between"] == ["site 1"]


def test_the_loss_of_the_evidence_is_taken_where_a_cut_has_as_many_groups():
    assert loss_of({"cuts": [1, 2, 2, 3], "losses": [4.0, 3.0, 2.0, 1.0]}, 2) == 2.0
    assert loss_of({"cuts": [1], "losses": [4.0]}, 2) is None


def test_clients_are_named_unless_two_have_one_name():
    assert labels_of({0: "rome", 1: "oslo"}) == {0: "rome", 1: "oslo"}
    assert labels_of({0: "rome", 1: "rome"}) == {0: "0", 1: "1"}


def test_what_is_shown_in_python_is_short_and_holds_no_data(rotations):
    shown = repr(rotations)
    assert rotations.verdict in shown
    assert len(shown.splitlines()) <= 5
    assert "tensor" not in shown
    html = rotations._repr_html_()
    assert rotations.verdict in html.replace("&#x27;", "'")
    assert "<script" not in html
    assert rotations.figure().data
    assert rotations.figure("client-map").data
    with pytest.raises(ConfigError, match="did you mean 'client-map'"):
        rotations.figure("client-mop")


def test_the_file_is_what_known_groups_reads(rotations, tmp_path):
    place = rotations.to_json(tmp_path / "deep" / "g.json")
    kept = json.loads(place.read_text())
    assert kept["groups"] == {str(c): str(g) for c, g in rotations.groups.items()}
    method = coterie.known_groups(groups=str(place))
    result = execute(experiment(method, turned(), settings={"rounds": 1}))
    assert {c: int(g) for c, g in result.groups.items()} == rotations.groups


# --- what to do next ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("labels", "This concerns the labels only; trained models may still differ."),
        ("data", "This concerns the inputs only; trained models may still differ."),
        ("gradient", "This concerns the first gradients only; trained models may still differ."),
        ("model", "Train one model for all."),
    ],
)
def test_one_group_of_what_says_little_about_models_is_no_advice_to_train_one(by, words):
    found = find_groups(turned(groups=1), by=by, seeds=1, trial=False, **QUICK)
    assert set(found.groups.values()) == {0}
    assert found.advice[0].startswith(words)
    assert ("Compare by final-layer" in found.advice[0]) is (by != "model")


@pytest.mark.parametrize(
    ("chosen", "losses", "pay", "told"),
    [
        (4, (1.0, 0.9, 0.7, 0.8), True, ""),
        (8, (1.0, 0.9, 0.8, 0.7), True, " (the 4 of the evidence; the trial favoured 8 groups)"),
        (2, (1.0, 0.7, 1.1, 0.8), False, " (the 4 of the evidence; the trial favoured 2 groups)"),
        (1, (1.0, 1.1, 1.0, 1.2), False, " (the 4 of the evidence; the trial favoured one model)"),
        (1, (1.0, 1.1, 0.99, 1.2), True, " (the 4 of the evidence; the trial favoured one model)"),
    ],
)
def test_what_is_written_to_a_file_is_named_where_the_trial_took_others(
    rotations, chosen, losses, pay, told
):
    tried = {"cuts": [1, 2, 4, 8], "losses": list(losses), "chosen": chosen, "why": "so"}
    found = replace(rotations, trial=tried)
    assert found.own_pay is pay
    assert found.told_of_file == told


@pytest.mark.parametrize("tried", [{}, {"why": "no client has validation data"}])
def test_without_a_trial_nobody_knows_whether_the_groups_pay(rotations, tried):
    found = replace(rotations, trial=tried)
    assert found.own_pay is None
    assert found.told_of_file == ""


# --- what cannot be asked -----------------------------------------------------------------------


def people(clients=4, samples=20):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(clients, samples, 3, generator=g)
    return [(own, (own[:, 0] > 0).long()) for own in x]


@pytest.mark.parametrize(
    ("clients", "settings", "error", "words"),
    [
        (people(1), {}, ConfigError, "there is only one client"),
        (people(4, 2), {}, DataError, "0 of 4 clients have at least two training samples"),
        ([(x, 0 * y) for x, y in people()], {}, DataError, "all training samples are of one class"),
        ([(0 * x, y) for x, y in people()], {}, DataError, "all inputs are identical"),
        (people(), {"by": "label"}, ConfigError, "did you mean 'labels'"),
        (people(), {"seeds": 0}, ConfigError, "seeds = 0: must be at least 1"),
        (people(), {"trial": "off"}, ConfigError, "trial = 'off': give True or False"),
        (people(), {"trial": 0}, ConfigError, "trial = 0: give True or False"),
        (people(), {"lrr": 1}, ConfigError, "did you mean 'lr'"),
    ],
)
def test_what_cannot_be_grouped_is_refused_with_a_sentence(clients, settings, error, words):
    with pytest.raises(error, match=words):
        find_groups(clients, "logistic", engine="loop", **settings)


def test_what_does_not_matter_is_not_refused():
    same = [(0 * x, (torch.arange(len(y)) % 2)) for x, y in people(4)]
    found = find_groups(same, "logistic", by="labels", trial=False, engine="loop")
    assert set(found.groups.values()) == {0}
    unlabelled = [(x, 0 * y) for x, y in people(4)]
    assert find_groups(unlabelled, "logistic", by="data", trial=False, engine="loop").groups


def test_one_client_is_refused_by_the_method_too():
    with pytest.raises(ConfigError, match="compares clients, and there is only one"):
        execute(experiment(coterie.group_evidence(), digits(clients=1, groups=1)))


def test_without_validation_data_nobody_knows_whether_it_pays():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 60, 3, generator=g)
    opposed = [(own, ((own[:, 0] > 0) == (i < 4)).long()) for i, own in enumerate(x)]
    found = find_groups(opposed, "logistic", val_fraction=0, lr=0.5, engine="loop")
    assert list(found.groups.values()) == [0] * 4 + [1] * 4
    said = "is not known: no client has validation data, so nothing can tell whether training in"
    assert said in found.verdict
    assert any("val_fraction" in sentence for sentence in found.advice)
    assert found.cost["rounds"] == 0


def test_a_trial_that_was_turned_off_does_not_ask_for_validation_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 60, 3, generator=g)
    opposed = [(own, ((own[:, 0] > 0) == (i < 4)).long()) for i, own in enumerate(x)]
    found = find_groups(opposed, "logistic", trial=False, val_fraction=0, lr=0.5, engine="loop")
    assert "Whether training them separately pays off was not tried." in found.verdict
    assert found.advice == []
    result = coterie.simulate(
        clients=opposed,
        model="logistic",
        method=coterie.fedclust(trial="off"),
        rounds=1,
        val_fraction=0,
        lr=0.5,
        engine="loop",
    )
    assert "No trial" not in result.summary["grouping"]["sentence"]


def test_too_little_data_is_said_to_be_too_little():
    found = find_groups(people(6, 4), "logistic", engine="loop", seeds=1)
    assert found.verdict.startswith("There is too little data to tell whether there are groups")
    assert found.advice[0].startswith("Give clients more training data")
