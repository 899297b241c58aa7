"""FedFomo: weights worked by hand, which models each client is sent, and the cost."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.client import Client, FlatModel, Schedule
from coterie.client.client import TrainingContext
from coterie.core.messages import Upload
from coterie.core.method import Round
from coterie.core.weights import Layout, Weights
from coterie.data import Population, Split
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.experiment.experiment import cohort, execute
from coterie.methods.fedfomo import fedfomo, mixed, picked
from coterie.seeds import numpy_generator
from faulty import Faulty
from scripted import Scripted, Spy, opened, setup, weights
from support import (
    digits,
    drive,
    experiment,
    models,
    on_quadratics,
    quadratics,
    same_bits,
)

NONE = Split(torch.zeros(0, 1), torch.zeros(0))


# --- what a client makes of others' models -------------------------------------------------------


class Pair(nn.Module):
    """Two parameters, of which only the first affects outputs: losses and distances differ."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.theta[0].expand(len(x))


PAIR = Layout.of(Pair())


def holding(own, val=(0.0,), train=(99.0,), module=None, state=None):
    """A client with this model of its own and these validation targets."""
    model = FlatModel(module or Pair())
    context = TrainingContext(model, model.weights(), nn.functional.mse_loss, Schedule(), seed=0)
    splits = [Split(torch.zeros(len(y), 1), torch.tensor(y)) for y in (train, val)]
    kept = {} if own is None else {"own": weights(PAIR, *own)}
    return Client(0, *splits, kept if state is None else state, 0, context)


def others(**places):
    return {name.lstrip("_"): weights(PAIR, *place) for name, place in places.items()}


def test_weights_by_hand():
    # Own model (2, 0), target 0: loss 4. (−1, 4): loss 1, distance √(9 + 16) = 5: 3/5 = 0.6.
    # (1, 0): loss 1, distance 1: 3. (5, 0): loss 25: −21/3 = −7, clipped. Shares 1/6 and 5/6:
    # (2, 0) + (−3, 4)/6 + (−1, 0)·5/6 = (2/3, 2/3). Distances by L1 would give 3/7 and others.
    client = holding((2, 0))
    model, worth = mixed(client, others(_1=(-1, 4), _2=(1, 0), _3=(5, 0)))
    assert worth == {"1": pytest.approx(0.6), "2": pytest.approx(3.0), "3": pytest.approx(-7.0)}
    assert model.vector.tolist() == pytest.approx([2 / 3, 2 / 3])


def test_nothing_better_leaves_the_own_model_as_it_is():
    client = holding((2, 0))
    model, worth = mixed(client, others(_1=(3, 4), _2=(-2, 1)))
    assert worth == {"1": pytest.approx(-5 / 17**0.5), "2": 0.0}
    assert model.vector.tolist() == [2, 0]
    assert mixed(client, {})[0].vector.tolist() == [2, 0]


def test_the_very_same_model_is_worth_nothing():
    model, worth = mixed(holding((2, 0)), others(_1=(2, 0), _2=(1, 0)))
    assert worth == {"1": 0.0, "2": pytest.approx(3.0)}
    assert model.vector.tolist() == [1, 0]


def test_a_model_whose_loss_overflows_is_worth_nothing():
    huge = 1e30  # its square is beyond float32
    assert mixed(holding((2, 0)), others(_1=(huge, 0)))[1] == {"1": 0.0}
    model, worth = mixed(holding((huge, 0)), others(_1=(1, 0)))
    assert worth == {"1": 0.0}
    assert model.vector.tolist() == [pytest.approx(huge), 0]


def test_without_a_model_of_its_own_a_client_weighs_against_the_start():
    # θ⁰ = (0, 0), target 2: loss 4; (1, 0) has 1: 3. Whatever the training targets are.
    model, worth = mixed(holding(None, val=(2.0,)), others(_1=(1, 0)))
    assert worth == {"1": pytest.approx(3.0)}
    assert model.vector.tolist() == [1, 0]


def test_frozen_and_local_tensors_stay_the_clients_own():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(1), nn.Linear(1, 1)
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)
            self.last.bias.requires_grad_(False)

        def forward(self, x):
            return self.last(self.norm(x))[:, 0]

    model = FlatModel(Normed(), bn="local")
    context = TrainingContext(model, model.weights(), nn.functional.mse_loss, Schedule(), seed=0)
    data = Split(torch.tensor([[1.0], [3.0]]), torch.tensor([5.0, 9.0]))
    own = context.start.vector.clone() + 1
    state = {"own": Weights(model.layout, own)}
    client = Client(0, data, data, state, 0, context)
    offered = Weights(model.layout, own * 2).only(model.layout.shareable)
    assert set(offered.layout.names) == {"last.weight"}
    found, worth = mixed(client, {"3": offered})
    moved = {k for k, v in found.tensors().items() if not torch.equal(v, state["own"].tensors()[k])}
    assert worth["3"] > 0
    assert moved == {"last.weight"}


# --- two rounds of three clients -----------------------------------------------------------------

THREE = [[1.0], [2.0], [6.0]]


def test_two_rounds_of_three_clients_by_hand(tmp_path):
    # lr 0.1, one step: a fifth of the way to y. Round 1 from 0, nobody to mix: 0.2, 0.4, 1.2.
    # Round 2, everybody gets both others. Client 0, loss 0.64: 0.4 has 0.36, (0.28)/0.2 = 1.4;
    # 1.2 has 0.04, 0.6/1.0 = 0.6; shares 0.7, 0.3: 0.2 + 0.14 + 0.3 = 0.64, trained 0.712.
    # Client 1, loss 2.56: 0.2 has 3.24, −0.68/0.2 = −3.4; 1.2 has 0.64, 1.92/0.8 = 2.4: 1.2,
    # trained 1.36. Client 2, 23.04: −10.6/1.0 and −8.32/0.8 = −10.4: its own 1.2, trained 2.16.
    made = on_quadratics(fedfomo(m=2), THREE)
    state, channel, _ = drive(made, tmp_path, rounds=2)
    assert {c: float(m.vector) for c, m in state.models.items()} == {
        0: pytest.approx(0.712), 1: pytest.approx(1.36), 2: pytest.approx(2.16)
    }  # fmt: skip
    assert state.memory["affinity"] == {
        0: {1: pytest.approx(1.4, rel=1e-5), 2: pytest.approx(0.6, rel=1e-5)},
        1: {0: pytest.approx(-3.4, rel=1e-5), 2: pytest.approx(2.4, rel=1e-5)},
        2: {0: pytest.approx(-10.6, rel=1e-5), 1: pytest.approx(-10.4, rel=1e-5)},
    }
    # Received is after mixing: to client 0 (0.712) nobody is better, client 1 takes 2.16 (loss
    # 0.0256 against 0.4096), client 2 keeps its own.
    assert [float(m) for m in models(made, state, channel)] == pytest.approx([0.712, 2.16, 2.16])


def test_affinities_add_up_over_rounds(tmp_path):
    # Round 3 begins at 0.712, 1.36, 2.16. Client 0 (y = 1) has loss 0.082944; 1.36 has 0.1296:
    # −0.046656/0.648 = −0.072; 2.16 has 1.3456: −1.262656/1.448 = −0.872. Added to 1.4 and 0.6.
    state, _, _ = drive(on_quadratics(fedfomo(m=2), THREE), tmp_path, rounds=3)
    row = state.memory["affinity"][0]
    assert row == {1: pytest.approx(1.328, rel=1e-4), 2: pytest.approx(-0.272, rel=1e-4)}


def test_others_are_weighed_on_validation_data_alone(tmp_path):
    people = digits()
    turned = people.clients[::-1]
    held = {
        "as they are": people.clients,
        "other test data": [
            replace(c, test=d.train) for c, d in zip(people.clients, turned, strict=True)
        ],
        "other validation data": [
            replace(c, val=d.val) for c, d in zip(people.clients, turned, strict=True)
        ],
    }
    found = {}
    for name, clients in held.items():
        made = experiment(fedfomo(m=3), replace(people, clients=tuple(clients)))
        state, channel, _ = drive(made, tmp_path / name)
        found[name] = (models(made, state, channel), state.memory["affinity"])
    plain, test, val = found.values()
    assert same_bits(plain[0], test[0])
    assert plain[1] == test[1]
    assert not same_bits(plain[0], val[0])


def test_who_sits_out_keeps_its_model_at_the_server_and_is_sent_on(tmp_path):
    made = on_quadratics(fedfomo(m=1, epsilon=0.0), THREE)
    channel, engine, plan = opened(made, tmp_path)
    channel.begin(0, stage="init")
    state = made.method.init(channel, made.setup(plan.start))
    assert state.models == {}
    for number, people in enumerate([[0, 1, 2], [0]]):
        channel.begin(number)
        state = made.method.round(channel, state, Round(number, people))
    first, *rest = (float(state.models[c].vector) for c in range(3))
    assert first > 0.5
    assert rest == pytest.approx([0.4, 1.2])
    assert {n for s in engine.of("2.0").values() for n in s.down} <= {"1", "2"}


def test_a_client_never_weighs_its_own_model(tmp_path):
    _, _, engine = drive(experiment(fedfomo(m=2), settings={"rounds": 4}), tmp_path, Spy)
    for seen in engine.seen:
        assert str(seen.client) not in seen.down
        assert set(seen.metrics) - {"loss"} == {f"weight.{n}" for n in seen.down}


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3, 5])
def test_m_models_go_down_and_one_comes_up(m, tmp_path):
    made = experiment(fedfomo(m=m), settings={"rounds": 3})
    _, channel, engine = drive(made, tmp_path, Spy)
    one = 4 * made.plan(tmp_path).start.layout.size
    assert {s.payload for s in engine.of("init.0").values()} == {(0, 0)}
    assert {s.payload for s in engine.of("1.0").values()} == {(0, one)}
    for order in ("2.0", "3.0"):
        assert {s.payload for s in engine.of(order).values()} == {(m * one, one)}
    payload = [sum(s.payload[i] for s in engine.seen) for i in (0, 1)]
    assert payload == [6 * 2 * m * one, 6 * 3 * one]
    headers = (
        channel.state.ledger.total.down - payload[0],
        channel.state.ledger.total.up - payload[1],
    )
    assert all(0 < h < 6 * 4 * 800 for h in headers)


def test_only_what_may_travel_does(tmp_path):
    def network():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10)
        )

    made = experiment(fedfomo(m=2), model=network, bn="local", freeze=("4",))
    state, channel, engine = drive(made, tmp_path, Spy)
    assert {n for s in engine.seen for n in s.up.get("model", ())} == {"1.weight", "1.bias"}
    assert {n for s in engine.seen for part in s.down.values() for n in part} == {
        "1.weight", "1.bias"
    }  # fmt: skip
    start = made.plan(tmp_path).start
    frozen = start.only(["4"]).vector
    for model in state.models.values():
        assert torch.equal(model.only(["4"]).vector, frozen)
    for vector in models(made, state, channel):
        assert torch.equal(Weights(start.layout, vector).only(["4"]).vector, frozen)


# --- who is sent what ----------------------------------------------------------------------------


def draws(row, count, epsilon, others=range(6), times=3000):
    return [
        picked(row, list(others), count, epsilon, numpy_generator(seed)) for seed in range(times)
    ]


def test_without_chance_the_best_are_picked():
    assert set(map(tuple, draws({1: 0.5, 4: 3.0, 2: -1.0}, 2, 0.0, times=50))) == {(4, 1)}
    # An unknown client counts 0: before one that did harm.
    assert {tuple(sorted(d)) for d in draws({0: -1.0, 1: -2.0}, 5, 0.0, times=50)} == {
        (0, 2, 3, 4, 5)
    }


def test_nobody_is_picked_twice_and_fewer_if_there_are_fewer():
    for epsilon in (0.0, 0.5, 1.0):
        for found in draws({1: 1.0}, 4, epsilon, times=200):
            assert len(set(found)) == 4
        assert sorted(draws({}, 9, epsilon, times=1)[0]) == list(range(6))
        assert draws({}, 3, epsilon, others=[], times=1) == [[]]


def test_equal_affinities_fall_by_chance_and_not_by_position():
    firsts = Counter(found[0] for found in draws({}, 1, 0.0))
    assert set(firsts) == set(range(6))
    assert all(400 < n < 600 for n in firsts.values())  # 500 ± 5 standard deviations of 20
    tied = Counter(found[0] for found in draws({5: 1.0, 2: 1.0}, 1, 0.0))
    assert set(tied) == {2, 5}
    assert abs(tied[2] - 1500) < 150


def test_each_pick_is_by_chance_with_probability_epsilon():
    # The best of six comes first with probability 0.7 + 0.3/6 = 0.75.
    row = {5: 2.0, 3: 1.0}
    found = draws(row, 2, 0.3)
    best = sum(f[0] == 5 for f in found) / len(found)
    assert best == pytest.approx(0.75, abs=0.04)
    # Given the best came first: the second is 3 greedily, or one of five by chance.
    second = [f[1] == 3 for f in found if f[0] == 5]
    assert sum(second) / len(second) == pytest.approx(0.7 + 0.3 / 5, abs=0.05)
    anybody = Counter(f[0] for f in draws(row, 1, 1.0))
    assert all(400 < n < 600 for n in anybody.values())


def conversation(m, epsilon, decay, clients=40):
    """A state in which every client has sent a model and prefers the next two clients."""
    layout = PAIR

    def script(order):
        return Upload({"model": weights(layout, 1, 1)}, {f"weight.{n}": 0.0 for n in order.arrays})

    fed = Scripted(script, range(clients))
    method = fedfomo(m=m, epsilon=epsilon, decay=decay)
    state = method.init(fed, setup(weights(layout, 0, 0), range(clients)))
    affinity = {c: {(c + 1) % clients: 2.0, (c + 2) % clients: 1.0} for c in range(clients)}
    sent = dict.fromkeys(range(clients), weights(layout, 1, 1))
    return fed, method, replace(state, models=sent, memory={**state.memory, "affinity": affinity})


def test_chance_fades_from_round_to_round():
    # ε = 0.9, 0.5, 0.1, 0: of 80 picks about 72, 40, 8 and none are by chance.
    fed, method, state = conversation(2, epsilon=0.9, decay=0.4)
    strays = []
    for number in range(4):
        method.round(fed, state, Round(number, range(40)))
        orders = fed.asked[-1][1]
        liked = {c: {str((c + 1) % 40), str((c + 2) % 40)} for c in range(40)}
        strays.append(sum(len(set(orders[c].arrays) - liked[c]) for c in range(40)))
    assert 60 < strays[0] <= 80
    assert 25 < strays[1] < 55
    assert 0 < strays[2] < 20
    assert strays[3] == 0


def test_each_client_and_round_has_chances_of_its_own_whoever_else_takes_part():
    fed, method, state = conversation(2, epsilon=1.0, decay=0.0)
    asked = []
    for number, people in ((0, range(40)), (1, range(40)), (0, [7, 20])):
        method.round(fed, state, Round(number, people))
        asked.append({c: tuple(o.arrays) for c, o in fed.asked[-1][1].items()})
    first, second, few = asked
    assert few == {c: first[c] for c in (7, 20)}
    assert sum(first[c] == second[c] for c in first) < 5
    shifted = {tuple((int(n) - c) % 40 for n in first[c]) for c in first}
    assert len(shifted) > 35


def test_a_client_is_scored_with_what_the_next_round_would_send_without_chance():
    fed, method, state = conversation(3, epsilon=0.0, decay=0.0)
    state = method.round(fed, state, Round(0, range(40)))
    scored = {c: tuple(method.sends(state, c)) for c in range(40)}
    method.round(fed, state, Round(1, range(40)))
    assert scored == {c: tuple(o.arrays) for c, o in fed.asked[-1][1].items()}
    for client, names in scored.items():  # the two it likes, and one of the others
        assert len(names) == 3
        assert {str((client + 1) % 40), str((client + 2) % 40)} < set(names)


def test_a_score_leaves_nothing_to_chance_however_bold_the_rounds_are():
    fed, method, state = conversation(3, epsilon=1.0, decay=0.0)
    state = method.round(fed, state, Round(0, range(40)))
    liked = {0: {5: 9.0, 7: 8.0, 30: 7.0, 2: -1.0}}
    state = replace(state, memory={**state.memory, "affinity": liked})
    assert set(method.sends(state, 0)) == {"5", "7", "30"}


# --- newcomers, refusals, losses -----------------------------------------------------------------


def test_newcomers_get_m_models_at_random(tmp_path):
    settings = {"rounds": 2, "holdout": 3, "admit_epochs": 1}
    made = experiment(fedfomo(m=2), digits(clients=12, samples=480), settings=settings)
    done = execute(made, tmp_path)
    assert done.summary["newcomers"]["clients"] == made.newcomers
    assert done.summary["newcomers"]["groups"] == made.newcomers
    sent = [tuple(made.method.sends(done.state, c)) for c in made.newcomers]
    assert all(len(s) == 2 for s in sent)
    assert len(set(sent)) > 1
    assert not {int(n) for s in sent for n in s} & set(made.newcomers)
    # θ⁰ knows nothing, so somebody's model is better: the newcomer uses a mixture of these.
    for client in made.newcomers:
        assert not torch.equal(done.weights(client).vector, done.plan.start.vector)


def test_a_lost_reply_counts_nowhere(tmp_path):
    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) == (0, "2.0"))

    made = on_quadratics(fedfomo(m=2), THREE)
    state, channel, _ = drive(made, tmp_path, lossy, rounds=2)
    assert float(state.models[0].vector) == pytest.approx(0.2)
    assert state.memory["affinity"][0] == {}  # from round 1, when there was nobody
    # It still holds 0.2, loss 0.64: 1.36 has 0.1296, 0.5104/1.16 = 0.44; 2.16 is worse: 1.36.
    assert float(models(made, state, channel)[0]) == pytest.approx(1.36)


def without_validation(*clients):
    people = quadratics([[1.0], [2.0], [6.0]])
    changed = [replace(c, val=NONE) if i in clients else c for i, c in enumerate(people.clients)]
    return Population(tuple(changed), "table", (1,), None, 1)


def test_a_client_without_validation_data_is_refused_before_anybody_trains(tmp_path):
    population = without_validation(2)
    made = on_quadratics(fedfomo(m=1), [], population=population, settings={"cohort": 1})
    with pytest.raises(ConfigError, match=r"client 2 has none: set data\.val_fraction"):
        execute(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_newcomer_without_validation_data_is_refused(tmp_path):
    made = on_quadratics(fedfomo(m=1), [], population=without_validation(2))
    channel, _, plan = opened(made, tmp_path)
    method = made.method
    members = replace(made.setup(plan.start), clients=[0, 1])
    state = method.round(channel, method.init(channel, members), Round(0, [0, 1]))
    state = method.admit(channel, state, Round(1, [2]))
    with pytest.raises(ConfigError, match="client 2 has none"):
        channel.fetch(2, method.sends(state, 2))


@pytest.mark.parametrize("m", [3, 4])
def test_as_many_models_as_clients_are_refused(m, tmp_path):
    with pytest.raises(ConfigError, match=f"m = {m} others' models for 3 clients: choose an m"):
        on_quadratics(fedfomo(m=m), THREE).plan(tmp_path)


def test_bad_values_are_refused_when_it_is_made():
    for parameters in ({"m": 0}, {"epsilon": 1.5}, {"epsilon": -0.1}, {"decay": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(parameters))):
            fedfomo(**parameters)


def test_partial_participation_goes_on_with_who_has_sent_something(tmp_path):
    made = experiment(fedfomo(m=2), settings={"rounds": 4, "cohort": 2})
    state, _, engine = drive(made, tmp_path, Spy)
    seen = set()
    for number in range(4):
        people = cohort(made.settings, number, made.members)
        for client, order in engine.of(f"{number + 1}.0").items():
            assert {int(n) for n in order.down} <= seen - {client}
            assert len(order.down) == min(2, len(seen - {client}))
        seen |= set(people)
    assert set(state.models) == seen


def test_it_runs_from_end_to_end_on_what_a_user_has():
    torch.manual_seed(0)
    people = [(torch.randn(40, 4), torch.randint(0, 2, (40,))) for _ in range(4)]
    done = coterie.simulate(people, method=fedfomo(m=2), rounds=2)
    assert done.summary["sees"] == "each"
