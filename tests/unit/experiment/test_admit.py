"""Newcomers: held out by a run and let in at its end, or admitted to a run that is over."""

import copy
import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.client import Schedule
from coterie.core.messages import Order, Upload
from coterie.core.method import State
from coterie.core.weights import Weights
from coterie.data import ClientData, Split, build_population, load
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, DataError, TrainingError
from coterie.experiment.admit import admit_client
from coterie.experiment.experiment import ENGINES, Experiment, Settings, execute
from coterie.experiment.session import RunSession
from coterie.methods import METHODS, make
from coterie.report.tables import newcomer_lines
from coterie.results.rundir import RunDir
from faulty import Faulty
from support import (
    Constant,
    Stop,
    digits,
    experiment,
    on_quadratics,
    quadratics,
    stop_after,
)

SOME = {
    "local": {},
    "fedavg": {},
    "fedper": {},
    "ifca": {"k": 2},
    "fedclust": {},
    "user-centric": {},
    "user-centric streams": {"streams": 2},
    "dc-pfl": {"start": 1},
    "fedtsdp": {},
}
HELD = [name for name in SOME if name.split()[0] in METHODS]


def made(name):
    return make(name.split()[0], SOME[name])


def settled(result):
    """All that a run says at its end, but for the time it took."""
    said = {k: v for k, v in result.summary.items() if not k.endswith("seconds")}
    events = [{k: v for k, v in e.items() if k != "seconds"} for e in result.history]
    return said, events, list(result.clients)


def written(folder):
    """What its files say, but for times."""
    events = RunDir(folder).read_events()
    for event in events:
        event.pop("seconds", None)
    return events, (folder / "clients.csv").read_text()


def public_digits(clients=6):
    return build_population(
        load("digits"), clients=clients, partition="iid", shift="rotation",
        shift_params={"groups": 2}, samples=400, public=40,
    )  # fmt: skip


def one(targets, held=None):
    """A client of quadratics."""
    return quadratics([targets]).clients[0] if held is None else ClientData(
        quadratics([targets]).clients[0].train, *[quadratics([[held]]).clients[0].test] * 2
    )  # fmt: skip


def constant(result, value):
    return Weights(result.plan.start.layout, torch.tensor([value]))


# --- held out by a run ---------------------------------------------------------------------------


def test_who_is_held_out_depends_on_the_seed_alone():
    people = digits(clients=6)
    drawn = [
        experiment(method, people, settings={"holdout": 2, "seed": seed}).newcomers
        for method in (coterie.fedavg(), coterie.ifca(k=2))
        for seed in range(8)
    ]
    assert drawn[:8] == drawn[8:]
    assert len({tuple(d) for d in drawn}) > 3
    assert all(len(set(d)) == 2 and d == sorted(d) for d in drawn)
    with_two = experiment(coterie.fedavg(), people, settings={"holdout": 2})
    without = experiment(coterie.fedavg(), people)
    start = without.plan(None).start
    assert with_two.fingerprint(start) != without.fingerprint(start)


@pytest.mark.parametrize("name", HELD)
def test_newcomers_take_no_part_before_the_end(name, tmp_path):
    rounds = {"rounds": 4, "holdout": 2, "cohort": 0.5}
    result = execute(experiment(made(name), public_digits(), settings=rounds), tmp_path / "r")
    events = [json.loads(x) for x in (tmp_path / "r/events.jsonl").read_text().splitlines()]
    *before, end = events
    came = result.summary["newcomers"]
    assert end["event"] == "admission"
    assert (
        end["clients"] == came["clients"] == [r["client"] for r in result.clients if r["newcomer"]]
    )
    assert len(came["clients"]) == 2
    for event in before:
        assert not set(event.get("cohort", [])) & set(came["clients"])
        assert len(event["groups"]) == 6
        assert all(event["groups"][c] is None for c in came["clients"])
    rows = [result.clients[c] for c in came["clients"]]
    assert sum(r["bytes_down"] for r in rows) == came["bytes"]["down"]
    assert sum(r["bytes_up"] for r in rows) == came["bytes"]["up"]
    members = [r for r in result.clients if not r["newcomer"]]
    spent = result.summary["bytes"]
    assert sum(r["bytes_down"] for r in members) == spent["down"]  # newcomers' are not in it
    assert result.summary["received"]["accuracy"] == pytest.approx(
        np.mean([r["received_accuracy"] for r in members])
    )
    for title in ("received", "adapted"):
        assert came[title]["accuracy"] == pytest.approx(
            np.mean([r[f"{title}_accuracy"] for r in rows])
        )
    assert (
        came["groups"] == [r["group"] for r in rows] == [result.groups[c] for c in came["clients"]]
    )


def test_no_column_for_newcomers_without_any():
    result = execute(experiment(coterie.fedavg(), settings={"rounds": 1}))
    assert "newcomer" not in result.clients[0]
    assert "newcomers" not in result.summary
    assert newcomer_lines(None, "accuracy") == []


def test_newcomers_adapt_for_their_own_number_of_epochs():
    # θ is 5 for good (members at 0 and 10): a newcomer is at distance d, then 0.8⁵ of that.
    targets = [[0.0], [10.0], [25.0], [5.0]]
    for epochs in (5, 1, 0):
        settings = {"rounds": 2, "holdout": 2, "seed": 3, "admit_epochs": epochs, "adapt_epochs": 3}
        run = on_quadratics(coterie.fedavg(), targets, start=5.0, settings=settings)
        assert run.members == [0, 1]
        row = execute(run).clients[2]
        assert row["received_mae"] == pytest.approx(20.0, abs=1e-4)
        assert row["adapted_mae"] == pytest.approx(20 * 0.8**epochs, abs=1e-4)


def test_a_fedavg_newcomer_receives_the_bits_of_the_global_model():
    run = experiment(coterie.fedavg(), settings={"rounds": 3, "holdout": 2})
    result = execute(run)
    theta = result.state.models[0].vector
    assert not torch.equal(theta, result.plan.start.vector)
    for client in run.newcomers:
        assert torch.equal(result.weights(client).vector, theta)
    other = execute(experiment(coterie.fedavg(), settings={"rounds": 3}))
    assert not torch.equal(theta, other.state.models[0].vector)  # their data made no difference


def test_an_ifca_newcomer_joins_the_model_with_the_lowest_training_loss(tmp_path):
    made = on_quadratics(coterie.fedavg(), [[0.0], [10.0]], settings={"rounds": 1})
    result = execute(made)
    planted = State({0: constant(result, 0.0), 1: constant(result, 10.0)}, {0: 0, 1: 1})
    run = replace(result, state=planted, plan=replace(result.plan, method=coterie.ifca(k=2)))
    for targets, held, group in (([9.0, 7.0], 0.0, 1), ([9.0, 0.5], 10.0, 0), ([2.0], 10.0, 0)):
        found = admit_client(run, one(targets, held), epochs=2)
        assert found.group == group
        assert found.received["mae"] == pytest.approx(abs(10.0 * group - held), abs=1e-5)
        mean, start = np.mean(targets), 10.0 * group
        assert float(found.weights.vector) == pytest.approx(mean + 0.64 * (start - mean), abs=1e-5)


def test_ifca_newcomers_held_out_by_a_run_choose_too():
    def drawn():
        return Constant(float(torch.randn(()) * 5))

    targets = [[-4.0], [6.0], [-5.0], [7.0], [-6.0], [5.0], [6.5], [-4.5]]
    run = Experiment(
        quadratics(targets), drawn, coterie.ifca(k=2), nn.functional.mse_loss,
        Schedule(batch_size=10, lr=0.1), Settings(rounds=3, engine="loop", holdout=3, seed=3),
    )  # fmt: skip
    result = execute(run)
    models = {s: float(w.vector) for s, w in result.state.models.items()}
    chosen = {c: min(models, key=lambda s: abs(models[s] - targets[c][0])) for c in run.newcomers}
    assert {c: result.groups[c] for c in run.newcomers} == chosen
    assert set(chosen.values()) == {0, 1}


def test_a_user_centric_newcomer_has_the_softmax_blend_of_all_models():
    # Targets a ± δ: at θ⁰ the gradient is 2(θ⁰ − a) and each one-sample batch is 2δ away from it,
    # so σ = 2δ and w_nj ∝ n_j exp(−(a_n − a_j)² / (2δ²)).
    centres, counts, delta = [0.0, 1.0, 3.0, 0.5, 2.0], [2, 4, 2, 6, 2], 1.5
    targets = [
        [a + delta * (-1) ** i for i in range(n)] for a, n in zip(centres, counts, strict=True)
    ]
    settings = {"rounds": 3, "holdout": 2, "seed": 1}
    run = on_quadratics(METHODS["user-centric"](variance_batch=1), targets, settings=settings)
    result = execute(run)
    theirs = {c: float(result.state.models[c].vector) for c in run.members}
    assert len(set(theirs.values())) == 3
    for client in run.newcomers:
        shares = np.array(
            [
                counts[c] * np.exp(-((centres[client] - centres[c]) ** 2) / (2 * delta**2))
                for c in run.members
            ]
        )
        wanted = float(shares / shares.sum() @ list(theirs.values()))
        assert float(result.weights(client).vector) == pytest.approx(wanted, abs=1e-5)
        assert result.groups[client] == client


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "loop") for name in ("fedavg", "fedclust", "user-centric", "ifca")),
        *((name, "pool") for name in ("fedclust", "user-centric")),
    ],
)
def test_engines_and_resumed_runs_agree_about_newcomers(name, engine, tmp_path):
    settings = {"rounds": 3, "holdout": 2, "cohort": 0.5}
    whole = execute(experiment(made(name), settings=settings), tmp_path / "whole")
    run = experiment(made(name), settings={**settings, "engine": engine, "workers": 2})
    with pytest.raises(Stop):
        execute(run, tmp_path / "parts", watch=stop_after(2))
    for _ in range(2):  # the second time it is finished already
        again = execute(run, tmp_path / "parts", resume=True)
        assert settled(again) == settled(whole)
        assert written(tmp_path / "parts") == written(tmp_path / "whole")
        for client in run.newcomers:
            assert torch.equal(again.weights(client).vector, whole.weights(client).vector)


def counting():
    """FedAvg whose newcomers keep count of how often they were asked to join."""

    def ask(client, arrays, config):
        client.state["asked"] = float(client.state.get("asked", 0.0)) + 1
        return Upload(metrics={"asked": client.state["asked"]})

    def admit(fed, state, info):
        replies = fed.gather([Order(c, "ask") for c in info.cohort])
        asked = {r.client: r.metrics["asked"] for r in replies}
        return replace(state.joined(dict.fromkeys(asked, 0)), notes={"asked": asked})

    base = coterie.fedavg()
    return replace(base, tasks={**base.tasks, "ask": ask}, admit=admit)


def test_an_admission_that_is_broken_off_is_done_again_in_the_same_way(tmp_path, monkeypatch):
    run = experiment(counting(), settings={"rounds": 2, "holdout": 2})
    whole = execute(run, tmp_path / "whole")
    scores = RunSession.scores

    def broken(session, epochs=0, clients=None):
        if clients is not None:
            raise Stop
        return scores(session, epochs, clients)

    monkeypatch.setattr(RunSession, "scores", broken)
    with pytest.raises(Stop):
        execute(run, tmp_path / "parts")
    monkeypatch.undo()
    again = execute(run, tmp_path / "parts", resume=True)
    assert settled(again) == settled(whole)
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    # More rounds begin without the newcomers, who then join once, not twice.
    longer = experiment(counting(), settings={"rounds": 4, "holdout": 2})
    more = execute(longer, tmp_path / "parts", resume=True)
    assert settled(more) == settled(execute(longer, tmp_path / "long"))
    event = written(tmp_path / "parts")[0][-1]
    assert event["notes"]["asked"] == {str(c): 1.0 for c in run.newcomers}


@pytest.mark.parametrize("lost", [1, 2])
def test_who_does_not_answer_stays_outside(lost, monkeypatch, tmp_path):
    run = experiment(METHODS["fedclust"](clusters=2), settings={"rounds": 1, "holdout": 2})
    silent = run.newcomers[:lost]
    monkeypatch.setitem(
        ENGINES, "loop",
        lambda plan, _: Faulty(
            Loop(plan), lose_reply=lambda c, order: order == "admit.0" and c in silent
        ),
    )  # fmt: skip
    result = execute(run, tmp_path / "r")
    came = result.summary["newcomers"]
    assert came["unanswered"] == silent
    assert came["clients"] == run.newcomers[lost:]
    assert result.summary["lost"] == lost
    for client in silent:
        row = result.clients[client]
        assert (row["newcomer"], row["group"], row["received_accuracy"]) == (1, "", "")
        with pytest.raises(ConfigError, match=f"client {client} was held out"):
            result.weights(client)
    lines = newcomer_lines(came, "accuracy")
    assert lines[-1].strip() == f"{lost} did not answer: {', '.join(map(str, silent))}"
    assert ("not scored" in lines[0]) == (lost == 2)


def test_what_cannot_be_held_out_is_refused_before_anything_is_written(tmp_path):
    closed = replace(coterie.fedavg(), name="closed", admit=None)
    with pytest.raises(ConfigError, match="method closed has no way to admit newcomers"):
        execute(experiment(closed, settings={"holdout": 1}), tmp_path / "r")
    for count in (6, 7):
        with pytest.raises(ConfigError, match=f"run.holdout = {count} leaves none of 6 clients"):
            execute(experiment(coterie.fedavg(), settings={"holdout": count}), tmp_path / "r")
    with pytest.raises(ConfigError, match=r"run\.cohort = 5 means 5 of 4"):
        execute(experiment(coterie.fedavg(), settings={"holdout": 2, "cohort": 5}), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    execute(experiment(closed, settings={"rounds": 1}))  # nobody is held out: nothing to refuse


def test_the_lines_about_newcomers():
    scores = {"accuracy": 0.5}
    came = {
        "clients": [1, 2, 5], "unanswered": [], "groups": [0, 2, 2], "epochs": 1,
        "received": scores, "adapted": {"accuracy": 0.875}, "bytes": {"down": 2500, "up": 10},
    }  # fmt: skip
    first, second = newcomer_lines(came, "accuracy")
    assert "50.0 % received, 87.5 % adapted after 1 epoch " in first
    assert "2.50 kB down, 10 B up to join" in first
    assert second.strip() == "3 joined: 2 in group 2, 1 in group 0"
    alone = newcomer_lines({**came, "groups": [1, 2, 5]}, "accuracy")
    assert alone[1].strip() == "3 joined: each in a group of its own"


# --- admitted to a run that is over --------------------------------------------------------------


@pytest.mark.parametrize("name", HELD)
def test_to_be_admitted_is_what_it_is_to_be_held_out(name, monkeypatch, tmp_path):
    """The last client joins a run without it, or one that held it out: the same scores and bits."""
    everybody = public_digits(7)
    without = replace(everybody, clients=everybody.clients[:6], groups=everybody.groups[:6])
    settings = {"rounds": 3, "admit_epochs": 4, "cohort": 0.5}
    schedule = {"lr_decay": 0.7}
    before = execute(
        experiment(made(name), without, settings=settings, schedule=schedule), tmp_path / "r"
    )
    data = everybody.clients[6]
    found = admit_client(before, data, epochs=4)
    monkeypatch.setattr(Experiment, "newcomers", [6])
    held = execute(experiment(made(name), everybody, settings=settings, schedule=schedule))
    row = held.clients[6]
    for title in ("received", "adapted"):
        scores = getattr(found, title)
        assert {f"{title}_{k}": v for k, v in scores.items()} == {
            k: v for k, v in row.items() if k.startswith(f"{title}_")
        }
    assert found.adapted["loss"] != found.received["loss"]
    assert str(found.group) == str(held.groups[6])
    assert (found.bytes.down, found.bytes.up) == (row["bytes_down"], row["bytes_up"])
    assert found.samples == {k: row[k] for k in ("train", "val", "test")}
    received = admit_client(before, data, epochs=0)
    assert torch.equal(received.weights.vector, held.weights(6).vector)
    assert received.received == received.adapted == found.received
    # The adapted weights are those that were scored.
    module = copy.deepcopy(held.plan.module).eval()
    module.load_state_dict(found.weights.tensors())
    loss = nn.functional.cross_entropy(module(data.test.x / 127.5 - 1), data.test.y)
    assert loss.item() == pytest.approx(found.adapted["loss"], rel=1e-6)


def asking_members():
    """FedPer where a newcomer's group depends on what member 0 keeps, which is then changed."""

    def look(client, arrays, config):
        own = client.kept("own")
        client.state["seen"] = 1.0
        return Upload(metrics={"sum": float(own.vector.sum())})

    def admit(fed, state, info):
        (reply,) = fed.gather([Order(0, "look")])
        return replace(state.joined(dict.fromkeys(info.cohort, 0)), notes={"sum": reply.metrics})

    base = coterie.fedper()
    return replace(base, tasks={**base.tasks, "look": look}, admit=admit)


def tree(folder):
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files
    }


def test_members_may_be_asked_and_still_keep_what_they_had(tmp_path):
    people = digits(clients=4)
    result = execute(experiment(asking_members(), people), tmp_path / "r")
    assert list((tmp_path / "r/clients/0").iterdir())
    before = tree(tmp_path)
    for _ in range(2):
        assert admit_client(result, people.clients[1], epochs=1).group == 0
    assert tree(tmp_path) == before


def test_the_method_gets_the_public_samples():
    people, seen = public_digits(), []

    def admit(fed, state, info):
        seen.append((info.number, list(info.cohort), info.public))
        return state.joined(dict.fromkeys(info.cohort, 0))

    result = execute(experiment(replace(coterie.fedavg(), admit=admit), people))
    admit_client(result, people.clients[0], epochs=0)
    ((number, cohort, public),) = seen
    assert (number, cohort) == (3, [6])
    assert torch.equal(public.x, people.public)
    assert torch.equal(
        public.outputs(result.state.models[0], public.x), result.predict(0, people.public)
    )


def test_what_cannot_be_admitted():
    people = digits(clients=4)
    result = execute(experiment(coterie.fedavg(), people, settings={"rounds": 1}))
    data = people.clients[0]

    def through(**changes):
        return replace(
            result, plan=replace(result.plan, method=replace(coterie.fedavg(), **changes))
        )

    with pytest.raises(ConfigError, match="method fedavg has no way to admit newcomers"):
        admit_client(through(admit=None), data)
    with pytest.raises(TrainingError, match="not assigned to a group"):
        admit_client(through(admit=lambda fed, state, info: state), data)
    with pytest.raises(ConfigError, match="epochs = -1: give 0 or more"):
        admit_client(result, data, epochs=-1)
    flat = Split(data.train.x.flatten(1), data.train.y)
    with pytest.raises(DataError, match=r"uint8 of shape \(64,\), the run's"):
        admit_client(result, replace(data, train=flat))
    oracle = execute(experiment(coterie.oracle(), people, settings={"rounds": 1}))
    with pytest.raises(
        ConfigError, match="oracle cannot admit client 4: its true group is unknown"
    ):
        admit_client(oracle, data)


def test_fedclust_newcomers_join_their_own_kind():
    people = digits(clients=12, groups=2, samples=1700)
    run = experiment(
        METHODS["fedclust"](warmup_epochs=10), people, settings={"rounds": 3, "holdout": 4},
        schedule={"lr_decay": 0.01},  # whoever comes late must warm up at the first round's rate
    )  # fmt: skip
    result = execute(run)
    kinds = {c: people.groups[c] for c in range(12)}
    assert {kinds[c] for c in run.newcomers} == {0, 1}
    home = {(kinds[c], result.groups[c]) for c in run.members}
    assert len(home) == 2  # it found the two kinds
    assert {(kinds[c], result.groups[c]) for c in run.newcomers} == home
    for client in run.newcomers:
        again = admit_client(result, people.clients[client], epochs=0)
        assert again.group == result.groups[client]
