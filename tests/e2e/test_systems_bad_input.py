"""The four systems where there is too little, nothing to tell apart, or something that breaks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import coterie
from coterie.client import Schedule
from coterie.data import ClientData, Population, Split
from coterie.errors import TrainingError
from coterie.experiment.experiment import Experiment, Settings, execute
from coterie.experiment.export import reopen
from coterie.methods import make
from coterie.models import make_model

SYSTEMS = {
    "fedclust": {},
    "dc-pfl": {"start": 2, "smooth": 1, "observe": 1},
    "fedtsdp": {},
    "user-centric": {},
}
every_system = pytest.mark.parametrize("name", SYSTEMS)


def flags(name):
    """A system on the command line, with public samples where it needs them."""
    words = ["--method", name]
    for key, value in SYSTEMS[name].items():
        words += ["--set", f"method.{key}={value}"]
    return [*words, "--set", "data.public=30"]


def weights(directory, clients):
    result = reopen(Path(directory))
    return [result.weights(c).vector for c in range(clients)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- too few -------------------------------------------------------------------------------------


@every_system
def test_a_single_client_learns_as_it_would_alone(cli, small, name):
    words = ("run", *small[2:], "--clients", 1, "--set", "data.public=30", "--rounds", 5, "-q")
    for method in ("local", "fedavg"):
        assert cli(*words, "--method", method, "--dir", method).code == 0
    ended = cli(*words, *flags(name), "--dir", "r")
    assert ended.code == 0, ended.err
    assert same(weights("r", 1), weights("local", 1))
    assert same(weights("r", 1), weights("fedavg", 1))


@every_system
def test_two_clients(cli, small, name):
    words = ("run", *small[2:], "--clients", 2, "--rounds", 6, "-q")
    ended = cli(*words, *flags(name), "--dir", "r")
    assert ended.code == 0, ended.err
    assert len(weights("r", 2)) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--method fedclust --set method.clusters=5", "clusters = 5 groups for 4 clients"),
        ("--method user-centric --set method.streams=5", "streams = 5 groups for 4 clients"),
        ("--method fedclust --set method.threshold=-1", "threshold = -1: must be at least 0"),
        ("--method fedclust --set method.threshold=nan", "threshold = nan: must be at least 0"),
        ("--method fedclust --set method.clusters=2 --set method.threshold=1", "not both"),
        ("--method dc-pfl --set method.gamma=2", "gamma = 2: must be at most 1"),
        ("--method dc-pfl --set method.alpha=0", "alpha = 0: must be at least 1"),
        ("--method user-centric --set method.streams=some", "streams = 'some'"),
        ("--method fedtsdp --set data.public=30 --set method.stages=third", "stages = 'third'"),
        ("--method fedtsdp --set data.public=30 --set method.shrink=0", "shrink = 0: must be"),
    ],
)
def test_what_is_refused_leaves_the_folder_to_the_corrected_command(cli, small, words, told):
    run = ("run", *small, "--rounds", 1, "-q", "--dir", "r")
    cli(*run, *words.split()).says(2, told)
    assert not Path("r").exists() or not any(Path("r").iterdir())
    assert cli(*run, "--method", "fedavg").code == 0


def test_public_samples_are_taken_without_being_asked_for(cli, small):
    run = ("run", *small, "--rounds", 1, "--method", "fedtsdp", "-q")
    assert cli(*run, "--dir", "r").code == 0
    assert 'public = "auto"' in Path("r/config.toml").read_text()
    assert cli(*run, "--set", "data.public=30", "--dir", "s").code == 0
    cli(*run, "--set", "data.public=many", "--dir", "t").says(2, "data.public")


def test_fedtsdp_does_not_take_numbers_for_classes(cli, table):
    words = ("run", "--data", "csv", "--folder", table, "--set", "data.options.label=target")
    words += ("--set", 'data.options.columns=["site","kind"]', "--clients", 2, "--rounds", 2)
    words += ("--set", "data.options.target=regression")
    ended = cli(*words, "--engine", "loop", "--method", "fedtsdp", "--set", "data.public=20",
                "--dir", "r")  # fmt: skip
    ended.says(2, "method fedtsdp needs classes")
    assert not Path("r").exists() or not any(Path("r").iterdir())


@pytest.mark.parametrize("value", ["inf", "+inf", "1e999"])
def test_an_infinite_threshold_is_a_threshold(cli, small, value):
    run = ("run", *small, "--rounds", 2, "-q")
    ended = cli(*run, "--method", "fedclust", "--set", f"method.threshold={value}", "--dir", "r")
    assert ended.code == 0, ended.err
    assert cli(*run, "--method", "fedavg", "--dir", "plain").code == 0
    assert same(weights("r", 4), weights("plain", 4))
    first = json.loads(Path("r/events.jsonl").read_text().splitlines()[0])
    assert first["groups"] == [0, 0, 0, 0]
    # As it was written, the run goes on, and so does the file it wrote.
    assert cli("run", "--resume", "r", "--rounds", 3, "-q").code == 0
    assert cli("run", "r/config.toml", "--rounds", 3, "-q", "--dir", "again").code == 0
    assert same(weights("r", 4), weights("again", 4))


# --- nothing to tell apart -----------------------------------------------------------------------


def twins(count=4, label=0):
    """Clients with the very same data, one sample eight times: no order of samples has any say."""
    generator = torch.Generator().manual_seed(label)
    x, y = torch.randn(1, 3, generator=generator), torch.tensor([label])
    split = Split(x.repeat(8, 1), y.repeat(8))
    people = tuple(ClientData(split, split, split) for _ in range(count))
    public = torch.randn(8, 3, generator=generator)
    return Population(people, "table", (3,), ("a", "b", "c"), 3, public=public)


def trained(method, population, **settings):
    """The run, and each client's weights after a few rounds."""
    settings = {"rounds": 8, "engine": "loop", "batch_size": 4, "lr": 0.2} | settings
    shape = {"hidden": (6,)}
    result = coterie.simulate(population, "mlp", method, model_parameters=shape, **settings)
    return result, [result.weights(c).vector for c in range(len(population.clients))]


ONE = {
    "fedclust": coterie.fedclust(),
    "fedclust 0": coterie.fedclust(threshold=0.0),
    "dc-pfl": coterie.dc_pfl(start=2, smooth=1, observe=1),
    "dc-pfl 0": coterie.dc_pfl(start=1, gamma=0.0, alpha=1),
    "fedtsdp": coterie.fedtsdp(),
    "fedtsdp eager": coterie.fedtsdp(hopkins=0.1, shrink=0.5),
    "user-centric 3": coterie.user_centric(streams=3),
    "user-centric auto": coterie.user_centric("auto"),
    "user-centric 2 in parallel": coterie.user_centric(streams=2, parallel=True),
}


@pytest.mark.parametrize("name", ONE)
def test_clients_that_are_all_the_same_learn_as_one(name):
    """All distances are zero: nobody is parted from anybody, and nothing divides by zero."""
    result, ours = trained(ONE[name], twins())
    _, theirs = trained("fedavg", twins())
    assert len(set(result.groups.values())) == 1
    assert same(ours, theirs)


def test_rows_for_each_of_the_same_clients():
    result, ours = trained("user-centric", twins())
    _, theirs = trained("fedavg", twins())
    assert len(set(result.groups.values())) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        coterie.fedclust(), coterie.fedclust(threshold=0.0), coterie.user_centric(streams=2),
        coterie.user_centric("auto"), coterie.user_centric("auto", parallel=True),
        coterie.dc_pfl(start=2, gamma=0.5, dynamic=False), coterie.dc_pfl(start=2, gamma=0.0),
        coterie.fedtsdp(hopkins=0.5, eps_outputs=1e-6, stages="first"),
        coterie.fedtsdp(hopkins=0.5, eps_weights=1e-3, stages="second"),
    ],
    ids=lambda m: f"{m.name} {m.source.parameters}",
)  # fmt: skip
def test_two_kinds_of_the_same_clients_are_two_groups(method):
    """Zero inside and something across: each kind learns as if it were by itself."""
    kinds = [twins(3, label) for label in (0, 2)]
    mixed = replace(kinds[0], clients=tuple(kinds[c % 2].clients[0] for c in range(6)))
    result, _ = trained(method, mixed)
    groups = result.groups
    assert {(c % 2, groups[c]) for c in range(6)} == {(0, groups[0]), (1, groups[1])}
    assert groups[0] != groups[1]


# --- what breaks ---------------------------------------------------------------------------------


@every_system
def test_training_that_diverges_names_a_client(cli, small, name):
    words = ("run", *small, "--rounds", 9, *flags(name), "--dir", "r")
    ended = cli(*words, "--lr", "1e20")
    ended.says(5, "client ", "train.lr")
    assert Path("r/config.toml").exists()
    again = cli("run", "--resume", "r")  # whatever was saved is sound: the same end again
    again.says(5, "client ", "train.lr")


def various(count=4):
    """Clients that differ, each in its own part of a table."""
    generator = torch.Generator().manual_seed(0)
    people = []
    for c in range(count):
        x = torch.randn(26, 3, generator=generator) + c
        y = (x[:, 0] > c).long() + (x[:, 1] > c).long()
        people.append(
            ClientData(*[Split(x[p], y[p]) for p in (slice(16), slice(16, 20), slice(20, 26))])
        )
    public = torch.randn(8, 3, generator=generator)
    return Population(tuple(people), "table", (3,), ("a", "b", "c"), 3, public=public)


@every_system
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_data_that_are_no_numbers_name_their_client(name, value):
    people = various()
    bad = people.clients[2].train.x.clone()
    bad[5, 1] = value
    train = Split(bad, people.clients[2].train.y)
    clients = [replace(c, train=train) if i == 2 else c for i, c in enumerate(people.clients)]
    ill = replace(people, clients=tuple(clients))
    with pytest.raises(TrainingError, match="client 2"):
        trained(make(name, SYSTEMS[name]), ill, outliers="off")
    result = trained(make(name, SYSTEMS[name]), ill)[0]  # the others go on without it
    told = [e["rejected"] for e in (result.begun, *result.history) if "rejected" in e]
    assert told
    assert all(list(left_out) == ["2"] for left_out in told)


def sick(method, task, round, client=2):
    """The same method, one of whose clients diverges, or sends what is no number, in one round."""

    def run(own, arrays, config):
        number = own.round
        upload = method.tasks[task](own, arrays, config)
        if (own.id, number) != (client, round):
            return upload
        if task == "train":
            own.fit(own.base * float("inf"))
        name, model = next(iter(upload.arrays.items()))
        return replace(upload, arrays={name: model * float("nan")})

    return replace(method, tasks={**method.tasks, task: run})


def experiment_of(method, people, rounds):
    return Experiment(
        population=people,
        model=lambda: make_model("mlp", people.shape, people.targets, hidden=(6,)),
        method=method,
        criterion=nn.functional.cross_entropy,
        schedule=Schedule(batch_size=5, lr=0.2, momentum=0.5),
        settings=Settings(rounds=rounds, engine="loop", cohort=0.75, outliers="off"),
    )


@every_system
def test_a_client_that_diverges_stops_the_run_and_what_was_saved_goes_on(name, tmp_path):
    method, people = make(name, SYSTEMS[name]), various()
    whole = execute(experiment_of(method, people, 6), tmp_path / "whole")
    spoiled = next(e["round"] for e in whole.history if e["round"] > 2 and 2 in e["cohort"])
    ill = experiment_of(sick(method, "train", spoiled - 1), people, 6)
    with pytest.raises(TrainingError, match=rf"client 2, round {spoiled}: .* no longer finite"):
        execute(ill, tmp_path / "r")
    events = [json.loads(x) for x in (tmp_path / "r/events.jsonl").read_text().splitlines()]
    assert max(e["round"] for e in events) == spoiled - 1
    with pytest.raises(TrainingError, match=f"client 2, round {spoiled}"):  # still ill
        execute(ill, tmp_path / "r", resume=True)
    well = execute(experiment_of(method, people, 6), tmp_path / "r", resume=True)
    for client in range(4):
        assert torch.equal(well.weights(client).vector, whole.weights(client).vector)
    assert [e["groups"] for e in well.history] == [e["groups"] for e in whole.history]


@pytest.mark.parametrize(("name", "task"), [("fedclust", "halves"), ("user-centric", "gradient")])
def test_a_first_answer_with_nan_stops_the_run(name, task, tmp_path):
    method, people = make(name, SYSTEMS[name]), various()
    with pytest.raises(TrainingError, match=f"client 2, round 1: '.*' from task '{task}'"):
        execute(experiment_of(sick(method, task, 0), people, 3), tmp_path / "r")
    well = execute(experiment_of(method, people, 3), tmp_path / "r", resume=True)
    whole = execute(experiment_of(method, people, 3), tmp_path / "whole")
    for client in range(4):
        assert torch.equal(well.weights(client).vector, whole.weights(client).vector)
