"""Layer-wise aggregation: which layers travel when, and what the clients then hold."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.compose.layerwise import KEY, discrepancy, quiet_layers
from coterie.core.method import Round
from coterie.data import ClientData, Population, Split
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from faulty import Faulty
from scripted import Spy, linears, opened, weights
from support import Stop, digits, drive, experiment, models, same_bits, stop_after

# --- two layers of quadratics --------------------------------------------------------------------


class Part(nn.Module):
    """A layer of so many numbers."""

    def __init__(self, size):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size))


class Two(nn.Module):
    """Answers everything with its own numbers: one of layer a, the others of layer b."""

    def __init__(self, numbers):
        super().__init__()
        self.a, self.b = Part(1), Part(numbers - 1)

    def forward(self, x):
        theta = torch.cat([self.a.theta, self.b.theta])
        return theta.expand(len(x), len(theta))


def people(*targets, spread=0.0):
    """A client for each target: two samples, on both sides of it."""
    clients = []
    for target in targets:
        held = Split(torch.zeros(1, 1), torch.tensor([target]))
        train = Split(torch.zeros(2, 1), held.y + torch.tensor([[spread], [-spread]]))
        clients.append(ClientData(train, held, held))
    return Population(tuple(clients), "table", (1,), None, len(targets[0]))


# The loss is the mean over k numbers, so lr k/10 goes k/10·2/k = 0.2 of the way to the target.
# Layer a has one number, and scaled to [0, 1] that is 0: D_a = 0. Layer b has two: scaled, (0, 1)
# or (1, 0). Client 0 wants (0, 10) there, client 1 (6, 0); their mean rises, as client 0's does,
# and client 1's falls: D_b is 0 and 1, in the mean 0.5. So a is quiet and b is not.
PULL = [[0.0, 0.0, 10.0], [10.0, 6.0, 0.0]]
# With three numbers in layer b every client's shape differs from the mean's: the first uploads are
# (0, 1, 0.4) and (0.6, 0, 1), the mean (0, 0.5, 1); D_b = 1.1/3 for both of them.
SHAPES = [[0.0, 0.0, 10.0, 4.0], [10.0, 6.0, 0.0, 10.0]]
A, B, BOTH = ("a.theta",), ("b.theta",), ("a.theta", "b.theta")


def on_two_layers(method, targets=PULL, spread=0.0, **changes):
    return experiment(
        method, people(*targets, spread=spread), model=lambda: Two(len(targets[0])),
        criterion=nn.functional.mse_loss,
        schedule={"lr": 0.1 * len(targets[0]), "momentum": 0.0}, **changes,
    )  # fmt: skip


def paced(alpha=2, **more):
    return coterie.layer_wise(coterie.fedavg(), **{"alpha": alpha, "share": 0.5, "start": 1} | more)


def played(rounds, folder, method=None, engine=Spy, cohort=None, **changes):
    """Rounds by hand: the experiment, the state after each of them, the channel, the engine."""
    made = on_two_layers(method or paced(), **changes)
    channel, running, plan = opened(made, folder, engine)
    states = [made.method.init(channel, made.setup(plan.start))]
    everyone = range(len(made.population.clients))
    for number in range(rounds):
        channel.begin(number)
        info = Round(number, cohort(number) if cohort else list(everyone))
        states.append(made.method.round(channel, replace(states[-1], notes={}), info))
    return made, states[1:], channel, running


def test_a_quiet_layer_travels_every_other_round(tmp_path):
    _, states, _, engine = played(7, tmp_path)
    # Round 1 is before the start and round 3, 5, 7 are full. What was sent up in a round comes down
    # in the next. D is known from the first mean that is received, in round 2.
    ways = {
        number: {(s.down["0"], s.up["model"]) for s in engine.of(f"{number}.0").values()}
        for number in range(1, 8)
    }
    assert ways == {
        1: {(BOTH, BOTH)}, 2: {(BOTH, BOTH)}, 3: {(BOTH, BOTH)}, 4: {(BOTH, B)},
        5: {(B, BOTH)}, 6: {(BOTH, B)}, 7: {(B, BOTH)},
    }  # fmt: skip
    assert [s.notes["layers"]["all_due"] for s in states] == [1, 0, 1, 0, 1, 0, 1]
    assert states[1].notes["layers"]["discrepancy"] == {"0": {"a": 0.0, "b": 0.5}}
    assert [s.notes["layers"]["quiet"] for s in states[1:]] == [{"0": ["a"]}] * 6
    assert "discrepancy" not in states[4].notes["layers"]  # one layer came down: nothing to measure


@pytest.mark.parametrize(("alpha", "start"), [(2, 1), (3, 1), (3, 4), (4, 2)])
def test_a_quiet_layer_is_due_every_alpha_rounds_after_the_start(alpha, start, tmp_path):
    _, _, _, engine = played(12, tmp_path, paced(alpha, start=start))
    for number in range(12):
        full = number < max(start, 2) or (number - start) % alpha == alpha - 1
        ups = {s.up["model"] for s in engine.of(f"{number + 1}.0").values()}
        if number <= 8:  # then client 1's layer b turns round, and D_b with it
            assert ups == {BOTH if full else B}, number


def test_two_layers_by_hand(tmp_path):
    # Layer a, a fifth of the way to 0 and to 10 in each round.
    # Round 1: 0 and 2, mean 1. Round 2: 0.8 and 2.8, mean 1.8. Round 3: 1.44 and 3.44, mean 2.44.
    # Round 4: 1.952 and 3.952, kept; the server's stays 2.44. Round 5: 0.8·1.952 = 1.5616 and
    # 3.952 + 0.2·6.048 = 5.1616, mean 3.3616. (FedAvg: 2.952, 3.3616, for a mean of such steps is
    # the step of the mean; but its clients begin round 5 from 2.952.)
    # Layer b is averaged always: 0.2·(3, 5), and 1 − 0.8ʳ of (3, 5) after r rounds.
    _, states, _, engine = played(5, tmp_path)
    server = [s.models[0].vector for s in states]
    assert [float(v[0]) for v in server] == pytest.approx([1, 1.8, 2.44, 2.44, 3.3616], abs=1e-5)
    for r, vector in enumerate(server, start=1):
        share = 1 - 0.8**r
        assert vector[1:].tolist() == pytest.approx([3 * share, 5 * share], abs=1e-5)
    sent = {n: [s.sent["model"].vector.tolist() for _, s in sorted(engine.of(f"{n}.0").items())]
            for n in (4, 5)}  # fmt: skip
    assert [v[0] for v in sent[5]] == pytest.approx([1.5616, 5.1616], abs=1e-5)
    # Round 4 sent layer b only: from 1 − 0.8³ = 0.488 of (3, 5), a fifth of the way.
    first = [0.8 * 1.464, 2.44 + 0.2 * 7.56]
    assert sent[4][0] == pytest.approx(first, abs=1e-5)


def test_the_model_in_use_is_due_layers_of_the_server_over_ones_own(tmp_path):
    made, states, channel, _ = played(4, tmp_path)
    channel.begin(9, stage="look")
    mine = [channel.fetch(c, made.method.sends(states[-1], c)).vector.tolist() for c in (0, 1)]
    # After round 4: layer a as each trained it, layer b 1 − 0.8⁴ = 0.5904 of (3, 5).
    assert mine[0] == pytest.approx([1.952, 1.7712, 2.952], abs=1e-5)
    assert mine[1] == pytest.approx([3.952, 1.7712, 2.952], abs=1e-5)
    assert made.method.sends(states[-1], 0)["0"].layout.names == B
    scores = channel.score({c: made.method.sends(states[-1], c) for c in (0, 1)}, {})
    gaps = (1.952**2 + 1.7712**2 + 7.048**2) / 3
    assert scores[0]["test_loss"] == pytest.approx(gaps, rel=1e-4)
    stranger = made.method.sends(states[-1], 7)["0"]
    assert stranger.layout.names == BOTH  # who has nothing gets everything


def test_the_bytes_saved_are_those_of_the_layer(tmp_path):
    _, _, _, engine = played(6, tmp_path)
    plain = played(6, tmp_path / "b", coterie.fedavg())[3]
    saved = [
        [p - q for p, q in zip(ours.payload, theirs.payload, strict=True)]
        for theirs, ours in zip(engine.seen, plain.seen, strict=True)
    ]
    # One number, four bytes: up in rounds 4 and 6, down in round 5, for each of two clients.
    full, up, down = [0, 0], [0, 4], [4, 0]
    assert saved == [full] * 6 + [up] * 2 + [down] * 2 + [up] * 2


def missing(client, order):
    return lambda plan: Faulty(Spy(plan), lose_order=lambda c, o: (c, o) == (client, order))


def test_who_missed_a_mean_gets_it_when_it_comes_back(tmp_path):
    # Client 1 misses the full round 3: in round 4 it has neither layer of that mean.
    _, states, _, engine = played(5, tmp_path / "a", engine=missing(1, "3.0"), targets=SHAPES)
    assert {c: s.down["0"] for c, s in engine.engine.of("4.0").items()} == {0: BOTH, 1: BOTH}
    assert float(states[2].models[0].vector[0]) == pytest.approx(1.44, abs=1e-5)  # client 0's alone
    # In round 4 from 1.44: client 1 goes to 1.44 + 0.2·8.56 = 3.152, then 3.152 + 0.2·6.848.
    assert float(engine.engine.of("5.0")[1].sent["model"].vector[0]) == pytest.approx(
        4.5216, abs=1e-5
    )
    # Client 1 misses round 4 instead: in round 5 it gets layer a's last mean, which client 0 has.
    _, _, _, engine = played(5, tmp_path / "b", engine=missing(1, "4.0"), targets=SHAPES)
    assert {c: s.down["0"] for c, s in engine.engine.of("5.0").items()} == {0: B, 1: BOTH}
    # From 2.44 to 2.44 + 0.2·7.56.
    assert float(engine.engine.of("5.0")[1].sent["model"].vector[0]) == pytest.approx(
        3.952, abs=1e-5
    )


def test_a_client_that_sits_out_many_rounds(tmp_path):
    def cohort(number):
        return [0, 1] if number in (0, 1, 2, 6) else [0]

    _, states, _, engine = played(7, tmp_path, cohort=cohort, targets=SHAPES)
    back = engine.of("7.0")
    # The last full round was the fifth, by client 0 alone; client 1 was there last in the third.
    assert {c: s.down["0"] for c, s in back.items()} == {0: B, 1: BOTH}
    a = float(states[5].models[0].vector[0])
    assert float(back[1].sent["model"].vector[0]) == pytest.approx(a + 0.2 * (10 - a), abs=1e-5)


def test_nothing_is_lost_when_nobody_answers(tmp_path):
    def mute(plan):
        return Faulty(Spy(plan), lose_reply=lambda c, o: o in ("3.0", "4.0"))

    _, states, _, engine = played(6, tmp_path, engine=mute, targets=SHAPES)
    for state in states[2:4]:
        assert torch.equal(state.models[0].vector, states[1].models[0].vector)
    assert {s.down["0"] for s in engine.engine.of("5.0").values()} == {BOTH}


# --- the measure ---------------------------------------------------------------------------------


def test_discrepancy_by_hand():
    layout = linears((1, 2), (2, 1))  # layer 0: two weights and two biases; layer 1: two and one
    sent = weights(layout, 1, 3, 2, 5, 7, 7, 7)
    received = weights(layout, 5, 3, 1, 1, 0, 1, 2)
    # Layer 0: (0, 1/2, 1/4, 1) and (1, 1/2, 0, 0): (1 + 0 + 1/4 + 1)/4. Layer 1: a constant is
    # scaled to zeros, (0, 0, 0) and (0, 1/2, 1): 1.5/3.
    assert discrepancy(sent, received) == pytest.approx({"0": 2.25 / 4, "1": 0.5})
    assert discrepancy(sent, sent) == {"0": 0.0, "1": 0.0}
    # Weight and bias are scaled together: each by itself would give (1, 0), (1, 0) and 1 for all.


def test_only_layers_below_the_share_of_the_mean_are_quiet(tmp_path):
    # D_a = 0 and D_b = 0.5, mean 0.25. A layer at the bound is not below it.
    for share, quiet in ((0.0, []), (1e-6, ["a"]), (1.0, ["a"])):
        _, states, _, _ = played(2, tmp_path / str(share), paced(share=share))
        assert states[-1].notes["layers"]["quiet"] == {"0": quiet}
    # Where both are the same, no layer is below the mean: nothing rests. Here both are zero.
    same = [[1.0, 0.0, 5.0], [3.0, 0.0, 4.0]]
    _, states, _, _ = played(3, tmp_path / "same", targets=same)
    assert states[-1].notes["layers"]["discrepancy"] == {"0": {"a": 0.0, "b": 0.0}}
    assert states[-1].notes["layers"]["quiet"] == {"0": []}


def test_what_is_quiet_is_judged_anew_in_full_rounds(tmp_path):
    """The clients come to agree about layer b, and layer b is then as quiet as layer a."""
    _, states, _, _ = played(16, tmp_path)
    quiet = [s.notes["layers"]["quiet"]["0"] for s in states[1:]]
    assert quiet[0] == ["a"]
    # From 1.2 > 1.6·(1 − 0.8ʳ) no longer, r ≥ 7, client 1's layer b rises too: D_b = 0 = D_a.
    assert quiet[-1] == []
    changes = [i for i in range(1, len(quiet)) if quiet[i] != quiet[i - 1]]
    assert len(changes) == 1
    assert states[changes[0] + 1].notes["layers"]["discrepancy"] == {"0": {"a": 0.0, "b": 0.0}}


def test_parameters_that_make_no_sense():
    for wrong in ({"alpha": 0}, {"start": 0}, {"share": -0.1}, {"share": 1.1}):
        with pytest.raises(ConfigError, match="layer-wise aggregation"):
            coterie.layer_wise(coterie.fedavg(), **wrong)


# --- with other methods --------------------------------------------------------------------------

INNER = {
    "fedper": lambda: coterie.fedper(k=1),
    "ifca": lambda: coterie.ifca(k=2),
    "user-centric": lambda: coterie.user_centric(streams=2),
    "user-centric all": coterie.user_centric,
    "fedclust": lambda: coterie.fedclust(clusters=2, warmup_epochs=1),
}


def three_layers(population):
    from coterie.models import make_model

    return lambda: make_model("mlp", population.shape, population.targets, hidden=(12, 8))


@pytest.mark.parametrize("name", INNER)
def test_any_averaging_method_can_use_it(name, tmp_path):
    people = digits(clients=6)
    settings = {"rounds": 6, "cohort": 0.7, "evaluate_every": 0}
    made, plain = (
        experiment(m, people, model=three_layers(people), settings=settings)
        for m in (coterie.layer_wise(INNER[name](), 3, share=1.0, start=2), INNER[name]())
    )
    whole = execute(made, tmp_path / "whole")
    quiet = [any(e["notes"]["layers"]["quiet"].values()) for e in whole.history]
    assert any(quiet[1:3])
    for layers in (e["notes"]["layers"] for e in whole.history):
        for slot, gaps in layers.get("discrepancy", {}).items():
            mean = sum(gaps.values()) / len(gaps)
            assert layers["quiet"][slot] == sorted(y for y, d in gaps.items() if d < mean)
    assert whole.summary["bytes"]["up"] < drive(plain, tmp_path / "plain")[1].state.ledger.total.up
    with pytest.raises(Stop):  # in a round in which layers rest
        execute(made, tmp_path / "parts", watch=stop_after(4))
    parts = execute(made, tmp_path / "parts", resume=True)
    for client in range(6):
        assert torch.equal(whole.weights(client).vector, parts.weights(client).vector)


@pytest.mark.parametrize("name", ["user-centric", "user-centric all", "fedclust"])
def test_clients_of_every_group_are_spared_the_layers_they_have(name, tmp_path):
    """Also where a reply goes into the means of many groups: its own is the one it started from."""
    targets = [*SHAPES, [20.0, 9.0, 1.0, 4.0], [9.0, 5.0, 8.0, 1.0]]
    method = coterie.layer_wise(INNER[name](), 2, share=0.5, start=1)
    _, states, _, engine = played(5, tmp_path, method, targets=targets, spread=9.0)
    assert len(set(states[-1].groups.values())) > 1
    for number, way in ((4, (BOTH, B)), (5, (B, BOTH))):
        for seen in engine.of(f"{number}.0").values():
            ((_, down),) = seen.down.items()
            assert (down, seen.up["model"]) == way


@pytest.mark.parametrize("name", [*INNER, "fedavg"])
def test_with_nothing_quiet_it_is_the_method_itself(name, tmp_path):
    inner = INNER.get(name, coterie.fedavg)()
    made = [
        experiment(m, settings={"rounds": 4, "cohort": 0.5})
        for m in (inner, coterie.layer_wise(inner, 2, share=0.0, start=1))
    ]
    ends = [drive(m, tmp_path / str(i)) for i, m in enumerate(made)]
    assert same_bits(*[models(m, e[0], e[1]) for m, e in zip(made, ends, strict=True)])


@pytest.mark.parametrize("streams", [1, 2])
def test_an_upload_is_compared_with_no_other_streams_mean(streams, tmp_path):
    """In parallel streams the last upload went into another mean: there is nothing to measure."""
    inner = coterie.user_centric(streams=streams, parallel=True)
    method = coterie.layer_wise(inner, 2, share=0.95, start=1)
    _, _, engine = drive(experiment(method), tmp_path, Spy, rounds=3)
    told = {k for s in engine.seen for k in s.metrics if KEY in k}
    assert told == ({f"{KEY}.hidden1", f"{KEY}.head"} if streams == 1 else set())


def test_ifca_compares_an_upload_with_the_mean_it_went_into(tmp_path):
    """Two models come down; a client that changes sides has nothing to compare."""
    method = coterie.layer_wise(coterie.ifca(k=2), 2, share=0.0, start=1)
    made = experiment(method, settings={"rounds": 4})
    channel, engine, plan = opened(made, tmp_path)
    state = method.init(channel, made.setup(plan.start))
    measured = 0
    for number in range(4):
        channel.begin(number)
        means, state = (
            state.models,
            method.round(channel, replace(state, notes={}), Round(number, range(6))),
        )
        for client, seen in engine.of(f"{number + 1}.0").items():
            told = {k.removeprefix(f"{KEY}."): v for k, v in seen.metrics.items() if KEY in k}
            last = engine.of(f"{number}.0").get(client)
            if last is None or last.metrics["slot"] != seen.metrics["slot"]:
                assert not told
            else:
                mean = means[int(seen.metrics["slot"])]
                assert told == pytest.approx(discrepancy(last.sent["model"], mean))
                measured += 1
    assert measured


def test_it_travels_by_name_with_its_pace(tmp_path, monkeypatch):
    """Workers that share no memory make the method again: the paced one, not the one inside."""
    method = coterie.layer_wise(coterie.fedavg(), 2, share=0.95, start=1)
    made = experiment(method, settings={"rounds": 5})
    start = made.plan(tmp_path).start
    again = method.source.make()
    assert (again.name, sorted(again.tasks)) == (method.name, sorted(method.tasks))
    results = [
        drive(replace(made, method=m), tmp_path / str(i)) for i, m in enumerate((method, again))
    ]
    assert results[0][1].state.ledger.total == results[1][1].state.ledger.total
    assert same_bits(*[models(made, s, d) for s, d, _ in results])
    others = [
        coterie.fedavg(),
        coterie.layer_wise(coterie.fedavg(), 3, share=0.95, start=1),
        coterie.layer_wise(coterie.fedavg(), 2, share=0.9, start=1),
        coterie.layer_wise(coterie.fedprox(), 2, share=0.95, start=1),
    ]
    prints = {replace(made, method=m).fingerprint(start) for m in (method, *others)}
    assert len(prints) == 5  # none of them may continue another's run


def test_auto_cannot_tell_from_no_discrepancies_and_keeps_what_it_has_decided():
    sizes = {"a": 10, "b": 80, "c": 10}
    assert quiet_layers(dict.fromkeys(sizes, 0.0), sizes, None, "auto") is None
    assert quiet_layers(dict.fromkeys(sizes, 0.2), sizes, None, "auto") == []
    assert quiet_layers({"a": 0.1, "b": 0.2, "c": 0.3}, sizes, ["b"], "auto") == ["b"]
    assert quiet_layers({"b": 0.2}, sizes, None, "auto") == []
    assert quiet_layers({"a": 0.3, "b": 0.9, "c": 0.1}, sizes, None, "auto") == ["b", "c"]
