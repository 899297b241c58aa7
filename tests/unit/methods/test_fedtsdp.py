"""FedTSDP: two stages of clustering, sampling weights and half layers, on hand-made replies."""

import math
import sys
from dataclasses import dataclass, field, replace

import pytest
import torch

import coterie
from coterie.core.messages import Upload
from coterie.core.method import Public, Round
from coterie.core.weights import Layout
from coterie.data import Population
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.methods.fedtsdp import first_tensors, followed
from scripted import Scripted, Spy, linears, setup, weights
from support import Constant, digits, drive, experiment, models, quadratics, same_bits

EIGHT = linears((1, 1), (1, 1), (1, 1), (1, 1))  # four layers of a weight and a bias
NAMES = tuple(f"{layer}.{part}" for layer in range(4) for part in ("weight", "bias"))
START = weights(EIGHT, *[0.5] * 8)

# What the paper does, where the defaults differ.
PAPER = {"eps_outputs": 0.15, "eps_weights": 3.5, "shrink_at": "clustering"}


def paper(**own):
    return coterie.fedtsdp(**PAPER | own)


def answers_by_first_number(model, x):
    """Two classes: the first number of a model is the probability of class 0, for all samples."""
    p = model.vector[0].double()
    return torch.stack([p, 1 - p]).log().expand(len(x), 2)


@dataclass
class Actors:
    """Clients that send these models whatever they receive; ``batches`` are the public samples."""

    method: object
    sent: dict
    count: int = 4  # public samples
    examples: dict = field(default_factory=dict)

    def __post_init__(self):
        self.batches = []
        self.public = Public(torch.arange(float(self.count)).reshape(-1, 1), self.outputs)
        self.fed = Scripted(self.answer, range(len(self.sent)), self.examples)
        people = range(len(self.sent))
        self.state = self.method.init(self.fed, setup(START, people, public=self.public))
        self.number, self.batches = 0, []

    def outputs(self, model, x):
        self.batches.append(x.ravel().int().tolist())
        return answers_by_first_number(model, x)

    def answer(self, order):
        numbers = self.sent[order.client]
        return None if numbers is None else Upload({"model": weights(EIGHT, *numbers)})

    def rounds(self, count=1, cohort=None):
        for _ in range(count):
            info = Round(self.number, cohort or sorted(self.sent), self.public)
            self.batches.clear()
            self.state = self.method.round(self.fed, replace(self.state, notes={}), info)
            self.number += 1
        return self

    @property
    def orders(self):
        return self.fed.asked[-1][1]


def actors(sent, count=4, examples=None, **parameters):
    method = paper(**{"hopkins": 0.0, "public_batch": 2} | parameters)
    return Actors(method, dict(sent), count, examples or {})


# Probabilities 0.9 and 0.8 differ by JS = H(0.85) − (H(0.9) + H(0.8))/2 = 0.4227 − 0.4127 = 0.010;
# 0.1 and 0.1 by 0; 0.45 from 0.8 by H(0.625) − (H(0.45) + H(0.8))/2 = 0.6616 − 0.5943 = 0.067 and
# from 0.1 by 0.081: with a radius of 0.05 it is by itself.
# In weights client 1 is 10 from all others but client 3, from whom it is 7; client 3 is 3 from
# clients 0, 2 and 4 (and up to 0.8 more sideways: √(9 + 0.64) = 3.1).
FIVE = {
    0: (0.9, 0, 0, 0, 0, 0, 0, 0),
    1: (0.8, 10, 0, 0, 0, 0, 0, 0),
    2: (0.1, 0, 0, 0, 0, 0, 0, 0),
    3: (0.1, 3, 0, 0, 0, 0, 0, 0),
    4: (0.45, 0, 0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [("first", [0, 0, 1, 1, 2]), ("second", [0, 1, 0, 0, 0]), ("both", [0, 1, 2, 2, 3])],
)
def test_stages(stages, wanted):
    play = actors(FIVE, stages=stages, eps_outputs=0.05).rounds()
    assert list(play.state.groups.values()) == wanted
    assert sorted(play.state.models) == sorted(set(wanted))


def test_the_radii_count():
    def found(**parameters):
        return list(actors(FIVE, **parameters).rounds().state.groups.values())

    # JS(0.9, 0.8) = 0.00997, as in the comment above with more digits.
    assert found(stages="first", eps_outputs=0.0101) == [0, 0, 1, 1, 2]
    assert found(stages="first", eps_outputs=0.0099) == [0, 1, 2, 2, 3]
    assert found(stages="second", eps_weights=2.99) == [0, 1, 0, 2, 0]
    assert found(stages="second", eps_weights=7.2) == [0, 0, 0, 0, 0]
    # With three in a dense region nobody is dense among two pairs and one.
    assert found(stages="first", eps_outputs=0.05, min_points=3) == [0, 1, 2, 3, 4]
    assert found(stages="first", eps_outputs=0.05, min_points=1) == [0, 0, 1, 1, 2]


def test_the_divergence_is_no_root_and_has_natural_logarithms():
    def entropy(p):
        return -(p * math.log(p) + (1 - p) * math.log(1 - p))

    notes = actors(FIVE, stages="first").rounds().state.notes
    wanted = entropy(0.85) - (entropy(0.9) + entropy(0.8)) / 2
    assert notes["divergence"][0][1] == pytest.approx(wanted, rel=1e-4)
    assert notes["divergence"][0][2] == pytest.approx(math.log(2) - entropy(0.9), rel=1e-4)


def test_clusters_are_averaged_by_samples_over_all_layers():
    play = actors(FIVE, stages="first", eps_outputs=0.05, examples={0: 3}).rounds()
    # (3·0.9 + 0.8)/4 = 0.875 and (3·0 + 10)/4 = 2.5.
    assert play.state.models[0].vector.tolist() == pytest.approx([0.875, 2.5, *[0] * 6])
    assert play.state.models[1].vector.tolist() == pytest.approx([0.1, 1.5, *[0] * 6])


def test_without_a_tendency_clusters_layers_and_weights_stay():
    play = actors(FIVE, stages="first", eps_outputs=0.05).rounds()
    before = play.state
    calm = paper(hopkins=1.0, stages="first", eps_outputs=0.05, public_batch=2)
    play.method, play.sent = calm, {c: FIVE[4 - c] for c in FIVE}
    play.rounds(3)
    assert play.state.groups == before.groups
    assert play.state.memory["layers"] == before.memory["layers"] == 4 * 0.98
    assert torch.equal(play.state.memory["weights"], before.memory["weights"])
    assert play.state.models[0].vector.tolist() == pytest.approx([0.275, 1.5, *[0] * 6])
    assert play.state.notes["hopkins"] < 1.0
    assert "divergence" not in play.state.notes


def test_the_statistic_must_be_above_the_bound():
    # Two clients, or all the same, cannot tell: 0.5 by definition.
    pair = {0: FIVE[0], 1: FIVE[2]}
    assert actors(pair, hopkins=0.5).rounds().state.groups == {0: 0, 1: 0}
    assert actors(pair, hopkins=0.49, stages="first").rounds().state.groups == {0: 0, 1: 1}
    same = dict.fromkeys(range(5), FIVE[0])
    assert actors(same, hopkins=0.5).rounds().state.notes["hopkins"] == 0.5


# --- public samples ------------------------------------------------------------------------------


def test_one_batch_for_all_clients_in_a_round():
    play = actors(FIVE, count=40, public_batch=7).rounds()
    assert len(play.batches) == 5
    assert len({tuple(b) for b in play.batches}) == 1
    first = play.batches[0]
    assert len(set(first)) == 7
    play.rounds()
    assert play.batches[0] != first
    assert actors(FIVE, count=4, public_batch=50).rounds().batches[0] == [0, 1, 2, 3]


def test_sampling_weights_by_hand():
    # Four samples at 1/4 each, a batch of two: 1/4 + 4/2 = 2.25 for these, over a sum of 5:
    # 0.45 and 0.05.
    play = actors(FIVE).rounds()
    first = play.batches[0]
    wanted = [0.45 if i in first else 0.05 for i in range(4)]
    assert play.state.memory["weights"].tolist() == pytest.approx(wanted)
    # Again 2 for each of the batch, over 5: 2.45/5 = 0.49, 2.05/5 = 0.41, 0.45/5, 0.05/5.
    play.rounds()
    second = play.batches[0]
    wanted = [(w + 2 * (i in second)) / 5 for i, w in enumerate(wanted)]
    assert play.state.memory["weights"].tolist() == pytest.approx(wanted)
    assert {round(w, 2) for w in wanted} <= {0.49, 0.41, 0.09, 0.01}


@pytest.mark.parametrize(
    ("step", "inside", "outside"),
    [(0.0, 0.25, 0.25), (0.25, 1 / 3, 1 / 6), (1.5, 1.75 / 4, 1 / 16)],
)
def test_the_step_of_sampling_weights_can_be_chosen(step, inside, outside):
    # (0.25 + step)/(1 + 2·step) for the two of the batch, 0.25/(1 + 2·step) for the others.
    play = actors(FIVE, weight_step=step).rounds()
    wanted = [inside if i in play.batches[0] else outside for i in range(4)]
    assert play.state.memory["weights"].tolist() == pytest.approx(wanted)


def test_likelier_samples_are_drawn_more_often():
    play = actors(FIVE, count=10, public_batch=2)
    heavy = torch.tensor([0.46, 0.46, *[0.01] * 8], dtype=torch.float64)
    hits = 0
    for number in range(40):
        play.state = replace(play.state, memory={**play.state.memory, "weights": heavy})
        play.number = number
        hits += play.rounds().batches[0] == [0, 1]
    # Both heavy ones: 2·0.46·0.46/0.54 = 0.78 of the rounds; evenly drawn it were 1/45.
    assert 24 <= hits <= 39


# --- half layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "count"),
    [(4, 8), (3.75, 8), (3.74, 7), (3.5, 7), (3.25, 7), (3.24, 6), (1, 2), (0.5, 1), (0.24, 0)],
)
def test_shared_tensors_at_the_grain_of_half_a_layer(layers, count):
    assert first_tensors(EIGHT, layers) == list(NAMES[:count])


def test_the_rest_of_a_layer_is_its_second_half():
    from torch import nn

    normed = Layout.of(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))
    )
    rest = {"0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert first_tensors(normed, 0.5) == ["0.weight"]
    assert set(first_tensors(normed, 1)) == {"0.weight"} | rest
    assert set(first_tensors(normed, 1.5)) == set(first_tensors(normed, 2)) == set(normed.names)


def test_the_path_of_shared_layers():
    # Twice 4·0.98ᵏ: 8, 7.84, 7.68, 7.53 | 7.38, 7.23, 7.09, 6.95, 6.81, 6.67, 6.54 | 6.41.
    play, sent = actors(FIVE, stages="first", eps_outputs=0.05), []
    for _ in range(12):
        play.rounds()
        sent.append({o.arrays["model"].layout.names for o in play.orders.values()})
    assert sent == [{NAMES}] * 4 + [{NAMES[:7]}] * 7 + [{NAMES[:6]}]
    assert play.state.memory["layers"] == pytest.approx(4 * 0.98**12)


def test_shared_layers_come_from_the_own_clusters_mean():
    play = actors(FIVE, stages="first", eps_outputs=0.05, shrink=0.125).rounds()  # half a layer
    play.rounds()
    down = {c: o.arrays["model"] for c, o in play.orders.items()}
    assert {w.layout.names for w in down.values()} == {NAMES[:1]}
    assert [float(w.vector) for w in down.values()] == pytest.approx([0.85, 0.85, 0.1, 0.1, 0.45])
    # When nothing is left to share nothing is sent, and the model that is used is the client's own.
    play.rounds()
    assert play.method.sends(play.state, 0) == {}


def test_a_whole_model_goes_up_and_the_shared_part_comes_down(tmp_path):
    method = paper(hopkins=0.0, eps_outputs=0.01, shrink=0.75, public_batch=20)
    made = experiment(method, settings={"rounds": 3})
    state, channel, engine = drive(made, tmp_path, Spy)
    whole = made.plan(tmp_path).start.layout.names
    head = ("head.weight",)
    # Two layers, then 1.5, then 1.125 (two tensors): 910 numbers, 900 without the last bias, 780.
    downs = {"1.0": (whole, 910), "2.0": ((*whole[:2], *head), 900), "3.0": (whole[:2], 780)}
    for order, (names, count) in downs.items():
        for seen in engine.of(order).values():
            assert (seen.down, seen.up) == ({"model": names}, {"model": whole})
            assert seen.payload == (4 * count, 4 * 910)
    assert channel.exposed == {"each"}
    # What is used: the shared part over one's own. Layers 0.84375 → halves round(1.69) = 2.
    for client, vector in enumerate(models(made, state, channel)):
        own = engine.of("3.0")[client].sent["model"].vector
        mean = state.models[state.groups[client]].vector
        assert torch.equal(vector, torch.cat([mean[:780], own[780:]]))


# --- absent clients, newcomers -------------------------------------------------------------------


def test_absent_clients_follow_most_of_their_cluster():
    before = {0: 5, 1: 5, 2: 5, 3: 5, 4: 5, 5: 8, 6: 8, 7: 9, 8: 3}
    present = {0: 0, 1: 1, 2: 1, 5: 2, 8: 0}
    assert followed(before, present) == {
        0: 0, 1: 1, 2: 1, 3: 1, 4: 1,  # two of three went to 1
        5: 2, 6: 2,
        7: 3,  # nobody of its cluster was there: it stays, under a number of its own
        8: 0,
    }  # fmt: skip
    # A tie: where the first of them went.
    assert followed({0: 0, 1: 0, 2: 0}, {0: 1, 1: 0}) == {0: 1, 1: 0, 2: 1}


def test_a_cluster_that_was_absent_keeps_its_model():
    play = actors(FIVE, stages="first", eps_outputs=0.05).rounds()
    kept = play.state.models[1]
    play.sent = {**FIVE, 0: FIVE[2]}
    play.rounds(cohort=[0, 1, 4])
    assert play.state.groups == {0: 0, 1: 1, 4: 2, 2: 3, 3: 3}
    assert torch.equal(play.state.models[3].vector, kept.vector)
    play.sent = dict.fromkeys(FIVE)
    same = play.rounds().state
    assert same.groups == {0: 0, 1: 1, 4: 2, 2: 3, 3: 3}  # nobody answered: nothing changes


def test_newcomers_join_by_their_answers_and_receive_a_whole_model_once():
    play = actors(FIVE, stages="first", eps_outputs=0.05, shrink=0.5).rounds()
    # Models answer 0.85, 0.1 and 0.45. In weights newcomer 5 is nearest to the second cluster's.
    newcomers = {5: (0.8, 1.5, 0, 0, 0, 0, 0, 0), 6: (0.2, 5, 0, 0, 0, 0, 0, 0), 7: None}
    play.sent |= newcomers
    play.state = play.method.admit(play.fed, play.state, Round(1, [5, 6, 7], play.public))
    assert {c: o.task for c, o in play.orders.items()} == dict.fromkeys(newcomers, "show")
    begin = play.state.memory["start"].vector  # they train θ⁰, and it is sent to them
    assert all(torch.equal(o.arrays["model"].vector, begin) for o in play.orders.values())
    assert {c: play.state.groups.get(c) for c in newcomers} == {5: 0, 6: 1, 7: None}
    assert play.method.sends(play.state, 5)["model"].layout.names == NAMES
    assert play.method.sends(play.state, 0)["model"].layout.names == NAMES[:4]
    assert play.method.sends(play.state, 7) == {}
    del play.sent[7]
    first = {**play.sent, 6: None}
    play.sent, everybody = first, sorted(first)
    play.rounds(cohort=everybody)  # 6 gets it, but its answer is lost
    assert {c: len(o.arrays["model"].layout.names) for c, o in play.orders.items()} == {
        **dict.fromkeys(range(5), 4), 5: 8, 6: 8
    }  # fmt: skip
    play.sent = {**first, 6: newcomers[6]}
    play.rounds(cohort=everybody)
    # One layer by now; 6 still has to be given a whole model, 5 has had its own.
    assert {c: len(o.arrays["model"].layout.names) for c, o in play.orders.items()} == {
        **dict.fromkeys(range(6), 2), 6: 8
    }  # fmt: skip
    play.rounds(cohort=everybody)
    assert {len(o.arrays["model"].layout.names) for o in play.orders.values()} == {1}


# --- what it cannot do without -------------------------------------------------------------------


@pytest.mark.parametrize("public", [None, Public(torch.zeros(0, 1), answers_by_first_number)])
def test_public_samples_are_needed(public):
    method = paper()
    with pytest.raises(ConfigError, match=r"needs public samples .*data\.public"):
        method.init(Scripted(None, range(2)), setup(START, range(2), public=public))


@pytest.mark.parametrize("width", [None, 1])
def test_regression_is_refused_before_anybody_trains(width):
    def numbers(model, x):
        return torch.zeros(len(x)) if width is None else torch.zeros(len(x), width)

    fed = Scripted(lambda order: pytest.fail("somebody was asked"), range(2))
    with pytest.raises(ConfigError, match="needs classes"):
        paper().init(fed, setup(START, range(2), public=Public(torch.zeros(3, 1), numbers)))


def test_regression_is_refused_in_a_run(tmp_path):
    people = quadratics([[1.0], [2.0]])
    people = Population(people.clients, "table", (1,), None, 1, public=torch.zeros(4, 1))
    from torch import nn

    made = experiment(paper(), people, model=Constant, criterion=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="needs classes"):
        drive(made, tmp_path)


def test_parameters_that_make_no_sense():
    for wrong in (
        {"shrink": 0.0}, {"shrink": 1.5}, {"eps_outputs": 0.0}, {"eps_weights": -1.0},
        {"min_points": 0}, {"public_batch": 0}, {"weight_step": -1.0}, {"stages": "third"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="fedtsdp"):
            paper(**wrong)


def test_the_public_batch_and_the_statistic_have_streams_of_their_own(tmp_path):
    """Another seed draws other batches, and clients train as in FedAvg whatever is drawn."""
    made = [
        experiment(m, digits(), settings={"rounds": 3})
        for m in (coterie.fedavg(), paper(hopkins=2.0, public_batch=3))
    ]
    ends = [drive(m, tmp_path / str(i)) for i, m in enumerate(made)]
    assert same_bits(*[models(m, e[0], e[1]) for m, e in zip(made, ends, strict=True)])
    drawn = []
    for seed in (0, 1):
        play = actors(FIVE, count=40, public_batch=5)
        play.state = replace(play.state, memory={**play.state.memory, "seed": seed})
        drawn.append(play.rounds().batches[0])
    assert drawn[0] != drawn[1]


def test_every_round_draws_its_own_points_for_the_statistic(monkeypatch):
    first = []

    def noted(points, generator):
        first.append(float(generator.random()))
        return 0.5

    monkeypatch.setattr(sys.modules["coterie.methods.fedtsdp"], "statistic", noted)
    for _ in range(2):
        execute(experiment(paper(public_batch=5), settings={"rounds": 3}))
    assert len(set(first[:3])) == 3
    assert first[:3] == first[3:]  # and the same ones when the run is repeated


# --- a threshold that is never reached ------------------------------------------------------------


def test_a_tendency_that_never_reached_its_threshold_is_a_warning_with_the_largest_seen():
    sent = {0: [0.1] * 8, 1: [0.2] * 8, 2: [0.7] * 8, 3: [0.9] * 8}
    calm, seen, said = actors(sent, hopkins=2.0), [], []
    for _ in range(6):
        notes = calm.rounds().state.notes
        seen.append(notes["hopkins"])
        said.append(notes["warning_at_end"]["hopkins"])
    assert len(set(seen)) > 1
    assert [f"(largest value {max(seen[: n + 1]):.2f})" in text for n, text in enumerate(said)] == [
        True
    ] * 6
    assert said[-1].startswith("hopkins = 2 was never reached")
    # Once it has been reached, later rounds below it do not take that back.
    height = sorted(seen)[-2]
    play = actors(sent, hopkins=height)
    warned = [bool(play.rounds().state.notes["warning_at_end"]["hopkins"]) for _ in range(6)]
    assert warned == [max(seen[: n + 1]) <= height for n in range(6)]
    assert not warned[-1]


def test_the_warning_is_in_the_summary_of_a_run():
    made = experiment(paper(hopkins=2.0, public_batch=3), digits(clients=4), settings={"rounds": 2})
    told = execute(made).summary["warnings"]
    assert [text[:38] for text in told] == ["hopkins = 2 was never reached (largest"]
