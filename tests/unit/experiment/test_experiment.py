"""The round loop: cohorts, evaluation, checkpoints."""

import json

import pytest
import torch
from torch import nn

import coterie
from coterie.channel.policy import cohort_size
from coterie.core.tree import same
from coterie.errors import ConfigError, RunDirError, TrainingError
from coterie.experiment.experiment import Settings, cohort, execute, reinitialised
from support import Stop, digits, experiment, on_quadratics, stop_after


def test_cohorts_change_from_round_to_round_and_are_all_used():
    settings = Settings(cohort=0.3, seed=4)
    drawn = [cohort(settings, r, range(10)) for r in range(40)]
    assert all(len(set(c)) == 3 and c == sorted(c) for c in drawn)
    assert len({tuple(c) for c in drawn}) > 20
    assert {client for c in drawn for client in c} == set(range(10))
    assert drawn == [cohort(settings, r, range(10)) for r in range(40)]
    assert drawn != [cohort(Settings(cohort=0.3, seed=5), r, range(10)) for r in range(40)]


@pytest.mark.parametrize("asked", [0.01, 11, 2.5e9])
def test_impossible_cohorts_are_refused(asked):
    with pytest.raises(ConfigError, match=r"run\.cohort"):
        cohort_size(asked, 10)


def test_events_after_the_last_checkpoint_are_done_again(tmp_path):
    made = experiment(coterie.fedper(), settings={"rounds": 5, "checkpoint_every": 2})
    whole = execute(made, tmp_path / "whole")
    with pytest.raises(Stop):
        execute(made, tmp_path / "parts", watch=stop_after(3))
    lines = (tmp_path / "parts" / "events.jsonl").read_text().splitlines()
    assert len(lines) == 3
    (tmp_path / "parts" / "events.jsonl").write_text("\n".join(lines) + '\n{"round": 4, "coh')
    resumed = execute(made, tmp_path / "parts", resume=True)
    assert [e["round"] for e in resumed.history] == [1, 2, 3, 4, 5]
    kept = (tmp_path / "parts" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in kept] == [1, 2, 3, 4, 5]
    for client in range(6):
        assert same(whole.weights(client), resumed.weights(client))


def test_the_best_round_is_chosen_on_validation_data():
    result = execute(experiment(coterie.fedavg(), settings={"rounds": 6}))
    values = [e["received"]["val"] for e in result.history]
    best = result.summary["best_on_validation"]
    assert best["val"] == max(values)
    assert best["round"] == values.index(max(values)) + 1
    assert best["received"] == result.history[best["round"] - 1]["received"]


def test_scores_by_hand(tmp_path):
    # θ is 3 after training from 3 with lr so small that it stays; held-out targets are the first.
    made = on_quadratics(
        coterie.fedavg(), [[1.0], [5.0, 5.0]], start=3.0,
        schedule={"lr": 1e-12}, settings={"rounds": 1, "adapt_epochs": 0},
    )  # fmt: skip
    result = execute(made)
    assert result.summary["judged_by"] == "r2"
    assert result.summary["received"]["loss"] == pytest.approx(4.0)
    assert result.summary["received"]["mae"] == pytest.approx(2.0)


def test_received_adapted_and_alone_are_told_apart():
    # One client each at 0 and 10, θ⁰ = 5 and a mean that stays there: received is 5 away, adapted
    # has moved 0.2 of the way, alone has had three rounds: 0.8³ of the distance is left.
    made = on_quadratics(
        coterie.fedavg(), [[0.0], [10.0]], start=5.0, settings={"rounds": 3, "alone": True}
    )
    rows = execute(made).clients
    for row in rows:
        assert row["received_mae"] == pytest.approx(5.0, abs=1e-5)
        assert row["adapted_mae"] == pytest.approx(4.0, abs=1e-5)
        assert row["alone_mae"] == pytest.approx(5 * 0.8**3, abs=1e-5)


def test_adapted_scores_come_every_so_often_when_asked():
    made = experiment(
        coterie.fedavg(), settings={"rounds": 4, "adapt_every": 2, "evaluate_every": 3}
    )
    history = execute(made).history
    assert [e["round"] for e in history if "adapted" in e] == [2, 4]
    assert [e["round"] for e in history if "received" in e] == [3, 4]


def test_scoring_and_adapting_leave_no_trace():
    plain = execute(experiment(coterie.fedper(), settings={"rounds": 3, "evaluate_every": 0}))
    scored = execute(
        experiment(coterie.fedper(), settings={"rounds": 3, "adapt_every": 1, "alone": True})
    )
    for client in range(6):
        assert same(plain.weights(client), scored.weights(client))
    assert plain.summary["bytes"]["up"] == scored.summary["bytes"]["up"]


def test_personal_models_differ_and_export_is_what_is_scored():
    people = digits()
    result = execute(experiment(coterie.fedper(), people))
    for client in (0, 4):
        test = people.clients[client].test
        guess = result.predict(client, test.x).argmax(1)
        accuracy = float((guess == test.y).float().mean())
        assert accuracy == pytest.approx(result.clients[client]["received_accuracy"])
    assert not same(result.weights(0), result.weights(1))
    with pytest.raises(ConfigError, match="there is no client 6; they are 0 to 5"):
        result.weights(6)


def test_clients_that_were_never_sampled_use_what_they_would_receive():
    result = execute(experiment(coterie.ifca(k=2), settings={"rounds": 1, "cohort": 1}))
    assert len(result.groups) == 1
    assert all(row["received_accuracy"] != "" for row in result.clients)


def test_batch_norm_choices(tmp_path):
    def network():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
        )

    models = {}
    for bn in ("shared", "stats-local", "local"):
        result = execute(experiment(coterie.fedavg(), model=network, bn=bn))
        models[bn] = [result.weights(c).tensors() for c in range(2)]
        a, b = models[bn]
        assert torch.equal(a["1.weight"], b["1.weight"])
        assert torch.equal(a["2.running_mean"], b["2.running_mean"]) == (bn == "shared")
        assert torch.equal(a["2.weight"], b["2.weight"]) == (bn != "local")


def test_divergence_names_the_round_and_keeps_what_was_saved(tmp_path):
    made = experiment(coterie.fedavg(), schedule={"lr": 1e30})
    with pytest.raises(TrainingError, match=r"^round 1: .*6 of 6 .*Lower the learning rate"):
        execute(made, tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").glob("*.json"))


def test_two_runs_do_not_share_a_directory(tmp_path):
    made = experiment(coterie.fedavg(), settings={"rounds": 1})
    execute(made, tmp_path / "run")
    with pytest.raises(RunDirError, match="--resume"):
        execute(made, tmp_path / "run")


def test_a_foreign_checkpoint_is_refused(tmp_path):
    execute(experiment(coterie.fedavg(), settings={"rounds": 2}), tmp_path / "run")
    other = experiment(coterie.fedavg(), digits(seed=1), settings={"rounds": 2})
    with pytest.raises(RunDirError, match="another experiment"):
        execute(other, tmp_path / "run", resume=True)


def test_reinitialised_modules_are_new_draws():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    copy = reinitialised(module)
    assert not torch.equal(module[0].weight, copy[0].weight)


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_a_metric_that_raises_names_the_client(engine):
    def broken(outputs, y):
        raise ZeroDivisionError("no")

    made = experiment(coterie.fedavg(), metrics={"mine": broken}, settings={"engine": engine})
    with pytest.raises(TrainingError, match=r"client \d: .*ZeroDivisionError: no"):
        execute(made)


def test_a_run_stopped_before_its_first_checkpoint_begins_anew(tmp_path):
    made = experiment(coterie.fedper(), settings={"rounds": 2})
    whole = execute(made, tmp_path / "whole")
    execute(made, tmp_path / "parts")
    for path in (tmp_path / "parts" / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(RunDirError, match="no checkpoint any more"):
        execute(made, tmp_path / "parts", resume=True)
    (tmp_path / "parts" / "events.jsonl").unlink()
    resumed = execute(made, tmp_path / "parts", resume=True)
    assert same(whole.weights(0), resumed.weights(0))
    kept = (tmp_path / "parts" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in kept] == [1, 2]


def test_a_wrong_model_leaves_no_directory(tmp_path):
    with pytest.raises(ConfigError, match="unknown layer"):
        execute(experiment(coterie.fedavg(), freeze=("nothing",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_renumbered_checkpoint_is_refused(tmp_path):
    made = experiment(coterie.fedavg(), settings={"rounds": 2})
    execute(made, tmp_path / "run")
    for note in (tmp_path / "run" / "checkpoints").glob("*.json"):
        found = json.loads(note.read_text())
        note.write_text(json.dumps(found | {"rounds": found["rounds"] - 1}))
    with pytest.raises(RunDirError, match="damaged"):
        execute(made, tmp_path / "run", resume=True)


@pytest.mark.parametrize("schedule", [{"lr_decay": 0.5}, {"steps": 2}, {"epochs": 2}])
def test_alone_is_method_local(schedule):
    made = {"schedule": schedule, "settings": {"rounds": 4, "alone": True}}
    local = execute(experiment(coterie.local(), **made)).clients
    for ours, row in zip(execute(experiment(coterie.fedavg(), **made)).clients, local, strict=True):
        assert ours["alone_loss"] == row["received_loss"] == row["alone_loss"]
        assert ours["gain"] == ours["received_accuracy"] - row["received_accuracy"]


def test_freezing_an_early_layer_leaves_the_last_one_personal(tmp_path):
    def network():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 10)
        )

    result = execute(experiment(coterie.fedper(k=1), model=network, freeze=("1",)))
    assert result.plan.start.layout.layers == ("1", "3", "4")
    one, other = result.weights(0).tensors(), result.weights(1).tensors()
    assert torch.equal(one["3.weight"], other["3.weight"])
    assert not torch.equal(one["4.weight"], other["4.weight"])
    with pytest.raises(ConfigError, match="are frozen"):
        execute(experiment(coterie.fedper(k=1), model=network, freeze=("4",)))
    with pytest.raises(ConfigError, match="nothing to train"):
        execute(experiment(coterie.fedavg(), model=network, freeze=("1", "3", "4")))


def test_a_refused_method_leaves_the_folder_to_the_corrected_command(tmp_path):
    with pytest.raises(ConfigError, match="9 personal layers"):
        execute(experiment(coterie.fedper(k=9)), tmp_path / "run")
    execute(experiment(coterie.fedper(k=1)), tmp_path / "run")


def test_resume_needs_as_many_rounds_as_are_done(tmp_path):
    execute(experiment(coterie.fedavg(), settings={"rounds": 3}), tmp_path / "run")
    with pytest.raises(ConfigError, match="3 rounds are done already"):
        execute(experiment(coterie.fedavg(), settings={"rounds": 2}), tmp_path / "run", resume=True)


@pytest.mark.parametrize("damage", ["empty", "flip"])
def test_damaged_files_of_an_order_that_was_not_saved_are_made_anew(damage, tmp_path):
    made = experiment(coterie.fedper(), settings={"rounds": 4, "checkpoint_every": 3})
    whole = execute(made, tmp_path / "whole")
    with pytest.raises(Stop):
        execute(made, tmp_path / "parts", watch=stop_after(2))  # saved: round 0 only
    for path in (tmp_path / "parts" / "clients").rglob("2-0.state"):
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(b"" if damage == "empty" else bytes(data))
    resumed = execute(made, tmp_path / "parts", resume=True)
    for client in range(6):
        assert same(whole.weights(client), resumed.weights(client))


def test_damaged_client_state_falls_back_to_the_older_checkpoint(tmp_path):
    made = experiment(coterie.fedper(), settings={"rounds": 3})
    whole = execute(made, tmp_path / "run")
    expected = [whole.weights(c) for c in range(6)]
    (tmp_path / "run" / "clients" / "2" / "3-0.state").write_bytes(b"")
    resumed = execute(made, tmp_path / "run", resume=True)
    assert all(same(resumed.weights(c), expected[c]) for c in range(6))
    assert [e["round"] for e in resumed.history] == [1, 2, 3]


def test_models_that_cannot_be_drawn_anew_are_refused():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(64, 10))

        def forward(self, x):
            return x.flatten(1) @ self.w

    with pytest.raises(ConfigError, match="cannot be initialised again"):
        execute(experiment(coterie.ifca(k=2), model=Fixed))


def test_scores_that_are_not_finite_are_null(tmp_path):
    made = experiment(coterie.fedavg(), metrics={"mine": lambda out, y: float("nan")})
    execute(made, tmp_path / "run")
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        event = json.loads(line, parse_constant=lambda name: pytest.fail(name))
        assert event["received"]["mine"] is None
