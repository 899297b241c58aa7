"""Methods from pieces: what a part brings, what is refused, what the wrappers leave alone."""

import itertools
import re

import pytest
import torch

import coterie
from coterie.compose.assign import Assign
from coterie.compose.grouped import Pieces, combined, grouped
from coterie.compose.local import Local, minimise
from coterie.core.messages import Upload
from coterie.core.method import Round, State
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.methods import make
from coterie.models import make_model
from scripted import Scripted, linears, setup, weights
from support import digits, drive, experiment, models, on_quadratics, same_bits

WHOLE = ["median", "trimmed-mean", "krum", "fedavgm", "fedadam", "fedyogi", "dc-pfl", "fedtsdp"]
WHOLE += ["scaffold", "feddyn", "fednova", "fedfomo", "cfl", "adaptive-tau"]


def result(made, folder):
    state, channel, _ = drive(made, folder)
    return models(made, state, channel)


@pytest.mark.parametrize(
    ("joined", "parameters", "direct"),
    [
        ("fedavg+fedprox", {"mu": 0.3}, lambda: coterie.fedprox(mu=0.3)),
        ("fedprox+fedavg", {"mu": 0.3}, lambda: coterie.fedprox(mu=0.3)),
        ("ifca+fedavg", {"k": 2}, lambda: coterie.ifca(k=2)),
        ("fedper+local", {"k": 1}, coterie.local),
        ("fedavg+median", {}, coterie.median),
    ],
)
def test_fedavg_adds_nothing_to_another_part(joined, parameters, direct, tmp_path):
    if joined == "fedper+local":  # both say which layers are shared
        with pytest.raises(ConfigError, match="both say which layers are shared"):
            make(joined, parameters)
        return
    one = result(experiment(make(joined, parameters)), tmp_path / "a")
    two = result(experiment(direct()), tmp_path / "b")
    assert same_bits(one, two)


def test_each_part_brings_its_own_piece(tmp_path):
    # IFCA with k = 1 is FedAvg, so joined with FedProx over all but the last layer it is the
    # composition written out; and both pieces matter.
    joined = make("ifca+fedprox+fedper", {"ifca.k": 1, "fedper.k": 1, "mu": 0.5})
    written = grouped(
        "written", train=minimise(coterie.proximal(0.5)), shared=coterie.all_but_last(1)
    )
    assert same_bits(
        result(experiment(joined), tmp_path / "a"), result(experiment(written), tmp_path / "b")
    )
    without = make("ifca+fedper", {"ifca.k": 1, "fedper.k": 1})
    assert not same_bits(
        result(experiment(joined), tmp_path / "c"), result(experiment(without), tmp_path / "d")
    )


def test_a_joined_method_travels_by_name():
    made = make("ifca+fedprox", {"k": 3, "mu": 0.2})
    again = made.source.make()
    assert (again.name, again.source) == (made.name, made.source)
    assert make("ifca+fedprox", {"k": 3}, layer_interval=2).source.make().name == "ifca+fedprox"


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("ifca+fedclust", {"k": 2}, "ifca and fedclust both say who learns together"),
        ("fedadam+median", {}, "fedadam and median both say what wraps the method"),
        ("ifca+fedper", {"k": 2}, "write ifca.k or fedper.k"),
        ("ifca+fedprox", {"nu": 2}, "unknown parameter of method ifca.fedprox 'nu'"),
        ("ifca+fedprox", {"ifca.n": 2}, "unknown parameter of method ifca 'n'"),
        ("ifca+ifca", {"k": 2}, "write each part once"),
        ("ifca+", {"k": 2}, "write each part once"),
        ("ifca+nobody", {"k": 2}, "unknown method 'nobody'"),
        ("fedfomo+median", {}, "computes no mean"),
        ("fedfomo+fedadam", {}, "computes no mean"),
        ("user-centric+median", {}, "mixes models with weights: no robust mean"),
        ("local+krum", {}, "shares nothing: no robust mean"),
        ("local+fedavgm", {}, "shares nothing: no server optimizer"),
        ("fedtsdp+fedavgm", {}, "renumbers its clusters"),
        ("dc-pfl+fedadam", {}, "skips layers in some rounds, which an optimizer's step would"),
        ("ditto", {"lam": float("inf")}, "lam = inf: must be a finite number"),
        ("dc-pfl+fedprox", {}, "dc-pfl has an exchange of its own"),
        ("dc-pfl+fedtsdp", {}, "exchange of its own"),
        ("ifca+fedprox", {"k": 2, "mu": -1.0}, "mu = -1.0: must be at least 0"),
    ],
)
def test_what_does_not_go_together_is_refused(name, parameters, words):
    with pytest.raises(ConfigError, match=words):
        make(name, parameters)


def test_parameters_can_be_a_table_of_each_part():
    made = make("ifca+fedper", {"ifca": {"k": 3}, "fedper": {"k": 2}})
    assert made.source.parameters["parameters"] == {"ifca": {"k": 3}, "fedper": {"k": 2}}
    assert len(made.init(None, setup(weights(linears((1, 1)), 0, 0), range(4))).models) == 3


def test_all_pairs_of_parts_either_run_or_are_refused(tmp_path):
    """A grouping rule, an objective, a choice of layers and a server, from different methods."""
    names = ["ifca", "fedclust", "fedprox", "fedper", "fedadam", "median", "oracle", "fedavgm"]
    given = {"ifca": {"k": 2}, "fedclust": {"clusters": 2, "warmup_epochs": 1}}
    refused = set()
    for a, b in itertools.combinations(names, 2):
        try:
            made = make(f"{a}+{b}", {n: given[n] for n in (a, b) if n in given})
        except ConfigError:
            refused.add((a, b))
            continue
        people = digits(clients=4, samples=120)
        result(experiment(made, people, settings={"rounds": 1}), tmp_path / f"{a}-{b}")
    rules, servers = {"ifca", "fedclust", "oracle"}, {"fedadam", "median", "fedavgm"}
    assert refused == {
        p for p in itertools.combinations(names, 2) if set(p) <= rules or set(p) <= servers
    }


@pytest.mark.parametrize("name", [*WHOLE, "cfl+ditto", "ditto+median"])
def test_layers_do_not_rest_where_the_server_needs_them_all(name):
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} .*layer_interval"):
        make(name, layer_interval=2)


def test_a_paced_method_cannot_lose_its_pace_by_being_taken_apart():
    paced = coterie.layer_wise(coterie.ifca(k=2), 2)
    with pytest.raises(ConfigError, match="exchange of its own"):
        combined("x", {"paced": paced, "fedprox": coterie.fedprox()})


def test_every_other_method_lets_layers_rest(tmp_path):
    """It runs, and where layers rest fewer bytes travel."""
    required = {"ifca": {"k": 1}, "clusterfl": {"k": 2, "every": 99}, "k-fed": {"k": 2}}
    small = {"fedclust": {"clusters": 2, "warmup_epochs": 1}, "fl-hc": {"rounds": 1}}
    small["adaptive"] = {"every": 99, "threshold": -1.0}  # groups of one have nothing to compare
    for name in sorted(set(coterie.METHODS) - set(WHOLE) - {"local"}):
        given = required.get(name) or small.get(name, {})
        moved = []
        for interval in (1, 3):
            made = make(name, given, layer_interval=interval, layer_share=1.0)
            people = digits(clients=4, samples=120)

            def network(people=people):
                return make_model("mlp", people.shape, people.targets, hidden=(12, 8))

            setting = experiment(made, people, model=network, settings={"rounds": 8})
            _, channel, _ = drive(setting, tmp_path / f"{name}-{interval}")
            moved.append(channel.state.ledger.total.down + channel.state.ledger.total.up)
        assert moved[1] < moved[0], name


def test_a_newcomer_that_is_offered_nothing_is_admitted(tmp_path):
    """All layers personal: there is no model to pick, and nothing goes wrong."""
    made = make("ifca+fedper", {"ifca.k": 2, "fedper.k": 2})
    outcome = execute(experiment(made, settings={"rounds": 1, "holdout": 1}), tmp_path)
    assert sorted(outcome.groups) == [0, 1, 2, 3, 4, 5]


# --- rules that sort replies ---------------------------------------------------------------------


def sorting(fed, sorts, cohort, looks=lambda state, info: True):
    start = weights(linears((1, 1)), 0, 0)
    rule = Assign(
        lambda _, s: State({0: s.start}, dict.fromkeys(s.clients, 0)), sorts=sorts, looks=looks
    )
    made = grouped("sorting", rule)
    state = made.init(fed, setup(start, range(4)))
    return made.round(fed, state, Round(0, cohort))


def sent(order):
    return Upload({"model": weights(linears((1, 1)), order.client, 0)})


def test_a_rule_sees_replies_and_can_ask_more_clients_to_train():
    seen = []

    def sorts(state, info, replies, more):
        rest = more([c for c in state.groups if c not in info.cohort])
        seen.extend([[r.client for r in replies], [r.client for r in rest]])
        groups = {c: "low" if c < 2 else "high" for c in state.groups}
        return State(dict.fromkeys(("low", "high"), state.models[0]), groups), replies + rest

    fed = Scripted(sent, range(4), examples={0: 1, 1: 3, 2: 1, 3: 1})
    after = sorting(fed, sorts, [1, 3])
    assert seen == [[1, 3], [0, 2]]
    assert [kind for kind, _, _ in fed.asked] == ["gather", "gather"]
    assert after.models["low"].vector[0] == pytest.approx(0.75)  # (0·1 + 1·3)/4
    assert after.models["high"].vector[0] == 2.5


def test_a_rule_that_does_not_look_leaves_the_server_with_means():
    fed = Scripted(sent, range(4))
    after = sorting(fed, None, [0, 1])
    assert [kind for kind, _, _ in fed.asked] == ["reduce"]
    fed = Scripted(sent, range(4))
    same = sorting(
        fed, lambda *_: pytest.fail("it looked"), [0, 1], looks=lambda state, info: False
    )
    assert [kind for kind, _, _ in fed.asked] == ["reduce"]
    assert torch.equal(after.models[0].vector, same.models[0].vector)


def test_what_a_rule_tells_reaches_those_who_train():
    told = []

    def train(client, start):
        told.append(client.told)
        return client.fit(start)

    rule = Assign(coterie.everyone().start, tells=lambda state: {"largest": 7})
    made = on_quadratics(grouped("told", rule, Local(train)), [[1.0], [2.0]])
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        drive(made, Path(folder), rounds=1)
    assert told == [{"largest": 7}] * 2


# --- refusals before anything is trained ----------------------------------------------------------


def test_more_models_than_clients_are_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="k = 7 models for 6 clients"):
        experiment(coterie.ifca(k=7)).plan(tmp_path)
    with pytest.raises(ConfigError, match="k = 7 models for 6 clients"):
        experiment(make("ifca+fedprox", {"k": 7})).plan(tmp_path)
    experiment(coterie.ifca(k=6)).plan(tmp_path)


def test_too_many_personal_layers_are_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="3 personal layers asked for"):
        experiment(coterie.fedper(k=3)).plan(tmp_path)


def test_sharing_frozen_layers_only_is_refused_before_training(tmp_path):
    frozen = experiment(coterie.lg_fedavg(g=1), freeze=("head",))
    with pytest.raises(ConfigError, match=r"the shared layers .head. are frozen"):
        frozen.plan(tmp_path)


def test_lg_fedavg_keeps_a_layer_at_home_unless_told_otherwise(tmp_path):
    start = experiment(coterie.fedavg()).plan(tmp_path).start
    assert start.layout.layers == ("hidden1", "head")

    def sent(made):
        state = made.init(None, setup(start, range(2)))
        return made.sends(state, 0)["0"].layout.layers

    assert sent(coterie.lg_fedavg()) == ("head",)
    assert sent(coterie.lg_fedavg(g=2)) == ("hidden1", "head")


def test_pieces_of_fedavg_are_none():
    assert coterie.fedavg().pieces == Pieces()
