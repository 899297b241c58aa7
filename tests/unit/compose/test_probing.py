"""Probes: what clients do with two halves of their data, and what is made of their answers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.clustering import canonical, find_evidence
from coterie.compose import probing
from coterie.compose.probing import Probe, ask, centres, directions_of, place, sketch
from coterie.core.messages import Order, Upload
from coterie.core.method import Round
from coterie.core.weights import Weights
from coterie.data import ClientData, Population, Split
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, TrainingError
from faulty import Faulty
from scripted import Scripted, Spy, halves, linears, opened, setup, steps, weights
from support import drive, experiment, on_quadratics

TWO = linears((1, 1), (1, 1))  # layers 0 and 1 of two numbers each; 1 is the final one
START = weights(TWO, 0, 0, 0, 0)


# --- clients that really train --------------------------------------------------------------------


def look(client, arrays, config):
    """How much a client keeps."""
    return Upload(metrics={"kept": float(len(client.state))})


def channel_to(targets, folder, engine=Spy, **changes):
    """A channel to clients on quadratics, the engine behind it, and the start."""
    method = coterie.fedclust()
    method = replace(method, tasks={**method.tasks, "look": look})
    made = on_quadratics(method, targets, **changes)
    channel, running, plan = opened(made, folder, engine)
    channel.begin(0, stage="init")
    return channel, running, plan.start


def sent(engine, name="init.0"):
    """Both halves' numbers that each client sent, in its order."""
    answers = engine.of(name).items()
    return {c: [float(a.vector) for a in s.sent.values()] for c, s in sorted(answers)}


def bits(total):
    return {i for i in range(40) if round(total) >> i & 1}


@pytest.mark.parametrize("count", [2, 11, 12])
def test_the_halves_are_disjoint_and_cover_the_data(count, tmp_path):
    # The gradient of the mean of (θ − y)² at 0 is −2ȳ; with targets 1, 2, 4, ... it tells the rows.
    channel, engine, start = channel_to([[2.0**i for i in range(count)]] * 2, tmp_path)
    ask(channel, Probe("gradient"), start, [0, 1])
    sizes = [math.ceil(count / 2), count // 2]
    for first, second in sent(engine).values():
        one, two = (bits(-g / 2 * n) for g, n in zip((first, second), sizes, strict=True))
        assert [len(one), len(two)] == sizes
        assert not one & two
        assert one | two == set(range(count))


def test_another_draw_makes_other_halves_and_the_same_draw_the_same(tmp_path):
    channel, engine, start = channel_to([[2.0**i for i in range(12)]], tmp_path)
    answers = []
    for number, draw in enumerate((0, 1, 0)):
        channel.begin(number, stage=f"try{number}")
        ask(channel, Probe("gradient", draw=draw), start, [0])
        answers.append(sent(engine, f"try{number}.0")[0])
    # Asked in another round all is done as in the round that is named, so the draw alone counts.
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize("by", ["final-layer", "model"])
def test_everybody_makes_the_same_number_of_steps(by, tmp_path):
    # Towards 8 a step leaves 0.8 of the way, whatever the batch: 8·(1 − 0.8^7), for one sample in a
    # half as for ten in batches of two.
    targets = [[8.0] * n for n in (2, 5, 20)]
    channel, engine, start = channel_to(targets, tmp_path, schedule={"batch_size": 2})
    answer = ask(channel, Probe(by, steps=7), start, range(3))
    wanted = [pytest.approx(8 * (1 - 0.8**7), abs=1e-5)] * 2
    assert sent(engine) == dict.fromkeys(range(3), wanted)
    assert answer.notes["steps"] == answer.memory["steps"] == 7
    # Seven steps of each half: of 1 and 1 sample; of 3 and 2 in batches of 2 and 1, or 2; of 10.
    gone = sum(s.metrics["samples"] for s in engine.of("init.0").values())
    assert answer.notes["samples"] == gone
    assert engine.of("init.0")[0].metrics["samples"] == 14
    assert engine.of("init.0")[2].metrics["samples"] == 7 * 2 * 2


def test_epochs_go_further_with_more_samples(tmp_path):
    targets = [[8.0] * 4, [8.0] * 12]
    channel, engine, start = channel_to(targets, tmp_path, schedule={"batch_size": 2})
    ask(channel, Probe("model", epochs=2), start, range(2))
    # Halves of 2 and of 6: one batch and three in an epoch.
    assert sent(engine)[0] == [pytest.approx(8 * (1 - 0.8**2), abs=1e-5)] * 2
    assert sent(engine)[1] == [pytest.approx(8 * (1 - 0.8**6), abs=1e-5)] * 2
    assert not [s for s in engine.seen if s.task == "steps"]


@pytest.mark.parametrize(
    ("lr", "enough"), [(0.1, 25), (0.01, 50), (0.005, 100), (0.002, 300), (0.001, 0)]
)
def test_a_client_says_after_how_many_steps_its_loss_is_below_a_fifth(lr, enough, tmp_path):
    # A step leaves (1 − 2·lr)² of the loss: below a fifth after 4, 40, 81, 202 and 402 steps.
    needed = math.ceil(math.log(0.2) / math.log((1 - 2 * lr) ** 2))
    assert enough == next((k for k in (25, 50, 100, 200, 300) if k >= needed), 0)
    channel, engine, start = channel_to([[8.0] * 4, [8.0] * 3], tmp_path, schedule={"lr": lr})
    answer = ask(channel, Probe("model"), start, [0, 1])
    assert [s.metrics["enough"] for s in engine.of("init.0").values()] == [enough] * 2
    assert answer.notes["steps"] == (enough or 300)
    # Samples of the search: losses at a third each, before and after every training, of 2 samples.
    asked = [k for k in (25, 50, 100, 200, 300) if k <= (enough or 300)]
    samples = engine.of("init.0")[0].metrics["samples"]
    assert samples == pytest.approx(2 * asked[-1] + 2 / 3 * (1 + len(asked)))


def test_a_client_with_one_sample_is_left_out_and_placed_afterwards(tmp_path):
    targets = [[8.0] * 6, [-8.0] * 4, [7.0] * 4, [-9.0] * 6, [8.0], [-8.0]]
    channel, _, start = channel_to(targets, tmp_path)
    answer = ask(channel, Probe("model", steps=3), start, range(6))
    assert answer.clients == [0, 1, 2, 3]
    assert answer.notes["too_small"] == [4, 5]
    assert answer.evidence.labels.tolist() == [0, 1, 0, 1]
    state, _, _ = drive(
        on_quadratics(coterie.fedclust(trial="off"), targets), tmp_path / "run", rounds=1
    )
    assert state.groups == {0: "0/0", 1: "0/1", 2: "0/0", 3: "0/1", 4: "0/0", 5: "0/1"}


def test_who_has_one_sample_may_be_everybody(tmp_path):
    channel, _, start = channel_to([[8.0], [-8.0]], tmp_path)
    answer = ask(channel, Probe("model", steps=3), start, range(2))
    assert (answer.clients, answer.evidence.enough) == ([], False)
    assert "fewer than two clients" in answer.evidence.why


def test_whether_anybody_has_validation_data(tmp_path):
    people = on_quadratics(coterie.fedclust(), [[1.0, 2.0], [3.0, 4.0]]).population
    empty = Split(torch.zeros(0, 1), torch.zeros(0))
    none = [replace(c, val=empty) for c in people.clients]
    for name, clients in (("some", [people.clients[0], none[1]]), ("none", none)):
        some = replace(people, clients=tuple(clients))
        channel, _, start = channel_to([], tmp_path / name, population=some)
        assert ask(channel, Probe("gradient"), start, [0, 1]).validated == (name == "some")


# --- newcomers ------------------------------------------------------------------------------------

PLANTED = [[8.0, 9.0], [-8.0, -7.0], [5.0, 6.0], [-4.0, -5.0], [3.0, 4.0], [-2.0, -3.0], [9.0, 7.0]]


def test_newcomers_are_placed_by_direction_and_a_lost_reply_leaves_the_others_alone(tmp_path):
    silent = set()

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: c in silent)

    channel, _, start = channel_to(PLANTED, tmp_path, lossy, schedule={"lr_decay": 0.5})
    answer = ask(channel, Probe("model", steps=3), start, range(4))
    assert answer.evidence.labels.tolist() == [0, 1, 0, 1]
    middles = centres(answer.places, answer.evidence.labels)
    channel.begin(7, stage="later")
    assert place(channel, answer.memory, middles, [4, 5, 6]) == {4: 0, 5: 1, 6: 0}
    silent.add(5)
    channel.begin(8, stage="later.still")
    assert place(channel, answer.memory, middles, [4, 5, 6]) == {4: 0, 6: 0}


def test_a_newcomer_does_what_everybody_did_whenever_it_is_asked(tmp_path):
    """The same learning rate, steps and halves: what was asked before is answered alike."""
    channel, _, start = channel_to(PLANTED, tmp_path, schedule={"lr_decay": 0.5, "batch_size": 1})
    answer = ask(channel, Probe("model", steps=5), start, range(7))
    channel.begin(9, stage="later")
    again = directions_of(channel, answer.memory, range(7))
    for i, client in enumerate(answer.clients):
        direction, spread, examples = again[client]
        assert torch.equal(direction, answer.places[i])
        assert (spread, examples) == (answer.spreads[i], answer.examples[i])


# --- what is compared -----------------------------------------------------------------------------


def classes(*clients):
    """A population whose clients hold these inputs and classes."""
    people = []
    for x, y in clients:
        split = Split(torch.tensor(x), torch.tensor(y))
        people.append(ClientData(split, split, split))
    return Population(tuple(people), "table", (2,), ("a", "b", "c"), 3)


def on_classes(population, folder, **changes):
    made = experiment(
        coterie.fedclust(), population, model=lambda: nn.Linear(2, 3, bias=False), **changes
    )
    channel, engine, plan = opened(made, folder)
    channel.begin(0, stage="init")
    return channel, engine, plan.start


def rows(count, angle=0.0):
    """Inputs along one line, of different lengths."""
    return [[k * math.cos(angle), k * math.sin(angle)] for k in range(1, count + 1)]


def test_labels_are_represented_by_their_frequencies(tmp_path):
    people = classes(
        (rows(4), [1, 1, 1, 1]), (rows(7), [0, 0, 1, 1, 1, 2, 2]), (rows(4), [1, 1, 1, 1])
    )
    channel, engine, start = on_classes(people, tmp_path)
    answer = ask(channel, Probe("labels"), start, range(3))
    one, many, _ = (engine.of("init.0")[c].sent for c in range(3))
    assert one["first labels"].tolist() == one["second labels"].tolist() == [0, 1, 0]
    # Halves of 4 and 3 together have 2, 3 and 2 of each.
    assert (4 * many["first labels"] + 3 * many["second labels"]).tolist() == pytest.approx(
        [2, 3, 2]
    )
    assert not engine.of("init.0")[0].down  # no model is needed
    assert "steps" not in answer.notes


def test_numbers_have_no_frequencies(tmp_path):
    channel, _, start = channel_to([[1.0, 2.0], [3.0, 4.0]], tmp_path)
    with pytest.raises(ConfigError, match=r"targets of client \d are numbers.*final-layer"):
        ask(channel, Probe("labels"), start, [0, 1])


def test_data_are_represented_by_the_space_that_they_span(tmp_path):
    angles = [0.0, 1.5, 0.1, 1.4, 0.05, 1.45]
    people = classes(*[(rows(6, a), [0, 1, 2] * 2) for a in angles])
    channel, engine, start = on_classes(people, tmp_path)
    answer = ask(channel, Probe("data", vectors=3), start, range(6))
    for client, angle in enumerate(angles):
        for name in ("first data", "second data"):  # data on a line have one direction, not three
            vector = engine.of("init.0")[client].sent[name]
            line = torch.tensor([[math.cos(angle)], [math.sin(angle)]])
            torch.testing.assert_close(vector * vector[0].sign(), line, atol=1e-5, rtol=0)
    assert answer.evidence.groups == 6  # halves that are alike to the last digit tell all apart
    # Projections on lines at an angle a have squared distance 2 − 2·cos² a = 2·sin² a.
    mean = [[2 * math.sin(a - b) ** 2 for b in angles] for a in angles]
    assert answer.evidence.errors[1] == pytest.approx(np.mean(mean) / 2, abs=1e-6)


def test_overlaps_of_subspaces_are_squared_norms_of_products():
    random = np.random.default_rng(0)
    bases = [np.linalg.qr(random.normal(size=(9, p)))[0] for p in (3, 1, 2)] + [np.zeros((9, 1))]
    by_hand = [[np.linalg.norm(a.T @ b) ** 2 for b in bases] for a in bases]
    np.testing.assert_allclose(probing._overlaps(bases), by_hand, atol=1e-12)


@pytest.mark.parametrize("by", ["model", "data"])
def test_many_clients_with_long_representations_are_compared_by_sketches(by, monkeypatch):
    monkeypatch.setattr(probing, "SAMPLE", 11)
    monkeypatch.setattr(probing, "SKETCH", 64)
    wide = linears((1, 150))
    random = np.random.default_rng(1)
    means = random.normal(size=(2, 300))
    rows = {c: means[c % 2] + 0.5 * random.normal(size=(2, 300)) for c in range(12)}

    def answer(order):
        sides = torch.tensor(rows[order.client], dtype=torch.float32)
        if by == "data":
            sides = torch.nn.functional.normalize(sides)
            return halves(*[side[:, None] for side in sides], by=by)
        return halves(*[Weights(wide, side) for side in sides])

    start = Weights(wide, torch.zeros(300))
    lengths = []

    def noting(first, *rest, **more):
        lengths.append(first.shape[1])
        return find_evidence(first, *rest, **more)

    monkeypatch.setattr(probing, "find_evidence", noting)
    result = ask(Scripted(answer, range(12)), Probe(by, steps=5), start, range(12))
    assert result.evidence.labels.tolist() == [0, 1] * 6
    assert lengths == [64]


def test_a_direction_of_inputs_has_no_sign():
    """Singular vectors have none: halves, and newcomers, may point either way."""
    angles = {0: 0.0, 1: 1.5, 2: 0.1, 3: 1.4, 4: 0.05, 5: 1.45}

    def answer(order):
        a = angles[order.client]
        line = torch.tensor([[math.cos(a)], [math.sin(a)]])
        return halves(line, -line if order.client % 3 else line, by="data")

    fed = Scripted(answer, range(6))
    result = ask(fed, Probe("data"), START, range(4))
    assert result.spreads == pytest.approx([0.0] * 4, abs=1e-9)
    middles = centres(result.places, [0, 1, 0, 1])
    assert place(fed, result.memory, middles, [4, 5]) == {4: 0, 5: 1}


def test_inputs_along_two_lines_are_two_groups(tmp_path):
    random = np.random.default_rng(0)
    noisy = [
        np.array(rows(10, angle)) + random.normal(0, 0.5, (10, 2))
        for angle in (0.0, 1.2, 0.1, 1.3, 0.05, 1.25)
    ]
    people = classes(*[(x.astype(np.float32).tolist(), [0, 1] * 5) for x in noisy])
    channel, _, start = on_classes(people, tmp_path)
    answer = ask(channel, Probe("data", vectors=1), start, range(6))
    assert answer.evidence.labels.tolist() == [0, 1] * 3


def test_gradients_are_those_of_the_halves(tmp_path):
    # Constant targets 3 and 5 at θ = 1: 2·(1 − 3) and 2·(1 − 5), in both halves.
    channel, engine, start = channel_to([[3.0] * 4, [5.0] * 5], tmp_path, start=1.0)
    answer = ask(channel, Probe("gradient"), start, [0, 1])
    assert sent(engine) == {0: [-4, -4], 1: [-8, -8]}
    assert "steps" not in answer.notes


def test_what_is_compared_is_the_change_or_what_the_view_shows(tmp_path):
    # From 10 three steps go 1 − 0.8³ = 0.488 of the way: to 13.904 towards 18, to 6.096 towards 2.
    # The models point one way, what changed points in opposite ones: 1 from their mean, which is 0.
    channel, _, start = channel_to([[18.0] * 4, [2.0] * 4], tmp_path, start=10.0)
    answer = ask(channel, Probe("model", steps=3), start, [0, 1])
    assert answer.evidence.errors == pytest.approx({1: 1.0, 2: 0.0}, abs=1e-9)
    assert answer.places.tolist() == [[1.0], [-1.0]]
    # Seen by a view, numbers count as they are: 3.904 from their mean.
    channel.begin(1, stage="view")
    probe = Probe("model", steps=3)
    seen = ask(
        channel, probe, start, [0, 1], view=lambda model: np.array([float(model.vector), 100])
    )
    assert seen.evidence.errors == pytest.approx({1: 3.904**2, 2: 0.0}, abs=1e-4)


def test_who_said_how_many_steps_it_needs_is_not_sent_the_model_again(tmp_path):
    def lossy(plan):
        return Faulty(Spy(plan), lose_reply=lambda c, o: (c, o) == (1, "init.0"))

    channel, faulty, start = channel_to([[8.0, 9.0], [-8.0, -7.0], [7.0, 8.0]], tmp_path, lossy)
    answer = ask(channel, Probe("model"), start, range(3))
    asked = faulty.engine.of("init.1")
    assert {c: list(s.down) for c, s in asked.items()} == {0: [], 1: ["model"], 2: []}
    # All the same everybody has trained, and keeps nothing: asked again, it is sent the model.
    assert answer.places.tolist() == [[1.0], [-1.0], [1.0]]
    channel.begin(0, stage="look")
    assert [r.metrics["kept"] for r in channel.gather([Order(c, "look") for c in range(3)])] == [
        0
    ] * 3
    channel.begin(1, stage="again")
    assert place(channel, answer.memory, torch.tensor([[1.0], [-1.0]]), [0, 1]) == {0: 0, 1: 1}
    assert {c: list(s.down) for c, s in faulty.engine.of("again.0").items()} == {
        0: ["model"], 1: ["model"]
    }  # fmt: skip


# --- answers written by hand ----------------------------------------------------------------------


def direction(degrees, final=True):
    """A change of the final layer, or of the first, in this direction."""
    turn = [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]
    return (0, 0, *turn) if final else (*turn, 0, 0)


class Answers(Scripted):
    """Clients whose final layers and whole models change in these directions, half by half."""

    def __init__(self, final, whole=None, needed=None, examples=None, min_group=1, layout=TWO):
        super().__init__(self.answer, range(len(final)), examples or {}, min_group=min_group)
        self.final, self.whole, self.needed, self.layout = final, whole, needed or {}, layout

    def answer(self, order):
        if order.task == "steps":
            return steps(self.needed.get(order.client, 25), samples=10.0)
        last = order.config["by"] == "final-layer"
        angles = (self.final if last else self.whole)[order.client]
        sides = [weights(self.layout, *direction(a, final=last)) for a in angles]
        return halves(*[s.only(["1"]) if last else s for s in sides], samples=3.0)

    @property
    def conversation(self):
        names = [next(iter(orders.values())) for _, orders, _ in self.asked]
        return [order.config.get("by", order.task) for order in names]


APART = {0: (0, 8), 1: (90, 95), 2: (2, 5), 3: (98, 88)}
# Halves that contradict each other, and in which nobody is like anybody.
NOISE = {0: (0, 180), 1: (90, 270), 2: (45, 225), 3: (135, 315)}


def asked(fed, **parameters):
    return ask(fed, Probe(**parameters), START, list(fed.clients))


def test_the_median_client_decides_about_the_steps():
    cases = [
        ([25, 25, 300], 25), ([25, 100, 300], 100), ([25, 50, 100, 200], 50), ([300, 25], 25),
        ([25, 200, 0], 200), ([0, 300, 300, 25], 300),
    ]  # fmt: skip
    for needed, wanted in cases:
        fed = Answers(dict.fromkeys(range(len(needed)), (0, 1)), needed=dict(enumerate(needed)))
        answer = asked(fed, fallback=False)
        assert answer.notes["steps"] == wanted
        assert {o.config["probe_steps"] for o in fed.asked[1][1].values()} == {wanted}
        assert answer.notes["samples"] == 13.0 * len(needed)
        assert answer.evidence.enough


def test_too_little_training_is_said_when_most_clients_never_learn_enough():
    short = dict(enumerate([25, 0, 0, 0]))
    one = asked(Answers(dict.fromkeys(range(4), (0, 1)), needed=short), fallback=False)
    assert one.notes["steps"] == 300
    assert not one.evidence.enough
    assert "too little training to tell: after 300 steps" in one.notes["why"] == one.evidence.why
    # Groups that are there all the same are there.
    result = asked(Answers(APART, needed=short))
    assert (result.evidence.groups, result.evidence.enough) == (2, True)
    half = dict(enumerate([25, 25, 0, 0]))
    assert asked(
        Answers(dict.fromkeys(range(4), (0, 1)), needed=half), fallback=False
    ).evidence.enough


def test_the_whole_change_is_asked_for_once_when_the_final_layer_tells_nothing():
    fed = Answers(NOISE, APART)
    answer = asked(fed)
    assert fed.conversation == ["steps", "final-layer", "model"]
    assert answer.evidence.labels.tolist() == [0, 1, 0, 1]
    assert answer.notes["by"] == answer.memory["by"] == "model"
    assert "too little data" in answer.notes["fallback"]
    assert answer.notes["samples"] == 4 * (10 + 3 + 3)
    # When that tells nothing either, it is not asked again.
    fed = Answers(NOISE, NOISE)
    assert asked(fed).evidence.groups == 1
    assert fed.conversation == ["steps", "final-layer", "model"]


def test_the_whole_change_is_not_asked_for_where_it_may_not_be():
    told = Answers(APART, NOISE)  # the final layer tells enough
    assert asked(told).evidence.groups == 2
    assert told.conversation == ["steps", "final-layer"]
    assert "fallback" not in asked(told).notes
    for fed, given in (
        (Answers(NOISE, APART), {"fallback": False}),
        (Answers(NOISE, APART, min_group=2), {}),
        (Answers({0: (0, 180)}, {0: (0, 1)}), {}),
    ):
        assert asked(fed, **given).evidence.groups == 1
        assert fed.conversation == ["steps", "final-layer"]


def test_of_a_whole_change_that_tells_nothing_the_final_layer_is_looked_at():
    def answer(order):
        # The first layer's noise is twenty times as long as what the last one has to say.
        angles = zip(NOISE[order.client], APART[order.client], strict=True)
        sides = [(*(20 * v for v in direction(a)[2:]), *direction(b)[2:]) for a, b in angles]
        return halves(*[weights(TWO, *side) for side in sides])

    fed = Scripted(answer, range(4))
    result = ask(fed, Probe("model", steps=5), START, range(4))
    assert result.evidence.labels.tolist() == [0, 1, 0, 1]
    assert result.memory["by"] == result.notes["by"] == "final-layer"
    assert "fallback" in result.notes
    assert len(fed.asked) == 1  # nothing more was asked for
    assert result.places.shape == (4, 2)
    alone = ask(fed, Probe("model", steps=5, fallback=False), START, range(4))
    assert (alone.evidence.groups, alone.memory["by"]) == (1, "model")


def test_a_model_of_one_layer_has_no_more_to_tell(tmp_path):
    targets = [[8.0, -8.0], [8.0, -8.0], [-8.0, 8.0]]
    channel, engine, start = channel_to(targets, tmp_path)
    ask(channel, Probe("final-layer", steps=3), start, range(3))
    assert {s.order for s in engine.seen} == {"init.0"}


def test_who_did_not_answer_is_not_there():
    fed = Answers(APART)
    fed.script = lambda order: None if order.client == 1 else fed.answer(order)
    answer = asked(fed)
    assert answer.clients == answer.notes["clients"] == [0, 2, 3]
    assert answer.evidence.labels.tolist() == [0, 0, 1]
    fed.script = lambda order: None
    with pytest.raises(TrainingError, match="no client answered how many steps"):
        asked(fed)
    with pytest.raises(TrainingError, match="no client answered the probe"):
        asked(fed, steps=5)


def test_directions_and_spreads_by_hand():
    # Halves 8° apart: the direction is between them, and each is sin 4° from it (that long are both
    # deviations from the mean): 1/4 of the square of 2·sin 4°.
    answer = asked(Answers(APART))
    np.testing.assert_allclose(answer.places[0], direction(4)[2:], atol=1e-6)
    np.testing.assert_allclose(answer.places[1], direction(92.5)[2:], atol=1e-6)
    assert answer.spreads[0] == pytest.approx(math.sin(math.radians(4)) ** 2, rel=1e-4)
    middles = centres(answer.places, [0, 1, 0, 1])
    np.testing.assert_allclose(middles[0], direction(3.75)[2:], atol=1e-5)
    np.testing.assert_allclose(middles.norm(dim=1), [1, 1], atol=1e-6)


@pytest.mark.parametrize("by", ["final-layer", "model"])
def test_the_order_of_clients_changes_nothing(by):
    random = np.random.default_rng(0)
    angles = {c: tuple(90.0 * (c % 3) + random.normal(0, 9, 2)) for c in range(9)}
    turned = random.permutation(9)
    one = asked(Answers(angles, angles, examples=dict.fromkeys(range(9), 2)), by=by)
    moved = {i: angles[int(c)] for i, c in enumerate(turned)}
    two = asked(Answers(moved, moved, examples=dict.fromkeys(range(9), 2)), by=by)
    assert two.evidence.labels.tolist() == canonical(one.evidence.labels[turned]).tolist()
    assert two.evidence.errors == pytest.approx(one.evidence.errors)
    np.testing.assert_allclose(two.evidence.certainty, one.evidence.certainty[turned], atol=1e-9)
    back = Answers(angles, angles, examples=dict.fromkeys(range(9), 2))
    again = ask(back, Probe(by), START, list(reversed(range(9))))
    assert again.notes == one.notes


# --- sketches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_sketch_nearly_keeps_inner_products(shift):
    """Also of vectors most of whose numbers are positive: signs make them cancel."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(7, 60_000, generator=generator, dtype=torch.float64)
    rows = torch.nn.functional.normalize(noise[1:] + 1.5 * noise[0] + shift)
    small = torch.stack([sketch(r) for r in rows])
    assert small.shape == (6, probing.SKETCH)
    torch.testing.assert_close(small @ small.T, rows @ rows.T, atol=0.08, rtol=0)
    assert 0.5 < float(rows[0] @ rows[1]) < 0.9  # far enough from 0 and 1 for the law to say much
    torch.testing.assert_close(sketch(2 * rows[0] - rows[1]), 2 * small[0] - small[1])


def test_a_short_vector_is_its_own_sketch():
    short = torch.randn(probing.SKETCH)
    assert sketch(short) is short


def test_a_newcomer_is_placed_by_its_sketch():
    """Of a model with more numbers than are kept of a direction."""
    wide = linears((70, 70))  # 4970 numbers
    random = np.random.default_rng(0)
    means = random.normal(size=(2, 70 * 71))
    rows = {c: means[c % 2] + random.normal(size=(2, 70 * 71)) for c in range(8)}

    def answer(order):
        if order.task == "halves":
            return halves(*[weights(wide, *side) for side in rows[order.client]])
        return Upload()

    fed = Scripted(answer, range(8))
    start = weights(wide, *np.zeros(70 * 71))
    told = ask(fed, Probe("model", steps=5), start, range(6))
    assert told.places.shape == (6, probing.SKETCH)
    assert told.evidence.labels.tolist() == [0, 1] * 3
    middles = centres(told.places, told.evidence.labels)
    assert place(fed, told.memory, middles, [6, 7]) == {6: 0, 7: 1}


def test_a_client_too_small_for_halves_goes_to_the_nearest_group_at_its_turn():
    """By answers written by hand: it says that its halves are one and the same."""
    small = {4: 85}

    def answer(order):
        if order.task == "train":
            return Upload({"model": next(iter(order.arrays.values()))}, {"loss": 0.0})
        if order.task == "steps":
            return steps(25)
        if order.client in small:
            return halves(weights(TWO, *direction(small[order.client])).only(["1"]), count=1)
        return Answers(APART).answer(order)

    fed = Scripted(answer, range(5))
    method = coterie.fedclust(trial="off")
    state = method.init(fed, setup(START, range(5)))
    assert state.groups == {0: "0/0", 1: "0/1", 2: "0/0", 3: "0/1"}
    assert state.notes["evidence"]["too_small"] == [4]
    state = method.round(fed, state, Round(0, [0, 4]))
    assert state.groups[4] == "0/1"


# --- layer by layer -------------------------------------------------------------------------------

SIDES = {  # both halves of a client: weight and bias of layer 0, then of layer 1
    0: [(0, 0, 0, 0), (0, 0, 0, 0)],
    1: [(2, 4, 0, 0), (4, 4, 0, 0)],  # in the mean (3, 4) in layer 0
    2: [(0, 0, 5, 11), (0, 0, 5, 13)],  # in the mean (5, 12) in layer 1
}


def two_layers(order):
    sides = [weights(TWO, *side) for side in SIDES[order.client]]
    return halves(*[s.only(["1"]) if order.config["by"] == "final-layer" else s for s in sides])


@pytest.mark.parametrize("start", [(0, 0, 0, 0), (7, -1, 2, 3)])
def test_whole_models_are_compared_layer_by_layer(start):
    fed = Scripted(two_layers, range(3))
    result = ask(fed, Probe("model", steps=5), weights(TWO, *start), range(3))
    # ‖(3, 4)‖ = 5 from client 1 to both others in layer 0, ‖(5, 12)‖ = 13 from client 2 in layer 1.
    layers = {"0": [[], [5.0], [0.0, 5.0]], "1": [[], [0.0], [13.0, 13.0]]}
    assert result.layer_notes == {"layer_distances": {"clients": [0, 1, 2], "layers": layers}}


def test_layers_are_noted_where_whole_models_were_sent_and_of_so_many_as_can_be_read(monkeypatch):
    last = ask(Scripted(two_layers, range(3)), Probe(steps=5, fallback=False), START, range(3))
    assert last.layer_notes == {}
    monkeypatch.setattr(probing, "MOST_BY_LAYER", 2)
    for count, noted in ((2, ["layer_distances"]), (3, [])):
        fed = Scripted(two_layers, range(count))
        result = ask(fed, Probe("model", steps=5), START, range(count))
        assert list(result.layer_notes) == noted
